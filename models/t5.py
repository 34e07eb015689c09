"""T5 (Raffel et al. 2020), its version 1.1 and Flan-T5: biases of relative positions."""

from graphllm.model.config import Attention, EncoderConfig, EncoderDecoderConfig
from graphllm.model.config_keys import Keys, t5_activation
from graphllm.model.encoder_decoder import EncoderDecoder, Layer, Mlp, ModuleNames, Norm
from graphllm.model.gguf_config import T5_KEYS
from graphllm.model.relative_positions import bias_rules, bucket_sizes
from graphllm.model.shared_embedding import tied_embedding
from graphllm.weights.weight_rules import WeightRule

GGUF = ("t5",)
GGUF_KEYS = T5_KEYS
Model = EncoderDecoder
MAX_TOKENS = 1 << 15  # of a source or a target: positions have no limit
TINY = (
    {"vocab_size": 131, "d_model": 60, "d_kv": 11, "d_ff": 52, "num_layers": 2, "num_heads": 6,
     "num_decoder_layers": 2, "decoder_start_token_id": 0},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 5,
     "relative_attention_num_buckets": 10, "relative_attention_max_distance": 17},
)  # fmt: skip


def HF(config: EncoderDecoderConfig) -> tuple[WeightRule, ...]:
    """Leave out biases that have no effect."""
    bias = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cross = WeightRule("", "{*}.EncDecAttention.relative_attention_bias.weight")
    return *bias_rules(config, bias), cross


def RULES(config: EncoderDecoderConfig) -> tuple[WeightRule, ...]:
    return bias_rules(config, "{:.3}.blk.0.attn_rel_b.weight")


def config(keys: Keys) -> EncoderDecoderConfig:
    keys.rename(num_hidden_layers="num_layers", hidden_size="d_model")
    keys.require("tie_encoder_decoder", False)
    keys.ignore("n_positions", "dropout_rate", "initializer_factor")
    gated = "enc.blk.0.ffn_gate.weight" in keys.tensors  # of a GGUF file
    gate, act = t5_activation(keys, "gated-gelu" if gated else "relu")
    tied, eps = keys("tie_word_embeddings", bool, True), keys.eps("layer_norm_epsilon", 1e-6)
    keys.require("layer_norm_eps", eps)
    # A GGUF file does not state it. Only version 1.0, which has no gates, scales.
    scaled = keys("scale_decoder_outputs", bool, tied and not gated)
    buckets, reach = bucket_sizes(keys)
    embed, copies = tied_embedding(keys, "")  # whatever tie_word_embeddings states
    dim, heads = keys.positive("hidden_size"), keys.positive("num_heads")
    layers = "num_decoder_layers" if keys.has("num_decoder_layers") else "num_hidden_layers"

    def common(side: str, count: int, mlp: int) -> dict:
        """Return what encoder and decoder have; ``mlp``: index of the MLP in a layer."""
        return {
            "vocab": keys.positive("vocab_size"), "dim": dim, "context": MAX_TOKENS,
            "layers": (Layer(None),) * count, "norm": Norm(eps),
            "mlp": Mlp(keys.positive("d_ff"), act, gate),
            "attention": Attention(heads, heads, keys.positive("d_kv"), scale=1.0,
                skip_prefix=side == "decoder", bias_name=f"{side}.relative_attention_bias",
                bias_buckets=buckets, bias_reach=reach),
            "names": ModuleNames(
                model="", embed=embed, layers=f"{side}.block", norm=f"{side}.final_layer_norm",
                attn="layer.0.SelfAttention", pre_attn_norm="layer.0.layer_norm", q="q", k="k",
                v="v", out="o", cross_attn="layer.1.EncDecAttention",
                pre_cross_norm="layer.1.layer_norm", mlp=f"layer.{mlp}.DenseReluDense",
                pre_mlp_norm=f"layer.{mlp}.layer_norm", gate="wi_0", up="wi_1" if gate else "wi",
                down="wo"),
        }  # fmt: skip

    return EncoderDecoderConfig(
        **common("decoder", keys.layers(layers), 2),
        encoder=EncoderConfig(**common("encoder", keys.layers(), 1)),
        tied=tied or not {"lm_head.weight", "output.weight"} & {*keys.tensors},
        logit_scale=dim**-0.5 if scaled else 1.0,
        embed_copies=copies,
    )
