"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): DeepSeek-V2 with experts scored by a sigmoid."""

from dataclasses import replace

from graphllm.model.config_keys import Keys
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.model.mla import mla_rules
from graphllm.models import deepseek_v2 as v2

HF = mla_rules
Model = Decoder
TINY = (
    {
        **v2.TINY[0], "q_lora_rank": 20, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
        "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    },
    {"q_lora_rank": None, "n_routed_experts": 6, "n_group": 1, "topk_group": 1,
     "norm_topk_prob": False, "attention_bias": True, "rope_interleave": False,
     "tie_word_embeddings": True},
    {"num_attention_heads": 1, "num_key_value_heads": 1, "first_k_dense_replace": 0,
     "num_experts_per_tok": 1, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        q_lora_rank=1536, first_k_dense_replace=3, n_group=8, topk_group=4, n_shared_experts=1
    )
    keys.set_defaults(norm_topk_prob=True, routed_scaling_factor=2.5, max_position_embeddings=4096)
    keys.interleaved = keys("rope_interleave", bool, True)
    keys.require("topk_method", "noaux_tc")
    keys.require("scoring_func", "sigmoid")
    c = v2.deepseek(keys, sigmoid=True)
    return replace(c, mtp_layers=keys("num_nextn_predict_layers", int, 0))
