"""Gemma 3, text only (Gemma Team 2025): five windowed layers to each global one."""

from dataclasses import replace

from graphllm.decoder import Decoder, DecoderConfig, Layer, Norm, Rope
from graphllm.weights import WeightRule
from graphllm.weights.gguf_model import LLAMA_RULES, Keys, base_config

GGUF = ("gemma3",)
Model = Decoder
RULES = (
    WeightRule("model.layers.{i}.pre_feedforward_layernorm.weight", "blk.{i}.ffn_norm.weight"),
    WeightRule(
        "model.layers.{i}.post_feedforward_layernorm.weight", "blk.{i}.post_ffw_norm.weight"
    ),
    WeightRule(
        "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.post_attention_norm.weight"
    ),
    *LLAMA_RULES,
)


def config(keys: Keys) -> DecoderConfig:
    window = keys.positive("attention.sliding_window")
    period = keys.positive("attention.sliding_window_pattern", 6)
    local = Rope(base=keys.factor("rope.freq_base_swa", 10_000.0))
    c = base_config(keys, Rope())
    layers = tuple(
        layer if i % period == period - 1 else Layer(local, window)
        for i, layer in enumerate(c.layers)
    )
    # The 27B's queries are scaled by dim / heads, not by the width of a head (llama.cpp tells it by
    # its layers, too: GGUF has no key for it).
    scale = (c.dim / c.attention.heads) ** -0.5 if len(layers) == 62 else 0.0
    return replace(
        c,
        layers=layers,
        attention=replace(c.attention, qk_norm=True, scale=scale),
        mlp=replace(c.mlp, act="gelu"),
        norm=Norm(c.norm.eps, sandwich=True),
        embed_scale=c.dim**0.5,
    )
