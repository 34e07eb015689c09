"""XGLM (Lin et al. 2022): sinusoidal positions and a scaled embedding."""

from graphllm.model.config import ACTIVATIONS
from graphllm.model.config_keys import Keys, mha_sizes
from graphllm.model.decoder import Attention, Decoder, DecoderConfig, Layer, Mlp, ModuleNames, Norm
from graphllm.weights.weight_rules import WeightRule

NAMES = ModuleNames(
    norm="layer_norm", pre_attn_norm="self_attn_layer_norm", out="out_proj",
    pre_mlp_norm="final_layer_norm", mlp="", up="fc1", down="fc2",
)  # fmt: skip
HF = (WeightRule("", "model.embed_positions.weights"),)
Model = Decoder
TINY = (
    {"vocab_size": 131, "d_model": 60, "ffn_dim": 52, "num_layers": 3, "attention_heads": 6,
     "max_position_embeddings": 64},
    {"d_model": 45, "attention_heads": 5, "activation_function": "gelu_new",
     "scale_embedding": False},
    {"attention_heads": 1, "tie_word_embeddings": False, "activation_function": "silu"},
)  # fmt: skip


def config(keys: Keys) -> DecoderConfig:
    keys.rename(
        hidden_size="d_model", num_hidden_layers="num_layers",
        num_attention_heads="attention_heads",
    )  # fmt: skip
    keys.require("add_cross_attention", False)
    keys.ignore("dropout", "activation_dropout", "layerdrop", "init_std")  # training
    if keys("pad_token_id", int, 1) > 1:  # the position table is zero at that row
        raise keys.error("pad_token_id", "above 1 is not supported: it would replace a position")
    dim, heads, width = mha_sizes(keys)
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=keys.positive("max_position_embeddings"),
        layers=(Layer(None),) * keys.layers(),
        attention=Attention(heads, heads, width, bias=True, out_bias=True),
        mlp=Mlp(
            keys.positive("ffn_dim"), keys.choice("activation_function", ACTIVATIONS, "gelu"),
            gated=False, bias=True,
        ),
        norm=Norm(1e-5, "layer"),
        names=NAMES,
        embed_scale=dim**0.5 if keys("scale_embedding", bool, True) else 1.0,
        positions="sinusoidal",
        position_offset=2,
        tied=keys("tie_word_embeddings", bool, True),
    )  # fmt: skip
