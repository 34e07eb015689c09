"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts, none of them shared."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.moe import moe_config, sparse_layers
from graphllm.weights.weight_rules import EXPERT_RULES

HF = EXPERT_RULES
GGUF = ("qwen3moe",)
GGUF_KEYS = {"norm_topk_prob": "expert_weights_norm"}
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "num_experts": 9, "num_experts_per_tok": 3,
        "moe_intermediate_size": 17, "norm_topk_prob": True,
    },
    {"num_key_value_heads": 6, "attention_bias": True, "mlp_only_layers": [1],
     "norm_topk_prob": False, "tie_word_embeddings": True},
    {"num_key_value_heads": 1, "head_dim": 16, "decoder_sparse_step": 2, "rope_theta": 1e6,
     "use_sliding_window": True, "sliding_window": 9, "num_experts_per_tok": 1},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=32768)
    keys.set_defaults(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    keys.set_defaults(sliding_window=4096)
    c, bias = base_config(keys), keys.bias("attention_bias")
    used = keys("use_sliding_window", bool, False)
    window = keys.positive("sliding_window", 0) if used else 0
    # max_window_layers is Qwen2's, and the size of a window that is not used has no effect.
    keys.ignore("sliding_window", "max_window_layers")
    keys.require("use_qk_norm", True)  # stated by Qwen3-Coder
    keys.require("qkv_bias", bias)
    keys.require("shared_expert_intermediate_size", 0)
    experts = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
    return replace(
        c,
        layers=tuple(
            replace(layer, window=window, moe=m)
            for layer, m in zip(c.layers, sparse_layers(keys))
        ),
        attention=replace(c.attention, qk_norm="head", bias=bias, out_bias=bias),
        moe=moe_config(
            keys, keys.positive("moe_intermediate_size"), experts,
            normalise=keys("norm_topk_prob", bool, keys.gguf),  # llama.cpp always normalises
        ),
    )  # fmt: skip
