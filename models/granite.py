"""Granite 3 (IBM 2024): a llama with factors on embedding, scores, residual and logits."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("granite",)
GGUF_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.35,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.01,
     "residual_multiplier": 1.0},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 500.0,
     "hidden_act": "gelu",
     "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.interleaved = keys.gguf  # llama.cpp's converter permutes q and k
    keys.set_defaults(rms_norm_eps=1e-6, max_position_embeddings=2048)
    c, bias = base_config(keys), keys.bias("attention_bias")
    # For a missing key llama.cpp scales scores by head_dim ** -0.5, transformers by 1.
    scale = keys.factor("attention_multiplier", c.attention.head_dim**-0.5 if keys.gguf else 1.0)
    return replace(
        c,
        attention=replace(c.attention, bias=bias, out_bias=bias, scale=scale),
        mlp=replace(c.mlp, bias=keys.bias("mlp_bias")),
        embed_scale=keys.factor("embedding_multiplier", 1.0),
        residual_scale=keys.factor("residual_multiplier", 1.0),
        logit_scale=1 / keys.factor("logits_scaling", 1.0),
    )
