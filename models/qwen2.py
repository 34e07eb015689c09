"""Qwen2 and Qwen2.5 (Yang et al. 2024): a llama with biases of q, k and v."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("qwen2",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    },
    {"num_key_value_heads": 6, "tie_word_embeddings": True},
    {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 9,
     "max_window_layers": 1, "hidden_act": "gelu"},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
     "use_sliding_window": True, "sliding_window": 5, "rms_norm_eps": 0.01, "rope_theta": 1e6,
     "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32768,
        sliding_window=4096,
    )  # fmt: skip
    keys.require("use_mrope", False)
    keys.ignore("dual_chunk_attention_config")  # for contexts above 256k; not in transformers
    c, first = base_config(keys), keys("max_window_layers", int, 28)
    windows = sliding_windows(
        keys, lambda i: i >= first, used=keys("use_sliding_window", bool, False)
    )
    return replace(
        c,
        layers=tuple(replace(e, window=w) for e, w in zip(c.layers, windows)),
        attention=replace(c.attention, bias=True),
    )
