"""GPT-2 (Radford et al. 2019): learned positions, and weight matrices stored as [in, out]."""

from graphllm.model.config import ACTIVATIONS
from graphllm.model.config_keys import Keys, mha_sizes
from graphllm.model.decoder import Attention, Decoder, DecoderConfig, Layer, Mlp, ModuleNames, Norm
from graphllm.weights.weight_rules import TRANSPOSE, WeightRule, optional_prefix

NAMES = ModuleNames(
    model="transformer", embed="wte", positions="wpe", layers="h", norm="ln_f",
    pre_attn_norm="ln_1", attn="attn", qkv="c_attn", out="c_proj",
    pre_mlp_norm="ln_2", mlp="mlp", up="c_fc", down="c_proj",
)  # fmt: skip
GGUF = ("gpt2",)
GGUF_KEYS = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
HF = (
    WeightRule("", "{*}.attn.bias"),  # the causal mask
    WeightRule("", "{*}.attn.masked_bias"),
    *(
        WeightRule(f"transformer.h.{{i}}.{name}.weight", f"{root}h.{{i}}.{name}.weight", TRANSPOSE)
        for root in ("", "transformer.")
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ),
    *optional_prefix("transformer", "lm_head"),
)
Model = Decoder
TINY = (
    {"vocab_size": 131, "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 64},
    {"n_head": 3, "n_inner": 52, "scale_attn_by_inverse_layer_idx": True,
     "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    {"n_head": 1, "scale_attn_weights": False, "reorder_and_upcast_attn": True,
     "tie_word_embeddings": False},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.rename(
        hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head",
        max_position_embeddings="n_positions", intermediate_size="n_inner",
    )  # fmt: skip
    keys.set_defaults(max_position_embeddings=1024)
    keys.require("add_cross_attention", False)
    keys.ignore("reorder_and_upcast_attn")  # float16 rounding
    keys.ignore("n_ctx")  # duplicate of n_positions
    keys.ignore(*(f"summary_{k}" for k in _SUMMARY))  # another task
    keys.ignore("n_special", "predict_special_tokens")  # GPT-1 settings
    dim, heads, width = mha_sizes(keys)
    scale = width**-0.5 if keys("scale_attn_weights", bool, True) else 1.0
    by_layer = keys("scale_attn_by_inverse_layer_idx", bool, False)
    scales = (scale / (i + 1 if by_layer else 1) for i in range(keys.layers()))
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=keys.positive("max_position_embeddings"),
        layers=tuple(Layer(None, scale=each) for each in scales),
        attention=Attention(heads, heads, width, bias=True, out_bias=True, fused="rows"),
        mlp=Mlp(
            keys.positive("intermediate_size", 4 * dim),
            keys.choice("activation_function", ACTIVATIONS, "gelu_new"), gated=False, bias=True,
        ),
        norm=Norm(keys.eps("layer_norm_epsilon", 1e-5), "layer"),
        names=NAMES,
        positions="learned",
        tied=keys("tie_word_embeddings", bool, True),
    )  # fmt: skip


_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
