"""OLMo 2 (Walsh et al. 2024): norms after attention and MLP, and over all heads of q and k."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig

GGUF = ("olmo2",)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "rope_theta": 500000.0,
     "rms_norm_eps": 0.01},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_act": "gelu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048)
    c, bias = base_config(keys), keys.bias("attention_bias")
    return replace(
        c,
        attention=replace(c.attention, bias=bias, out_bias=bias, qk_norm="row"),
        names=replace(
            c.names, pre_attn_norm="", post_attn_norm="post_attention_layernorm", pre_mlp_norm="",
            post_mlp_norm="post_feedforward_layernorm",
        ),
    )  # fmt: skip
