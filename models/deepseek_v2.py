"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention and fine-grained experts.

GGUF files of DeepSeek-V3 have the same architecture name and are read here as well.
"""

from dataclasses import replace
from typing import Any

from graphllm.model.config_keys import Keys
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.gguf_config import MLA_KEYS
from graphllm.model.mla import mla_config, mla_gguf_rules, mla_rules
from graphllm.model.moe import moe_config

HF = mla_rules
GGUF = ("deepseek2",)
GGUF_KEYS = MLA_KEYS
RULES = mla_gguf_rules
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "rms_norm_eps": 1e-6, "max_position_embeddings": 128,
        "q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
        "v_head_dim": 9, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 17, "first_k_dense_replace": 1, "num_key_value_heads": 6,
    },
    {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
     "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "attention_bias": True,
     "mlp_bias": True, "tie_word_embeddings": True},
    {"num_attention_heads": 1, "num_key_value_heads": 1, "first_k_dense_replace": 0,
     "num_experts_per_tok": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
     "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.9,
                      "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.interleaved = True
    keys.set_defaults(q_lora_rank=1536, first_k_dense_replace=0, max_position_embeddings=2048)
    # GGUF files state the scoring: 1 is V2's softmax, 2 is V3's sigmoid. They do not state the
    # method; llama.cpp uses groups wherever their number is given.
    sigmoid = keys.gguf and keys("expert_gating_func", int, 1) == 2
    methods = "greedy", "group_limited_greedy"
    grouped = keys.choice("topk_method", methods, methods[keys.gguf]) == methods[1]
    keys.require("scoring_func", "softmax")
    # With true, the published code would drop the scale, and transformers the normalisation.
    if not keys.gguf:
        keys.require("norm_topk_prob", False)
    return deepseek(keys, sigmoid, grouped)


def deepseek(keys: Keys, sigmoid: bool, grouped: bool = True) -> DecoderConfig:
    """Read the keys that V2 and V3 share; ``sigmoid``: experts are scored as in V3."""
    c, size = mla_config(keys), keys.positive("moe_intermediate_size")
    keys.require("moe_layer_freq", 1)
    keys.ignore("ep_size")  # expert parallelism of the training
    dense = keys("first_k_dense_replace", int)
    groups, top_groups = keys.positive("n_group", 1), keys.positive("topk_group", 1)
    moe: dict[str, Any] = {"groups": groups, "top_groups": top_groups} if grouped else {}
    if sigmoid:
        corrected = not keys.gguf or any("exp_probs_b" in name for name in keys.tensors)
        moe |= {"score": "sigmoid", "top_per_group": 2, "correction": corrected}
    return replace(
        c,
        layers=tuple(replace(layer, moe=i >= dense) for i, layer in enumerate(c.layers)),
        mlp=replace(c.mlp, bias=keys.bias("mlp_bias")),
        moe=moe_config(
            keys, size, "n_routed_experts",
            shared_intermediate_size=size * keys("n_shared_experts", int, 0),
            normalise=keys("norm_topk_prob", bool, False),
            scale=keys.factor("routed_scaling_factor", 1.0), **moe,
        ),
        names=replace(c.names, shared="shared_experts"),
    )  # fmt: skip
