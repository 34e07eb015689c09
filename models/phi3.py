"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): fused q, k and v, and fused gate and up."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("phi3",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 96, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "pad_token_id": 0,
    },
    {"num_key_value_heads": 6, "sliding_window": 9, "rms_norm_eps": 0.01, "rope_theta": 500.0},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
     "original_max_position_embeddings": 12, "rope_scaling": {
         "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.5],
         "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 9.5]}},
    {"hidden_act": "gelu", "original_max_position_embeddings": 64, "rope_scaling": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.5, 3.0, 3.5],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 9.5, 11.0, 20.0]}},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
    )
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        keys.require(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):  # keys of Phi-4 mini
        keys.require(name, 1)
    c, window = base_config(keys, partial=1.0), keys.positive("sliding_window", 0)
    keys.ignore("original_max_position_embeddings")  # unused without scaling
    return replace(
        c,
        layers=tuple(replace(layer, window=window) for layer in c.layers),
        attention=replace(c.attention, fused="rows", bias=False, out_bias=False),
        mlp=replace(c.mlp, fused=True, bias=False),
    )
