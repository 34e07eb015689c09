"""Rotary position embedding as a configuration states it, with scaling to longer contexts.

Formulas: linear and "dynamic NTK" (kaiokendev and bloc97, 2023); YaRN (Peng et al. 2023, section
3); LongRoPE (Ding et al. 2024); Llama 3.1's (Meta 2024); all as transformers implements them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import ConfigError, join_names, quote
from .config import Rope
from .keys import Keys

# Tensors of GGUF files that hold a frequency factor for each pair; the last two are LongRoPE's.
FREQUENCIES = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

FULL_ATTENTION = "full_attention"  # the layer type without a window
_OLD_KEYS = {"type": "rope_type"}
_OLD_TYPES = {"su": "longrope", "ntk": "dynamic"}


class _Scaling:
    """Values of rope_parameters or rope_scaling. A value that nothing reads is an error.

    Args:
        keys: Configuration.
        layer_type: Entry of rope_parameters, for models whose layer types rotate differently.
        old_form: Whether rope_scaling applies to this layer type.
    """

    def __init__(self, keys: Keys, layer_type: str = "", old_form: bool = True) -> None:
        old, new = keys("rope_scaling", dict, {}), keys("rope_parameters", dict, {})
        by_type = [name for name, value in new.items() if isinstance(value, dict)]
        if new and len(by_type) != (len(new) if layer_type else 0):
            text = "must not be" if by_type else "must be"
            raise keys.error("rope_parameters", f"{text} given per layer type for this model")
        values = dict(old or new)
        if layer_type:
            values = {**new.get(layer_type, {}), **(old if old_form else {})}
        for before, now in _OLD_KEYS.items():
            # transformers ignores an old key next to entries per layer type.
            if before in values and not (layer_type and before in old):
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
            raise self.error(f"{name} = {quote(value)} is not a number")
        if not 0 <= value < 2**31:  # keeps float64 computations from overflowing
            raise self.error(f"{name} = {value} is not in 0..2^31")
        return float(value)

    def above(self, name: str, least: float, default: float | None = None) -> float:
        value = self(name, default)
        if value <= least:
            raise self.error(f"{name} = {value} must be above {least:g}")
        return value

    def numbers(self, name: str, count: int) -> np.ndarray:
        """Return a list of ``count`` positive numbers as float64; ConfigError otherwise."""
        self._read.add(name)
        value = self.values.get(name)
        good = isinstance(value, list) and all(
            isinstance(v, (int, float)) and 0 < v < 1e6 for v in value
        )
        if not good or len(value) != count:  # type: ignore[arg-type]
            raise self.error(f"{name} is not a list of {count} positive numbers")
        return np.array(value, np.float64)

    def ignore(self, *names: str) -> None:
        self._read.update(names)

    def original_context(self) -> float:
        """Return the context length before the extension, in tokens.

        A value of the configuration takes precedence over one of rope_scaling.
        """
        name = "original_max_position_embeddings"
        inner = self(name, float(self.keys("max_position_embeddings", int, 2)))
        tokens = self.keys.positive(name, int(inner))
        if tokens < 2:
            raise self.error(f"{name} = {tokens} must be above 1")
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
    layer_type: str = "",
    theta: str = "rope_theta",
    base: float = 10_000.0,
    partial: float | None = None,
    truncate: bool = True,
    required: bool = False,
    old_form: bool = True,
) -> Rope:
    """Read how heads of ``head_dim`` columns are rotated.

    Args:
        keys: Configuration.
        head_dim: Columns of a head.
        layer_type: Entry of rope_parameters, for models whose layer types rotate differently.
        theta: Key of the base.
        base: Base for files that do not state it.
        partial: Share of a head that is rotated, for files that do not state it; None for models
            without partial_rotary_factor, whose heads are rotated as a whole.
        truncate: Default of YaRN's key ``truncate``.
        required: Whether a config.json must have rope_scaling or rope_parameters, for models to
            which transformers would otherwise apply a scaling of its own.
        old_form: Whether rope_scaling applies to this layer type.

    Raises:
        ConfigError: A value is missing, out of range or not supported, or a key is unknown.
    """
    s = _Scaling(keys, layer_type, old_form)
    s.truncate = truncate
    if required and not (keys.gguf or s.values):
        raise s.error("is missing and has no default")
    outer = keys.factor(theta, base)
    base = s.above("rope_theta", 0, outer) if "rope_theta" in s else outer
    dims = _dims(keys, s, head_dim, partial)
    name = s.values.get("rope_type")
    name = "default" if name is None else name
    name = _OLD_TYPES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in _KINDS:
        raise s.error(f"rope_type {quote(name)} is not supported, only {', '.join(_KINDS)}")
    if keys.gguf and LONG_FACTORS in keys.tensors:  # phi3 files do not state the type
        name = "longrope"
    style = "interleaved" if keys.interleaved else "half"
    stored = keys.gguf and FREQUENCIES in keys.tensors
    rope = _KINDS[name](s, Rope(base, dims, style, factors=FREQUENCIES if stored else ()))
    s.finish()
    return rope


def _dims(keys: Keys, s: _Scaling, head_dim: int, default: float | None) -> int:
    """Return how many columns of a head are rotated; ``default``: share of the head, see above."""
    if keys.gguf:
        name, dims = "rotary_dim", keys.positive("rotary_dim", int(head_dim * (default or 1)))
    else:
        name, partial = (
            "partial_rotary_factor",
            keys.factor("partial_rotary_factor", default or 1.0),
        )
        partial = s(name, partial)
        if default is None and partial != 1:
            raise keys.error(name, f"= {partial} is not supported by this model")
        dims = int(head_dim * partial)
    if dims % 2 or not 0 < dims <= head_dim:
        raise keys.error(
            name, f"rotates {dims} of {head_dim} columns; it must be an even number of them"
        )
    return dims


def _default(s: _Scaling, rope: Rope) -> Rope:
    s.ignore(*s.values)  # transformers ignores a factor without scaling
    return _with(rope, attention_factor=_gguf_attention_factor(s))


def _linear(s: _Scaling, rope: Rope) -> Rope:
    s.ignore("original_max_position_embeddings")
    if s.keys.gguf:  # llama.cpp reads these keys for every type and uses them for YaRN only
        s.ignore("beta_fast", "beta_slow", "yarn_log_multiplier")
    factor = s.above("factor", 0)
    return _with(rope, scale=1.0 / factor, attention_factor=_gguf_attention_factor(s))


def _gguf_attention_factor(s: _Scaling) -> float:
    """Return llama.cpp's factor on rotated rows, which it applies for every type of scaling."""
    return s.above("attention_factor", 0, 1.0) if s.keys.gguf else 1.0


def _dynamic(s: _Scaling, rope: Rope) -> Rope:
    """Dynamic NTK. It starts at max_position_embeddings, even if another original is stated."""
    s.ignore("original_max_position_embeddings")
    original, factor = s.keys.positive("max_position_embeddings"), s.above("factor", 0)
    if rope.dims == 2:
        raise s.error("rope_type dynamic needs more than one rotary pair")
    extended = _extended_context(original, factor)
    return _with(rope, original_context=original, dynamic_factor=factor, extended_context=extended)


def _extended_context(original: float, factor: float) -> int:
    """Return the context length in tokens after the extension."""
    return min(int(original * factor), 2**31 - 1)


def _frequencies(rope: Rope) -> np.ndarray:
    """Return the angle per position of each pair in radians, float64 [dims / 2]."""
    return rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)


def _with(rope: Rope, frequencies: np.ndarray | None = None, **changes: Any) -> Rope:
    """Return ``rope`` with ``changes`` and, if given, other frequencies."""
    if frequencies is not None:
        changes["factors"] = tuple((_frequencies(rope) / frequencies).tolist())
    return replace(rope, **changes)


def _llama3(s: _Scaling, rope: Rope) -> Rope:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
    factor, low, high = s.above("factor", 0), s("low_freq_factor"), s("high_freq_factor")
    if high <= low:
        raise s.error(f"high_freq_factor = {high} must be above low_freq_factor = {low}")
    plain = _frequencies(rope)
    rotations = s.original_context() * plain / (2 * math.pi)  # within the original context
    smooth = np.clip((rotations - low) / (high - low), 0, 1)
    return _with(rope, plain * ((1 - smooth) / factor + smooth))


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(s: _Scaling, rope: Rope) -> Rope:
    """Divide the frequencies with fewer than ``beta_slow`` rotations by the factor.

    Those with more than ``beta_fast`` are kept, with a linear ramp over the pairs in between.
    Rotations are counted within the original context.
    """
    original = s.original_context()
    factor = s.above("factor", 0, s.keys("max_position_embeddings", int, 1) / original)
    fast, slow = s.above("beta_fast", 0, 32.0), s.above("beta_slow", 0, 1.0)

    def pair(rotations: float) -> float:
        """Return the (fractional) index of the pair with this number of rotations."""
        ratio = original / (rotations * 2 * math.pi)
        return rope.dims * math.log(ratio) / (2 * math.log(rope.base))

    if rope.base <= 1:
        raise s.error(f"rope_type yarn needs a base above 1, not {rope.base}")
    low, high = pair(fast), pair(slow)
    if s.values.get("truncate", s.truncate):
        low, high = math.floor(low), math.ceil(high)
    # "finetuned" states how the model was trained; "attn_factor" is vLLM's, and transformers
    # ignores it.
    s.ignore("truncate", "finetuned", "attn_factor")
    low, high = max(low, 0), min(high, rope.dims - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(rope.dims // 2) - low) / (high - low), 0, 1)
    plain = _frequencies(rope)
    return _with(
        rope,
        plain * (ramp / factor + 1 - ramp),
        attention_factor=_yarn_attention_factor(s, factor),
        extended_context=_extended_context(original, factor),
    )


def _yarn_attention_factor(s: _Scaling, factor: float) -> float:
    if s.keys.gguf:  # llama.cpp multiplies both; for yarn_log_multiplier see `yarn_score_scale`
        default = 1.0 if "yarn_log_multiplier" in s else _mscale(factor)
        s.ignore("yarn_log_multiplier")
        return s("attention_factor", 1.0) * default
    if "attention_factor" in s:
        s.ignore("mscale", "mscale_all_dim")
        return s("attention_factor")
    whole, all_dims = s("mscale", 0.0), s("mscale_all_dim", 0.0)
    if whole and all_dims:
        return _mscale(factor, whole) / _mscale(factor, all_dims)
    return _mscale(factor)


def yarn_score_scale(keys: Keys) -> float:
    """Return the factor on the scores of latent attention under YaRN (mscale_all_dim).

    1.0 without YaRN. Source: DeepSeek-V2's published modeling code.
    """
    s = _Scaling(keys)
    # GGUF stores a tenth of it, the coefficient of the factor's logarithm.
    weight = 10 * s("yarn_log_multiplier", 0.0) if keys.gguf else s("mscale_all_dim", 0.0)
    yarn = s.values.get("rope_type") == "yarn"
    return _mscale(s("factor", 1.0), weight) ** 2 if yarn and weight else 1.0


def _longrope(s: _Scaling, rope: Rope) -> Rope:
    original, pairs = s.original_context(), rope.dims // 2
    length = s.keys("max_position_embeddings", int, int(original))
    factor = s("factor", length / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = _with(rope, attention_factor=s("attention_factor", 1.0 if s.keys.gguf else default))
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
