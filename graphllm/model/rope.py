"""Rotary positions out of a configuration: the ways to stretch them over longer contexts.

Formulas: linear, and "dynamic NTK" (kaiokendev and bloc97, 2023); YaRN (Peng et al. 2023, section
3); LongRoPE (Ding et al. 2024); Llama 3.1's (Meta 2024), all as transformers has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ConfigError, join_names, quote
from .config import Rope
from .config_keys import Keys

# Factors that GGUF files have as tensors: of each pair; and LongRoPE's.
FREQUENCIES = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

# The layer type without a window, where rope_parameters have an entry for each layer type.
FULL_ATTENTION = "full_attention"
_OLD = {"type": "rope_type"}  # keys of old files
_NAMES = {"su": "longrope", "ntk": "dynamic"}


class _Scaling:
    """The values of rope_parameters or rope_scaling; all must be read."""

    def __init__(self, keys: Keys, group: str = "") -> None:
        old, new = keys("rope_scaling", dict, {}), keys("rope_parameters", dict, {})
        grouped = [name for name, value in new.items() if isinstance(value, dict)]
        if new and len(grouped) != (len(new) if group else 0):
            kinds = "which the model has not" if grouped else "which the model has"
            text = f"are {'' if grouped else 'not '}told apart by kinds of layers, {kinds}"
            raise keys.error("rope_parameters", text)
        values = dict(old or new)
        if group:  # the old form is of the layers without a window
            values = {**new.get(group, {}), **(old if group == FULL_ATTENTION else {})}
        for before, now in _OLD.items():
            if before in values and not (group and before in old):  # which transformers overlooks
                values.setdefault(now, values.pop(before))
        self.keys, self.values = keys, values
        self.truncate = True
        self._read: set[str] = {"rope_type", "rope_theta", "partial_rotary_factor"}

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def __call__(self, name: str, default: float | None = None) -> float:
        self._read.add(name)
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(f"{name} = {quote(value)} is no number")
        if not 0 <= value < 2**31:  # in these ranges nothing overflows float64
            raise self.error(f"{name} = {value} is not in 0..2^31")
        return float(value)

    def above(self, name: str, least: float, default: float | None = None) -> float:
        value = self(name, default)
        if value <= least:
            raise self.error(f"{name} = {value} is not above {least:g}")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray:
        """A list of numbers above zero, one for each pair."""
        self._read.add(name)
        value = self.values.get(name)
        good = isinstance(value, list) and all(
            isinstance(v, (int, float)) and 0 < v < 1e6 for v in value
        )
        if not good or len(value) != count:  # type: ignore[arg-type]
            raise self.error(f"{name} is no list of {count} numbers above 0")
        return np.array(value, np.float64)

    def ignore(self, *names: str) -> None:
        self._read.update(names)

    def original(self) -> float:
        """The context that the model was trained for before it was stretched; of the two places
        where it may be stated, the outer one counts."""
        name = "original_max_position_embeddings"
        inner = self(name, float(self.keys("max_position_embeddings", int, 2)))
        tokens = self.keys.positive(name, int(inner))
        if tokens < 2:
            raise self.error(f"needs {name} above 1, not {tokens}")
        return float(tokens)

    def error(self, text: str) -> ConfigError:
        return self.keys.error("rope_scaling", text)

    def finish(self) -> None:
        unknown = sorted(set(self.values) - self._read)
        if unknown:
            raise self.error(f"has unknown keys: {join_names(unknown)}")


def rope_config(
    keys: Keys,
    head_dim: int,
    group: str = "",
    theta: str = "rope_theta",
    base: float = 10_000.0,
    partial: float | None = None,
    truncate: bool = True,
    stated: bool = False,
) -> Rope:
    """How heads of ``head_dim`` rotate. ConfigError.

    ``group``: the kind of layers, where rope_parameters are given for each; ``theta``: the key of
    the base; ``base``, ``partial`` and ``truncate`` (yarn's): where no key states them. Without
    ``partial`` the family has no partial_rotary_factor: heads rotate as a whole. ``stated``: a
    config.json must say how, since without a word transformers takes a scaling of its own.
    """
    s = _Scaling(keys, group)
    s.truncate = truncate
    if stated and not (keys.gguf or s.values):
        raise s.error("is missing, and has no usual value")
    outer = keys.factor(theta, base)
    base = s.above("rope_theta", 0, outer) if "rope_theta" in s else outer
    dims = _dims(keys, s, head_dim, partial)
    name = s.values.get("rope_type")
    name = "default" if name is None else name
    name = _NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in _KINDS:
        raise s.error(f"rope_type {quote(name)} is not supported, only {', '.join(_KINDS)}")
    if keys.gguf and LONG_FACTORS in keys.tensors:  # phi3's files state no kind
        name = "longrope"
    style = "interleaved" if keys.interleaved else "half"
    stored = keys.gguf and FREQUENCIES in keys.tensors
    rope = _KINDS[name](s, Rope(base, dims, style, factors=FREQUENCIES if stored else ()))
    s.finish()
    return rope


def _dims(keys: Keys, s: _Scaling, head_dim: int, usual: float | None) -> int:
    """How many columns of a head rotate."""
    if keys.gguf:
        name, dims = "rotary_dim", keys.positive("rotary_dim", int(head_dim * (usual or 1)))
    else:
        name, partial = "partial_rotary_factor", keys.factor("partial_rotary_factor", usual or 1.0)
        partial = s(name, partial)
        if usual is None and partial != 1:
            raise keys.error(name, f"= {partial} is not supported: the model has no such key")
        dims = int(head_dim * partial)
    if dims % 2 or not 0 < dims <= head_dim:
        raise keys.error(name, f"makes {dims} of {head_dim} columns rotate, which are no pairs")
    return dims


def _default(s: _Scaling, rope: Rope) -> Rope:
    s.ignore(*s.values)  # a factor of an unscaled rope says nothing
    return _with(rope, attention_factor=_gguf_attention_factor(s))


def _linear(s: _Scaling, rope: Rope) -> Rope:
    s.ignore("original_max_position_embeddings")
    if s.keys.gguf:  # as llama.cpp has it, which reads yarn's keys and uses them for yarn alone
        s.ignore("beta_fast", "beta_slow", "yarn_log_multiplier")
    factor = s.above("factor", 0)
    return _with(rope, scale=1.0 / factor, attention_factor=_gguf_attention_factor(s))


def _gguf_attention_factor(s: _Scaling) -> float:
    """What llama.cpp multiplies rotated rows by, whatever the type of the scaling."""
    return s.above("attention_factor", 0, 1.0) if s.keys.gguf else 1.0


def _dynamic(s: _Scaling, rope: Rope) -> Rope:
    """Where it begins is the context that the configuration states, even if there is another."""
    s.ignore("original_max_position_embeddings")
    original, factor = s.keys.positive("max_position_embeddings"), s.above("factor", 0)
    if rope.dims == 2:
        raise s.error("dynamic needs more than one pair of columns that rotate")
    extended = _extended_context(original, factor)
    return _with(rope, original_context=original, dynamic_factor=factor, extended_context=extended)


def _extended_context(original: float, factor: float) -> int:
    """The tokens that a context of ``original`` is stretched to."""
    return min(int(original * factor), 2**31 - 1)


def _frequencies(rope: Rope) -> np.ndarray:
    """Radians a position of each pair, float64."""
    return rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)


def _with(rope: Rope, frequencies: np.ndarray | None = None, **changes: Any) -> Rope:
    """``rope`` with other frequencies."""
    if frequencies is not None:
        changes["factors"] = tuple((_frequencies(rope) / frequencies).tolist())
    return replace(rope, **changes)


def _llama3(s: _Scaling, rope: Rope) -> Rope:
    """Long waves are stretched, short ones left, those between mixed."""
    factor, low, high = s.above("factor", 0), s("low_freq_factor"), s("high_freq_factor")
    if high <= low:
        raise s.error(f"high_freq_factor = {high} is not above low_freq_factor = {low}")
    plain = _frequencies(rope)
    turns = s.original() * plain / (2 * math.pi)  # within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return _with(rope, plain * ((1 - smooth) / factor + smooth))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(s: _Scaling, rope: Rope) -> Rope:
    """Waves that turn less than ``beta_slow`` times are stretched, those of more than ``beta_fast``
    left, and a ramp over the pairs in between."""
    original = s.original()
    factor = s.above("factor", 0, s.keys("max_position_embeddings", int, 1) / original)
    fast, slow = s.above("beta_fast", 0, 32.0), s.above("beta_slow", 0, 1.0)

    def pair(turns: float) -> float:
        """Where waves turn so often within the original context, as a column."""
        return rope.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    if rope.base <= 1:
        raise s.error(f"yarn needs a base above 1, not {rope.base}")
    low, high = pair(fast), pair(slow)
    if s.values.get("truncate", s.truncate):
        low, high = math.floor(low), math.ceil(high)
    # That it was trained at that length; a factor of vLLM's, which transformers leaves out.
    s.ignore("truncate", "finetuned", "attn_factor")
    low, high = max(low, 0), min(high, rope.dims - 1)
    high = high + 0.001 if low == high else high
    stretched = np.clip((np.arange(rope.dims // 2) - low) / (high - low), 0, 1)
    plain = _frequencies(rope)
    return _with(
        rope,
        plain * (stretched / factor + 1 - stretched),
        attention_factor=_yarn_attention_factor(s, factor),
        extended_context=_extended_context(original, factor),
    )


def _yarn_attention_factor(s: _Scaling, factor: float) -> float:
    if s.keys.gguf:  # llama.cpp multiplies the two; with a multiplier, see `yarn_score_scale`
        usual = 1.0 if "yarn_log_multiplier" in s else _mscale(factor)
        s.ignore("yarn_log_multiplier")
        return s("attention_factor", 1.0) * usual
    if "attention_factor" in s:
        s.ignore("mscale", "mscale_all_dim")
        return s("attention_factor")
    whole, all_dims = s("mscale", 0.0), s("mscale_all_dim", 0.0)
    if whole and all_dims:
        return _mscale(factor, whole) / _mscale(factor, all_dims)
    return _mscale(factor)


def yarn_score_scale(keys: Keys) -> float:
    """What the scores of latent attention are times, where yarn stretches its positions
    (DeepSeek-V2's mscale_all_dim)."""
    s = _Scaling(keys)
    # GGUF has a tenth of it: what the logarithm of the factor is times.
    weight = 10 * s("yarn_log_multiplier", 0.0) if keys.gguf else s("mscale_all_dim", 0.0)
    yarn = s.values.get("rope_type") == "yarn"
    return _mscale(s("factor", 1.0), weight) ** 2 if yarn and weight else 1.0


def _longrope(s: _Scaling, rope: Rope) -> Rope:
    original, pairs = s.original(), rope.dims // 2
    length = s.keys("max_position_embeddings", int, int(original))
    factor = s("factor", length / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = _with(rope, attention_factor=s("attention_factor", 1.0 if s.keys.gguf else usual))
    if s.keys.gguf:
        short, long = (_with(rope, factors=name) for name in (SHORT_FACTORS, LONG_FACTORS))
    else:
        short, long = (
            _with(rope, factors=tuple(s.numbers(name, pairs).tolist()))
            for name in ("short_factor", "long_factor")
        )
    return _with(short, original_context=int(original), long_context=long)


_KINDS: dict[str, Callable[[_Scaling, Rope], Rope]] = {
    "default": _default,
    "none": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
