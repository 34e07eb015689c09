"""Mixtral (Jiang et al. 2024): a Mistral with experts as MLPs. Its GGUF architecture is llama."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.moe import moe_config
from graphllm.weights import WeightRule
from graphllm.weights.weight_rules import EXPERT_RULES, STACK

_OLD, _NEW = "model.layers.{i}.block_sparse_moe", "model.layers.{i}.mlp"
HF = (
    WeightRule(f"{_NEW}.gate.weight", f"{_OLD}.gate.weight"),
    *(
        WeightRule(f"{_NEW}.experts.{ours}.weight", f"{_OLD}.experts.{{e}}.{w}.weight", STACK)
        for ours, w in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    ),
    *EXPERT_RULES,
)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 37, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "num_local_experts": 5, "num_experts_per_tok": 2,
    },
    {"num_key_value_heads": 6, "sliding_window": 9, "tie_word_embeddings": True},
    {"num_key_value_heads": 1, "num_experts_per_tok": 1, "rope_theta": 1e4, "hidden_act": "gelu"},
    {"num_local_experts": 1, "num_experts_per_tok": 1, "rms_norm_eps": 1e-2},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(num_key_value_heads=8, max_position_embeddings=131072, rope_theta=1e6)
    keys.set_defaults(num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5)
    c = base_config(keys)
    window = keys.positive("sliding_window", 0)
    return replace(
        c,
        layers=tuple(replace(layer, window=window, moe=True) for layer in c.layers),
        moe=moe_config(keys, c.mlp.intermediate_size, "num_local_experts"),
    )
