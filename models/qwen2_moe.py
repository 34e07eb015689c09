"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): experts and a gated shared expert."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config, sliding_windows
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.moe import moe_config, sparse_layers
from graphllm.weights.weight_rules import EXPERT_RULES

HF = EXPERT_RULES
GGUF = ("qwen2moe",)
GGUF_KEYS = {"norm_topk_prob": "expert_weights_norm"}
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 17, "shared_expert_intermediate_size": 23,
    },
    {"num_key_value_heads": 6, "norm_topk_prob": True, "num_experts_per_tok": 3,
     "tie_word_embeddings": True, "decoder_sparse_step": 2, "rope_theta": 1e6},
    {"num_key_value_heads": 1, "mlp_only_layers": [0, 2], "use_sliding_window": True,
     "sliding_window": 9, "max_window_layers": 2, "qkv_bias": False, "num_experts_per_tok": 1},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(num_key_value_heads=16, rms_norm_eps=1e-6, max_position_embeddings=32768)
    keys.set_defaults(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408)
    keys.set_defaults(shared_expert_intermediate_size=5632, sliding_window=4096)
    c, last = base_config(keys), keys("max_window_layers", int, 28)
    used = keys("use_sliding_window", bool, False)
    windows = sliding_windows(keys, lambda i: i < last and i % 2 == 0, used=used)
    each = zip(c.layers, windows, sparse_layers(keys))
    return replace(
        c,
        layers=tuple(replace(layer, window=w, moe=m) for layer, w, m in each),
        attention=replace(c.attention, bias=keys.bias("qkv_bias", True)),
        moe=moe_config(
            keys, keys.positive("moe_intermediate_size"),
            normalise=keys("norm_topk_prob", bool, False),
            shared_intermediate_size=keys.positive("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
    )  # fmt: skip
