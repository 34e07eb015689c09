"""Llama 1, 2 and 3 (Touvron et al. 2023), and all models with GGUF architecture llama."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.moe import moe_config

GGUF = ("llama",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 500000.0},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    {"rope_scaling": {"type": "linear", "factor": 2.5}, "hidden_act": "gelu"},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 20,
     "rms_norm_eps": 0.01},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9,
                      "beta_fast": 3.0, "beta_slow": 0.5, "truncate": False,
                      "original_max_position_embeddings": 32}},
    {"rope_scaling": {"rope_type": "longrope", "factor": 5.0, "short_factor": [1, 1, 1.2, 1.5, 2],
                      "long_factor": [1, 2, 4, 8, 16], "original_max_position_embeddings": 12}},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.interleaved = keys.interleaved or keys.gguf  # llama.cpp's converter permutes q and k
    keys.set_defaults(rms_norm_eps=1e-6, max_position_embeddings=2048)
    keys.require("rope_interleaved", False)
    keys.ignore("is_llama_config")
    c = base_config(keys)
    context = max(c.context, keys.positive("max_sequence_length", 1))  # key of the first files
    bias = keys.bias("attention_bias")
    if keys.gguf and keys.has("num_experts"):  # Mixtral
        hidden = keys.positive("moe_intermediate_size", c.mlp.intermediate_size)
        layers = tuple(replace(layer, moe=True) for layer in c.layers)
        c = replace(c, layers=layers, moe=moe_config(keys, hidden))
    return replace(
        c,
        context=context,
        attention=replace(c.attention, bias=bias, out_bias=bias),
        mlp=replace(c.mlp, bias=keys.bias("mlp_bias")),
    )
