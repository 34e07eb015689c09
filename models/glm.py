"""GLM-4 and GLM-Edge in transformers' form (GLM Team 2024): half of each head is rotated."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("chatglm",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "pad_token_id": 0,
    },
    {"num_key_value_heads": 6, "attention_bias": False, "rms_norm_eps": 0.01, "head_dim": 16,
     "partial_rotary_factor": 1.0},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 500.0, "head_dim": 14,
     "partial_rotary_factor": 0.3, "hidden_act": "gelu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.interleaved = True
    keys.set_defaults(
        num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5,
        max_position_embeddings=131072, attention_bias=True,
    )  # fmt: skip
    c = base_config(keys, partial=1.0)
    fused = "rows" if "blk.0.attn_qkv.weight" in keys.tensors else ""
    return replace(
        c,
        attention=replace(
            c.attention, bias=keys.bias("attention_bias"), out_bias=False, fused=fused
        ),
        mlp=replace(c.mlp, fused=True, bias=False),
    )
