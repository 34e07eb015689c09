"""Qwen3 (Yang et al. 2025): a norm of each query and key head, and no biases by default."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("qwen3",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "rope_theta": 1e6,
    },
    {"num_key_value_heads": 6, "tie_word_embeddings": True, "attention_bias": True,
     "rms_norm_eps": 0.01},
    {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 9,
     "max_window_layers": 1, "hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
     "use_sliding_window": True, "sliding_window": 5,
     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=32, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=32768,
        sliding_window=4096,
    )  # fmt: skip
    c, first = base_config(keys), keys("max_window_layers", int, 28)
    windows = sliding_windows(
        keys, lambda i: i >= first, used=keys("use_sliding_window", bool, False)
    )
    bias = keys.bias("attention_bias")
    return replace(
        c,
        layers=tuple(replace(e, window=w) for e, w in zip(c.layers, windows)),
        attention=replace(c.attention, bias=bias, out_bias=bias, qk_norm="head"),
    )
