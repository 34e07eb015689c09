"""T5 (Raffel et al. 2020), its version 1.1 and Flan-T5: biases of relative positions."""

from graphllm.model.config import ACTIVATIONS, Attention, EncoderConfig, EncoderDecoderConfig
from graphllm.model.config_keys import Keys
from graphllm.model.encoder_decoder import EncoderDecoder, Layer, Mlp, ModuleNames, Norm
from graphllm.model.relative_positions import BiasByDistance, bucket_sizes
from graphllm.weights.weight_rules import WeightRule

Model = EncoderDecoder
MAX_TOKENS = 1 << 15  # of a source or a target: positions have no limit
TINY = (
    {"vocab_size": 131, "d_model": 60, "d_kv": 11, "d_ff": 52, "num_layers": 2, "num_heads": 6,
     "num_decoder_layers": 2, "decoder_start_token_id": 0},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_heads": 5,
     "relative_attention_num_buckets": 10, "relative_attention_max_distance": 17},
)  # fmt: skip


def HF(config: EncoderDecoderConfig) -> tuple[WeightRule, ...]:
    """Store biases by distance, not by bucket, and leave out copies of the embedding."""
    path = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    sides = (("encoder", config.encoder.attention, True), ("decoder", config.attention, False))
    biases = (
        WeightRule(a.bias_name, path.format(side), BiasByDistance(a.bias_reach, a.bias_buckets, b))
        for side, a, b in sides
    )
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = (f"{side}.embed_tokens.weight" for side, *_ in sides)
    return *biases, *(WeightRule("", name) for name in (unused, *copies))


def config(keys: Keys) -> EncoderDecoderConfig:
    keys.rename(num_hidden_layers="num_layers", hidden_size="d_model")
    keys.set_defaults(num_decoder_layers=keys("num_hidden_layers", int))
    keys.require("tie_encoder_decoder", False)
    keys.ignore("n_positions", "dropout_rate", "initializer_factor", "dense_act_fn", "is_gated_act")
    proj, tied = keys("feed_forward_proj", str, "relu"), keys("tie_word_embeddings", bool, True)
    gate, _, act = proj.rpartition("-")
    if gate not in ("", "gated") or act not in ACTIVATIONS:
        raise keys.error("feed_forward_proj", f"= {proj!r} is not supported")
    buckets, reach = bucket_sizes(keys)
    dim, heads, layers = keys.positive("hidden_size"), keys.positive("num_heads"), keys.layers()

    def common(side: str, count: int, mlp: int) -> dict:
        """Return what encoder and decoder have; ``mlp``: index of the MLP in a layer."""
        return {
            "vocab": keys.positive("vocab_size"), "dim": dim, "context": MAX_TOKENS,
            "layers": (Layer(None),) * count, "norm": Norm(keys.eps("layer_norm_epsilon", 1e-6)),
            "mlp": Mlp(keys.positive("d_ff"), "gelu_new" if gate + act == "gatedgelu" else act,
                       gated=bool(gate)),
            "attention": Attention(
                heads, heads, keys.positive("d_kv"), scale=1.0, skip_prefix=side == "decoder",
                bias_name=f"{side}.relative_attention_bias",
                bias_buckets=buckets, bias_reach=reach),
            "names": ModuleNames(
                model="", embed="shared", layers=f"{side}.block", norm=f"{side}.final_layer_norm",
                attn="layer.0.SelfAttention", pre_attn_norm="layer.0.layer_norm", q="q", k="k",
                v="v", out="o", cross_attn="layer.1.EncDecAttention",
                pre_cross_norm="layer.1.layer_norm", mlp=f"layer.{mlp}.DenseReluDense",
                pre_mlp_norm=f"layer.{mlp}.layer_norm", gate="wi_0", up="wi_1" if gate else "wi",
                down="wo"),
        }  # fmt: skip

    return EncoderDecoderConfig(
        **common("decoder", keys.layers("num_decoder_layers"), 2),
        encoder=EncoderConfig(**common("encoder", layers, 1)),
        tied=tied or "lm_head.weight" not in keys.tensors,
        logit_scale=dim**-0.5 if keys("scale_decoder_outputs", bool, tied) else 1.0,
    )
