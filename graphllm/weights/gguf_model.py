"""From a GGUF file to a model: its configuration keys, read strictly, and its tensors' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..decoder import Attention, DecoderConfig, Layer, Mlp, Norm, Rope
from ..errors import ConfigError, ModelFileError
from ..tensor import Meta
from . import WeightRule, canonical_names
from .gguf import GGUF

T = TypeVar("T")


def _layer(canonical: str, stored: str) -> WeightRule:
    return WeightRule(f"model.layers.{{i}}.{canonical}", f"blk.{{i}}.{stored}")


# The names of the llama family in GGUF (source: gguf-py, `constants.py` and `tensor_mapping.py`).
LLAMA_RULES = (
    WeightRule("model.embed_tokens.weight", "token_embd.weight"),
    WeightRule("model.norm.weight", "output_norm.weight"),
    WeightRule("lm_head.weight", "output.weight"),
    _layer("input_layernorm.weight", "attn_norm.weight"),
    _layer("post_attention_layernorm.weight", "ffn_norm.weight"),
    *(
        _layer(f"{scope}.{name}_proj.{kind}", f"{stored}.{kind}")
        for scope, name, stored in (
            ("self_attn", "q", "attn_q"),
            ("self_attn", "k", "attn_k"),
            ("self_attn", "v", "attn_v"),
            ("self_attn", "o", "attn_output"),
            ("mlp", "gate", "ffn_gate"),
            ("mlp", "up", "ffn_up"),
            ("mlp", "down", "ffn_down"),
        )
        for kind in ("weight", "bias")
    ),
    _layer("self_attn.q_norm.weight", "attn_q_norm.weight"),
    _layer("self_attn.k_norm.weight", "attn_k_norm.weight"),
)


class Keys:
    """The configuration keys of one architecture. Every key must be read, or it is an error."""

    # What says nothing about the computation.
    IGNORED = ("vocab_size",)

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._read: set[str] = set()

    def __call__(self, name: str, kind: type[T], default: Any = ...) -> T:
        """The value of ``<architecture>.name``. ConfigError when missing or of another type."""
        key = self._prefix + name
        self._read.add(key)
        value = self.file.metadata.get(key, default)
        if value is ...:
            raise ConfigError(f"{self.file.path}: missing key {key!r}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.file.path}: {key} = {value!r} is not {kind.__name__}")
        return value

    def positive(self, name: str, default: Any = ...) -> int:
        """A count: at least 1, and within the 32 bits that positions and sizes of steps have."""
        value = self(name, int, default)
        if not 1 <= value < 2**31:
            raise self.error(name, f"= {value} is not in 1..2^31-1")
        return value

    def factor(self, name: str, default: Any = ...) -> float:
        """A number above 0, of a size that float32 can compute with."""
        value = self(name, float, default)
        if not 1e-12 < value < 1e12:
            raise self.error(name, f"= {value} is not in 1e-12..1e12")
        return value

    def layers(self) -> int:
        """The count of layers, of which the file has the last: it may be any number in the key."""
        count = self.positive("block_count")
        last = f"blk.{count - 1}."
        if not any(name.startswith(last) for name in self.file.tensors):
            raise ModelFileError(
                f"{self.file.path}: missing tensor '{last}*', of the last of {count} layers"
            )
        return count

    def error(self, name: str, text: str) -> ConfigError:
        """For the key ``<architecture>.name``."""
        return ConfigError(f"{self.file.path}: {self._prefix}{name} {text}")

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def finish(self) -> None:
        """ConfigError for a key of the architecture that nothing read."""
        known = self._read | {self._prefix + name for name in self.IGNORED}
        for key in self.file.metadata:
            if key.startswith(self._prefix) and key not in known:
                raise ConfigError(f"{self.file.path}: the model does not know the key {key!r}")


def base_config(keys: Keys, rope: Rope) -> DecoderConfig:
    """What the llama family has in common; ``rope`` gives what its keys do not say."""
    dim, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    # Where heads do not divide dim, this is 0 or gives weights of another shape than the file's.
    head_dim = keys.positive("attention.key_length", dim // heads)
    if keys.positive("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"{keys.file.path}: key_length and value_length differ")
    kv_heads = keys.positive("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ConfigError(f"{keys.file.path}: {heads} heads do not share {kv_heads} KV heads")
    eps = keys("attention.layer_norm_rms_epsilon", float)
    if not 0 <= eps < 1:
        raise keys.error("attention.layer_norm_rms_epsilon", f"= {eps} is not in [0, 1)")
    rope = _rope(keys, rope, head_dim)
    return DecoderConfig(
        vocab=_vocab(keys.file),
        dim=dim,
        context=keys.positive("context_length"),
        layers=(Layer(rope),) * keys.layers(),
        attention=Attention(
            heads,
            kv_heads,
            head_dim,
            bias=keys.has_tensor("blk.0.attn_q.bias"),
            out_bias=keys.has_tensor("blk.0.attn_output.bias"),
        ),
        mlp=Mlp(keys.positive("feed_forward_length")),
        norm=Norm(eps),
        tied=not keys.has_tensor("output.weight"),
    )


def _vocab(file: GGUF) -> int:
    """The rows of the embedding, one for each token: else there were ids without a piece."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{file.path}: missing tensor 'token_embd.weight'")
    rows, tokens = embedding.shape[0], file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence) and len(tokens) != rows:
        raise ModelFileError(
            f"{file.path}: 'token_embd.weight' has {rows} rows for {len(tokens)} tokens"
        )
    return rows


def _rope(keys: Keys, rope: Rope, head_dim: int) -> Rope:
    """Rotary positions as the llama family's keys state them."""
    scaling = keys("rope.scaling.type", str, "none")
    factor = keys.factor("rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear"):
        raise keys.error("rope.scaling.type", f"= {scaling!r} is not supported")
    dims = keys.positive("rope.dimension_count", head_dim)
    if dims % 2 or dims > head_dim:
        raise keys.error("rope.dimension_count", f"= {dims} are no pairs within {head_dim}")
    return replace(
        rope,
        base=keys.factor("rope.freq_base", 10_000.0),
        dims=dims,
        scale=1.0 / factor if scaling == "linear" else 1.0,
    )


class GGUFWeights:
    """The tensors of a GGUF file under their canonical names."""

    def __init__(self, file: GGUF, rules: Sequence[WeightRule]) -> None:
        self.file = file
        self._stored = canonical_names(file.tensors, rules, str(file.path))

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def meta(self, name: str) -> Meta | None:
        """ModelFileError for a format that nothing here reads."""
        stored = self._stored.get(name)
        if stored is None:
            return None
        info = self.file.readable(stored)
        return Meta.of(tuple(info.shape), info.dtype)

    def raw(self, name: str) -> np.ndarray:
        return self.file.raw(self._stored[name])

    def release(self, name: str) -> None:
        self.file.release(self._stored[name])
