"""ChatGLM2, ChatGLM3 and GLM-4 9B as first published, with model_type chatglm.

Their GGUF files have the usual tensor names and are read by `glm`.
"""

from dataclasses import replace

from graphllm.model.config import Attention, DecoderConfig, Layer, Mlp, ModuleNames, Norm, Rope
from graphllm.model.config_keys import Keys, kv_head_count
from graphllm.model.decoder import Decoder
from graphllm.weights.weight_rules import WeightRule

NAMES = ModuleNames(
    model="transformer", embed="embedding.word_embeddings", layers="encoder.layers",
    norm="encoder.final_layernorm", head="transformer.output_layer", attn="self_attention",
    qkv="query_key_value", out="dense", gate_up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
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


def common(keys: Keys) -> None:
    """Read keys that all ChatGLM models have; reject quantised weights and prefix tuning."""
    keys.rename(num_hidden_layers="num_layers")
    keys.require("quantization_bit", 0)
    keys.require("pre_seq_len", None)
    keys.ignore("quantization_embeddings", "prefix_projection")


def config(keys: Keys) -> DecoderConfig:
    common(keys)
    keys.rename(vocab_size="padded_vocab_size")
    dim, heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    keys.ignore(  # settings of kernels that do not change the result
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion",
        "fp32_residual_connection", "original_rope",
    )  # fmt: skip
    keys.set_defaults(multi_query_group_num=1)
    groups = kv_head_count(keys, heads, "multi_query_group_num")
    width = keys.positive("kv_channels", dim // heads)
    grouped = keys("multi_query_attention", bool, False)
    biased = keys("add_bias_linear", bool, False)
    after_norm = keys("apply_residual_connection_post_layernorm", bool, False)
    norm = "rms" if keys("rmsnorm", bool, True) else "layer"
    rope = Rope(10_000.0 * keys.factor("rope_ratio", 1.0), width // 2, "interleaved")
    return DecoderConfig(
        vocab=keys.positive("vocab_size"), dim=dim, context=keys.positive("seq_length"),
        layers=(Layer(rope),) * keys.layers(),
        attention=Attention(
            heads, groups if grouped else heads, width, fused="rows" if grouped else "heads",
            bias=keys("add_qkv_bias", bool, False) or biased, out_bias=biased,
        ),
        mlp=Mlp(keys.positive("ffn_hidden_size"), fused=True, bias=biased),
        norm=Norm(keys.eps("layernorm_epsilon", 1e-5), norm),
        names=NAMES if keys("post_layer_norm", bool, True) else replace(NAMES, norm=""),
        post_layernorm_residual=float(after_norm),
        tied=keys("tie_word_embeddings", bool, False),
    )  # fmt: skip
