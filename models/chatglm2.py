"""ChatGLM2, ChatGLM3 and GLM-4 9B as first published, whose model_type is chatglm, too."""

from dataclasses import replace

from graphllm.decoder import Attention, Decoder, DecoderConfig, Layer, Mlp, Names, Norm, Rope
from graphllm.weights.gguf_model import rules_for
from graphllm.weights.keys import Keys
from graphllm.weights.rules import WeightRule

NAMES = Names(
    model="transformer", embed="embedding.word_embeddings", layers="encoder.layers",
    norm="encoder.final_layernorm", head="transformer.output_layer", attn="self_attention",
    qkv="query_key_value", out="dense", up="dense_h_to_4h", gate_up="dense_h_to_4h",
    down="dense_4h_to_h",
)  # fmt: skip
GGUF = ("chatglm",)
RULES = rules_for(NAMES)
HF = (WeightRule("", "{*}.inv_freq"),)
Model = Decoder
TINY = (
    {"padded_vocab_size": 131, "hidden_size": 60, "ffn_hidden_size": 52, "num_layers": 3,
     "num_attention_heads": 6, "kv_channels": 12, "seq_length": 128, "layernorm_epsilon": 1e-5,
     "multi_query_attention": True, "multi_query_group_num": 2, "add_qkv_bias": True},
    {"multi_query_group_num": 1, "rope_ratio": 50, "kv_channels": 20,
     "apply_residual_connection_post_layernorm": True, "add_qkv_bias": False},
    {"multi_query_attention": False, "add_bias_linear": True, "tie_word_embeddings": True},
    {"multi_query_group_num": 6, "rmsnorm": False, "post_layer_norm": False,
     "layernorm_epsilon": 1e-3, "add_bias_linear": True},
)  # fmt: skip


def common(keys: Keys) -> tuple[int, int, int]:
    """Width, heads and layers; neither weights quantised in its own way nor trained prompts."""
    keys.rename(num_hidden_layers="num_layers")
    keys.only("quantization_bit", 0)
    keys.only("pre_seq_len", None)
    keys.ignore("quantization_embeddings", "prefix_projection")
    return keys.positive("hidden_size"), keys.positive("num_attention_heads"), keys.layers()


def config(keys: Keys) -> DecoderConfig:
    dim, heads, count = common(keys)
    keys.ignore(  # how sums are rounded or kernels cut, not what is computed
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
        "fp32_residual_connection", "original_rope",
    )  # fmt: skip
    keys.rename(
        vocab_size="padded_vocab_size", max_position_embeddings="seq_length",
        intermediate_size="ffn_hidden_size", head_dim="kv_channels",
        num_key_value_heads="multi_query_group_num", rms_norm_eps="layernorm_epsilon",
    )  # fmt: skip
    width, groups = keys.positive("head_dim", dim // heads), keys.positive("num_key_value_heads", 1)
    grouped, bias = keys("multi_query_attention", bool, keys.gguf), keys.bias("add_bias_linear")
    base = keys.factor("rope_theta", 10_000.0 * keys.factor("rope_ratio", 1.0))
    rope = Rope(base, keys.positive("rotary_dim", width // 2), "interleaved")
    norm = "rms" if keys("rmsnorm", bool, True) else "layer"
    return DecoderConfig(
        vocab=keys.positive("vocab_size"), dim=dim,
        context=keys.positive("max_position_embeddings"), layers=(Layer(rope),) * count,
        attention=Attention(
            heads, groups if grouped else heads, width, bias=keys.bias("add_qkv_bias") or bias,
            out_bias=bias, fused="rows" if grouped else "heads",
        ),
        mlp=Mlp(keys.positive("intermediate_size"), fused=True, bias=bias),
        norm=Norm(keys.eps("rms_norm_eps", 1e-5), norm),
        names=NAMES if keys("post_layer_norm", bool, True) else replace(NAMES, norm=""),
        normed_residual=float(keys("apply_residual_connection_post_layernorm", bool, False)),
        tied=keys("tie_word_embeddings", bool, False),
    )  # fmt: skip
