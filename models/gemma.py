"""Gemma (Gemma Team 2024): scaled embeddings, and norm weights stored minus one."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.weights.weight_rules import GEMMA_NORM_RULES

GGUF = ("gemma",)
HF = GEMMA_NORM_RULES
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "hidden_act": "gelu"},
    {"num_key_value_heads": 1, "tie_word_embeddings": False, "rope_theta": 500.0,
     "rms_norm_eps": 0.01, "hidden_act": "silu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=16, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    keys.require("use_bidirectional_attention", False)
    keys.require("hidden_activation", "gelu_pytorch_tanh")  # hidden_act takes precedence
    c, bias = base_config(keys, act="gelu_pytorch_tanh"), keys.bias("attention_bias")
    # The first published files say "gelu" but were trained with the tanh approximation.
    act = "gelu_pytorch_tanh" if c.mlp.act == "gelu" else c.mlp.act
    return replace(
        c,
        attention=replace(c.attention, bias=bias, out_bias=bias),
        mlp=replace(c.mlp, act=act),
        embed_scale=c.dim**0.5,
    )
