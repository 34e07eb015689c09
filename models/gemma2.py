"""Gemma 2 (Gemma Team 2024): sliding windows in every other layer, capped scores and logits."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import SANDWICH_NORMS, Decoder, DecoderConfig
from graphllm.weights.weight_rules import GEMMA_NORM_RULES

GGUF = ("gemma2",)
HF = GEMMA_NORM_RULES
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "sliding_window": 7, "query_pre_attn_scalar": 14,
        "attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "query_pre_attn_scalar": 23,
     "attn_logit_softcapping": None, "rms_norm_eps": 0.01, "rope_theta": 500.0},
    {"num_key_value_heads": 1, "sliding_window": 1, "tie_word_embeddings": False,
     "final_logit_softcapping": None, "hidden_activation": "silu",
     "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=8192,
        tie_word_embeddings=True, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    keys.require("use_bidirectional_attention", False)
    keys.ignore("sliding_window_size", "hidden_act")  # duplicates in the first files
    c = base_config(keys, act="gelu_pytorch_tanh", act_key="hidden_activation")
    bias = keys.bias("attention_bias")
    windows, a = sliding_windows(keys, lambda i: i % 2 == 0), c.attention
    # GGUF has no key for the scale. llama.cpp recognises the 27B, which differs, by its 46 layers.
    width = a.head_dim if len(windows) != 46 else c.dim // a.heads
    caps = (50.0, 30.0) if keys.gguf else (0.0, 0.0)  # missing in the first GGUF files
    return replace(
        c,
        layers=tuple(replace(e, window=w) for e, w in zip(c.layers, windows)),
        attention=replace(
            a, bias=bias, out_bias=bias, softcap=keys.factor("attn_logit_softcapping", caps[0]),
            scale=keys.factor("query_pre_attn_scalar", width) ** -0.5,
        ),
        names=replace(c.names, **SANDWICH_NORMS),
        embed_scale=c.dim**0.5,
        logit_softcap=keys.factor("final_logit_softcapping", caps[1]),
    )  # fmt: skip
