"""GPT-NeoX and Pythia (Black et al. 2022): parallel attention and MLP, partly rotated heads."""

from dataclasses import replace

from graphllm.model.config_keys import Keys, base_config
from graphllm.model.decoder import Decoder, DecoderConfig, ModuleNames, Norm
from graphllm.weights.weight_rules import WeightRule

NAMES = ModuleNames(
    model="gpt_neox", embed="embed_in", norm="final_layer_norm",
    attn="attention", qkv="query_key_value", out="dense",
    mlp="mlp", up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
GGUF = ("gptneox",)
GGUF_KEYS = {"use_parallel_residual": "use_parallel_residual"}
HF = (
    WeightRule("lm_head.{*}", "embed_out.{*}"),
    WeightRule("", "{*}.attention.bias"),  # the causal mask
    WeightRule("", "{*}.attention.masked_bias"),
    WeightRule("", "{*}.rotary_emb.inv_freq"),
)
Model = Decoder
TINY = (
    {
        "vocab_size": 131, "hidden_size": 60, "intermediate_size": 52, "num_hidden_layers": 3,
        "num_attention_heads": 6, "max_position_embeddings": 128,
    },
    {"num_attention_heads": 3, "use_parallel_residual": False, "rotary_pct": 0.5,
     "rotary_emb_base": 500, "layer_norm_eps": 1e-3, "hidden_act": "gelu_fast"},
    {"num_attention_heads": 1, "attention_bias": False, "tie_word_embeddings": True,
     "rotary_pct": 0.2, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"num_attention_heads": 5, "rotary_pct": 1.0},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    names = {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
    for common, own in names.items():  # transformers reads only GPT-NeoX's own keys
        if not keys.gguf and keys.has(common) and not keys.has(own):
            raise keys.error(common, f"is ignored by transformers without {own}")
    keys.rename(**names)
    keys.set_defaults(max_position_embeddings=2048, layer_norm_eps=1e-5)
    c = base_config(keys, "layer_norm_eps", "gelu", partial=0.25)
    bias = keys.bias("attention_bias", True)
    fused = "rows" if keys.gguf else "heads"  # llama.cpp's converter sorts the rows
    return replace(
        c,
        attention=replace(c.attention, bias=bias, out_bias=bias, fused=fused),
        mlp=replace(c.mlp, gated=False, bias=True),
        norm=Norm(c.norm.eps, "layer"),
        names=NAMES,
        parallel=keys("use_parallel_residual", bool, True),
    )
