"""gpt-oss (OpenAI 2025): experts with biases and clamped SwiGLU, attention sinks, MXFP4."""

from collections.abc import Callable
from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.moe import moe_config
from graphllm.weights.mxfp4_tensors import Mxfp4
from graphllm.weights.weight_rules import TRANSPOSE, Transform, View, WeightRule

_EXPERTS = "model.layers.{i}.mlp.experts"
_GATE, _UP = slice(0, None, 2), slice(1, None, 2)  # rows of gate and up are interleaved


def _gate_up(end: str, kind: str, rows: Callable[[slice], Transform], part: int = 0) -> WeightRule:
    """Return the rule that splits a tensor of gate_up_proj.

    Args:
        end: End of the tensor's name.
        kind: "weight" or "bias".
        rows: Makes the transform that selects rows.
        part: Part of the weight that the tensor is.
    """
    gate, up = (f"{_EXPERTS}.{name}_proj.{kind}" for name in ("gate", "up"))
    return WeightRule(gate, f"{_EXPERTS}.gate_up_proj{end}", rows(_GATE), part, ((up, rows(_UP)),))


HF = (
    _gate_up("", "weight", lambda rows: View(lambda w: w.swapaxes(1, 2)[:, rows])),
    _gate_up("_bias", "bias", lambda rows: View(lambda b: b[:, rows])),
    _gate_up("_blocks", "weight", Mxfp4),
    _gate_up("_scales", "weight", Mxfp4, 1),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_EXPERTS}.down_proj", TRANSPOSE),
    WeightRule(f"{_EXPERTS}.down_proj.bias", f"{_EXPERTS}.down_proj_bias"),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_EXPERTS}.down_proj_blocks", Mxfp4()),
    WeightRule(f"{_EXPERTS}.down_proj.weight", f"{_EXPERTS}.down_proj_scales", Mxfp4(), 1),
)
GGUF = ("gpt-oss",)
_NORM = "model.layers.{i}.post_attention_layernorm.weight"
RULES = (WeightRule(_NORM, "blk.{i}.post_attention_norm.weight"),)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 37, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 9, "swiglu_limit": 0.5, "rope_scaling": {"rope_type": "yarn",
        "factor": 4.0, "truncate": False, "beta_fast": 4.0, "original_max_position_embeddings": 32},
    },
    {"num_key_value_heads": 6, "num_experts_per_tok": 1, "swiglu_alpha": 1.1, "swiglu_limit": 7.0,
     "attention_bias": False, "tie_word_embeddings": True},
    {"num_key_value_heads": 1, "head_dim": 10, "num_experts_per_tok": 5,
     "rope_scaling": {"rope_type": "default", "rope_theta": 1e4},
     "layer_types": ["full_attention", "full_attention", "sliding_attention"]},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(head_dim=64, max_position_embeddings=131072, sliding_window=128)
    keys.set_defaults(rope_theta=150000.0)
    # The model was trained without truncation; llama.cpp, whose files do not state it, truncates.
    c = base_config(keys, truncate=not keys.gguf, required=True)
    bias, windows = keys.bias("attention_bias", True), sliding_windows(keys, lambda i: i % 2 == 0)
    keys.require("experts_per_token", keys.positive("num_experts_per_tok"))
    keys.ignore("initial_context_length")  # duplicate of a rope_scaling value
    return replace(
        c,
        layers=tuple(replace(e, window=w, moe=True) for e, w in zip(c.layers, windows)),
        attention=replace(c.attention, bias=bias, out_bias=bias, sinks=True),
        moe=moe_config(
            keys, keys.positive("moe_intermediate_size", c.mlp.intermediate_size),
            "num_experts" if keys.gguf else "num_local_experts", score="topk_softmax", bias=True,
            swiglu_alpha=keys.factor("swiglu_alpha", 1.702),
            swiglu_limit=keys.factor("swiglu_limit", 7.0),
        ),
        names=replace(c.names, router="router"),
    )  # fmt: skip
