"""BLOOM (BigScience 2022): ALiBi instead of rotary positions, and a norm after the embedding."""

from graphllm.model.config_keys import Keys, mha_sizes
from graphllm.model.decoder import Attention, Decoder, DecoderConfig, Layer, Mlp, ModuleNames, Norm
from graphllm.weights.weight_rules import optional_prefix

NAMES = ModuleNames(
    model="transformer", embed="word_embeddings", embed_norm="word_embeddings_layernorm",
    layers="h", norm="ln_f", attn="self_attention", qkv="query_key_value", out="dense",
    mlp="mlp", up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
GGUF = ("bloom",)
GGUF_KEYS = {"layer_norm_epsilon": "attention.layer_norm_epsilon"}
HF = optional_prefix("transformer", "lm_head")
Model = Decoder
TINY = (
    {"vocab_size": 131, "hidden_size": 64, "n_layer": 3, "n_head": 8},
    {"hidden_size": 60, "n_head": 6, "layer_norm_epsilon": 1e-3,
     "apply_residual_connection_post_layernorm": True},
    {"hidden_size": 44, "n_head": 11, "tie_word_embeddings": False, "slow_but_exact": True},
    {"hidden_size": 20, "n_head": 1},
)  # fmt: skip
# Settings of Megatron kernels that do not change the result.
TRAINING = (
    "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi",
    "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact",
)  # fmt: skip


def slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al. 2022).

    For a power of two n they are 2^(-8 i / n); heads beyond n take every other slope of 2 n.
    """
    n = 1 << (heads.bit_length() - 1)
    first = (2 ** (-8 * i / n) for i in range(1, n + 1))
    rest = (2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2))
    return (*first, *rest)


def config(keys: Keys) -> DecoderConfig:
    keys.rename(hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head")
    keys.rename(max_position_embeddings="seq_length", intermediate_size="n_inner")
    keys.ignore(*TRAINING)
    dim, heads, width = mha_sizes(keys)
    fused = "rows" if keys.gguf else "heads"  # llama.cpp's converter sorts the rows
    normed = keys("apply_residual_connection_post_layernorm", bool, False)
    return DecoderConfig(
        vocab=keys.positive("vocab_size"),
        dim=dim,
        context=keys.positive("max_position_embeddings", 2048),  # of all published models
        layers=(Layer(None),) * keys.layers(),
        attention=Attention(
            heads, heads, width, bias=True, out_bias=True, fused=fused, slopes=slopes(heads)
        ),
        mlp=Mlp(keys.positive("intermediate_size", 4 * dim), "gelu_new", gated=False, bias=True),
        norm=Norm(keys.eps("layer_norm_epsilon", 1e-5), "layer"),
        names=NAMES,
        post_layernorm_residual=float(normed),
        tied=keys("tie_word_embeddings", bool, True),
    )
