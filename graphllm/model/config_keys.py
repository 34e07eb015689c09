"""Parts of a `DecoderConfig` that many models read from the same keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from .config import ACTIVATIONS, Attention, DecoderConfig, Layer, Mlp, Norm
from .keys import IGNORED, Keys
from .rope import rope_config

__all__ = [
    "IGNORED", "Keys", "base_config", "kv_head_count", "mha_sizes", "sliding_windows",
    "t5_activation",
]  # fmt: skip


def sliding_windows(keys: Keys, default: Callable[[int], bool], used: bool = True) -> list[int]:
    """Return the sliding window of each layer, 0 for layers without one.

    Args:
        keys: Configuration, of which ``sliding_window`` and ``layer_types`` are read.
        default: Whether layer ``i`` has a window, for files without ``layer_types``.
        used: Whether the model uses ``sliding_window`` at all.
    """
    window = keys.positive("sliding_window", 0) if used else 0
    keys.ignore("sliding_window")
    windowed = keys.each_layer(
        "layer_types",
        {"sliding_attention": True, "full_attention": False},
        (bool(window) and default(i) for i in range(keys.layers())),
    )
    if any(windowed) and not window:
        raise keys.error("layer_types", "has windows, but there is no sliding_window in use")
    return [window if each else 0 for each in windowed]


def mha_sizes(keys: Keys) -> tuple[int, int, int]:
    """Return the hidden size, the number of heads and the head size of multi-head attention.

    ConfigError if the number of heads does not divide the hidden size.
    """
    dim, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    if dim % heads:
        raise keys.error("num_attention_heads", f"= {heads} does not divide the hidden size {dim}")
    if keys.gguf:  # where the number of KV heads may be stated as well
        keys.require("num_key_value_heads", heads)
    return dim, heads, dim // heads


def t5_activation(keys: Keys, default: str) -> tuple[bool, str]:
    """Return whether T5's MLP is gated, and its activation. ConfigError: it is not supported.

    ``default``: of feed_forward_proj, for files that do not state it.
    """
    proj = keys("feed_forward_proj", str, default)
    gate, _, act = proj.rpartition("-")
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise keys.error("feed_forward_proj", f"= {proj!r} is not supported")
    act = "gelu_new" if gate and act == "gelu" else act
    # transformers writes what follows from feed_forward_proj, and reads it back.
    gated = keys("is_gated_act", bool, bool(gate))
    return gated, keys.choice("dense_act_fn", ACTIVATIONS, act)


def kv_head_count(keys: Keys, heads: int, name: str = "num_key_value_heads") -> int:
    """Return the number of KV heads, ``heads`` by default; ConfigError if it does not divide it."""
    count = keys.positive(name, heads)
    if heads % count:
        text = f"{heads} attention heads are not a multiple of {count} KV heads"
        raise ConfigError(f"{keys.source}: {text}")
    return count


def base_config(
    keys: Keys,
    eps: str = "rms_norm_eps",
    act: str = "silu",
    act_key: str = "hidden_act",
    head_dim: int = 0,
    **rope: Any,
) -> DecoderConfig:
    """Return the configuration of a llama-like decoder, read from the keys that llama has.

    Args:
        keys: Configuration.
        eps: Key of the norms' epsilon.
        act: Activation for files that do not state it.
        act_key: Key of the activation.
        head_dim: Head size in place of the key ``head_dim``; 0 reads the key.
        rope: Further arguments of `rope_config`.
    """
    dim, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    # If heads does not divide dim, the default is 0, or the weights have other shapes: both are
    # errors later.
    head_dim = head_dim or keys.positive("head_dim", dim // heads)
    kv_heads = kv_head_count(keys, heads)
    bias = None if keys.gguf else False
    count, rotation = keys.layers(), rope_config(keys, head_dim, **rope)
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=max(keys.positive("max_position_embeddings"), rotation.extended_context),
        layers=(Layer(rotation),) * count,
        attention=Attention(heads, kv_heads, head_dim, bias=bias, out_bias=bias),
        mlp=Mlp(keys.positive("intermediate_size"), keys.choice(act_key, ACTIVATIONS, act)),
        norm=Norm(keys.eps(eps)),
        tied=keys("tie_word_embeddings", bool, False),
    )
