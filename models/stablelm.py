"""StableLM 3B and 2 (Bellagamba et al. 2024): layer norms; a quarter of each head is rotated."""

from dataclasses import replace

from graphllm import ops
from graphllm.graph.tensor import Tensor, scope
from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.weights import WeightRule
from graphllm.weights.weight_rules import STACK

GGUF = ("stablelm",)
HF = tuple(
    WeightRule(f"{norm}.weight", f"{norm}.norms.{{e}}.weight", STACK)
    for norm in (f"model.layers.{{i}}.self_attn.{n}_layernorm" for n in "qk")
)
TINY = (
    {
        "vocab_size": 131, "hidden_size": 96, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 128,
    },
    {"num_key_value_heads": 6, "use_qkv_bias": True, "qk_layernorm": True, "layer_norm_eps": 0.01,
     "use_parallel_residual": True, "partial_rotary_factor": 1.0},
    {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 500.0,
     "partial_rotary_factor": 0.625, "hidden_act": "gelu", "qk_layernorm": True},
)  # fmt: skip


class Model(Decoder):
    def norm(self, x: Tensor, name: str) -> Tensor:
        if name not in (self.cfg.names.q_norm, self.cfg.names.k_norm):
            return super().norm(x, name)
        a = self.cfg.attention  # each head has its own norm weights
        heads = a.heads if name == self.cfg.names.q_norm else a.kv_heads
        with scope(name):
            ones = self.constant(f"ones.{a.head_dim}", [1.0] * a.head_dim)
            w = self.vector("weight", heads, a.head_dim).reshape(heads * a.head_dim)
            y = ops.layer_norm(x, ones, eps=self.cfg.norm.eps)
            return ops.mul(y.flatten(), w).heads(heads)


def config(keys: Keys) -> DecoderConfig:
    keys.set_defaults(
        num_key_value_heads=32, layer_norm_eps=1e-5, partial_rotary_factor=0.25,
        max_position_embeddings=4096,
    )  # fmt: skip
    keys.require("rotary_scaling_factor", 1.0)
    c = base_config(keys, eps="layer_norm_eps", partial=1.0)
    normed, parallel = (keys(n, bool, False) for n in ("qk_layernorm", "use_parallel_residual"))
    if keys.gguf:  # known from the tensors; the key for parallel residuals is always true
        normed = "blk.0.attn_q_norm.weight" in keys.tensors
        parallel = "blk.0.ffn_norm.weight" not in keys.tensors
    bias, a, names = keys.bias("use_qkv_bias"), c.attention, c.names
    return replace(
        c,
        attention=replace(a, bias=bias, out_bias=False, qk_norm="head" if normed else ""),
        mlp=replace(c.mlp, bias=False),
        norm=replace(c.norm, kind="layer"),
        names=replace(
            names, pre_mlp_norm="" if parallel else names.pre_mlp_norm, q_norm="q_layernorm",
            k_norm="k_layernorm",
        ),
        parallel=parallel,
    )  # fmt: skip
