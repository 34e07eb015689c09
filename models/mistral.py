"""Mistral 7B (Jiang et al. 2023): a llama with a sliding window. Its GGUF architecture is llama."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "sliding_window": 9, "tie_word_embeddings": False,
    },
    {"num_key_value_heads": 6, "head_dim": 14, "sliding_window": None, "rope_theta": 1e6},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 0.01,
     "hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0,
                      "original_max_position_embeddings": 32}},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=8, rms_norm_eps=1e-6, max_position_embeddings=131072,
        sliding_window=4096,
    )  # fmt: skip
    c, window = base_config(keys), keys.positive("sliding_window", 0)
    return replace(c, layers=tuple(replace(layer, window=window) for layer in c.layers))
