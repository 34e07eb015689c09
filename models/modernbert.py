"""ModernBERT (Warner et al. 2024): pre-norm, rotary positions, GeGLU, local attention."""

from dataclasses import replace

from graphllm.graph.tensor import Tensor, current_scope
from graphllm.model.config import ACTIVATIONS
from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderConfig, Head, Layer, ModuleNames
from graphllm.model.encoder_config import MASKED_LM, SEQUENCE, TOKEN, bert_config, encoder_rules
from graphllm.model.rope import FULL_ATTENTION, rope_config
from graphllm.weights.weight_rules import WeightRule

NAMES = ModuleNames(
    embed="embeddings.tok_embeddings", embed_norm="embeddings.norm",
    norm="final_norm", pre_attn_norm="attn_norm", attn="attn", qkv="Wqkv", out="Wo",
    pre_mlp_norm="mlp_norm", gate_up="Wi", down="Wo",
)  # fmt: skip
TINY = (
    {"vocab_size": 131, "hidden_size": 60, "num_hidden_layers": 4, "num_attention_heads": 6,
     "intermediate_size": 52, "max_position_embeddings": 64, "local_attention": 10,
     "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3},
    {"hidden_size": 44, "num_attention_heads": 11, "hidden_activation": "silu", "mlp_bias": True,
     "attention_bias": True, "norm_bias": True, "classifier_pooling": "mean", "local_attention": 2,
     "classifier_bias": True, "decoder_bias": False},
)  # fmt: skip


class Model(Encoder):
    def norm(self, x: Tensor, name: str) -> Tensor:
        # The first layer reads the norm of the embedding.
        first = name == NAMES.pre_attn_norm and current_scope() == "model.layers.0"
        return x if first else super().norm(x, name)


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    return encoder_rules(config, "head", "decoder")


def heads(keys: Keys) -> dict[str, Head]:
    dense = {"dense": "head.dense", "dense_bias": keys("classifier_bias", bool, False),
             "norm": "head.norm",
             "act": keys.choice("classifier_activation", ACTIVATIONS, "gelu")}  # fmt: skip
    pooling = keys.choice("classifier_pooling", ("cls", "mean"), "cls")
    return {
        SEQUENCE: Head("classifier", "classifier.bias", pooling=pooling, **dense),
        TOKEN: Head("classifier", "classifier.bias", **dense),
        MASKED_LM: Head("decoder", keys("decoder_bias", bool, True) * "decoder.bias", **dense),
    }


def config(keys: Keys) -> EncoderConfig:
    keys.ignore(  # for training, or the implementation
        "deterministic_flash_attn", "mlp_dropout", "initializer_cutoff_factor", "reference_compile",
        "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index", "cls_token_id",
        "position_embedding_type",
    )  # fmt: skip
    keys.rename(hidden_act="hidden_activation", layer_norm_eps="norm_eps")
    keys.set_defaults(layer_norm_eps=1e-5, max_position_embeddings=8192)
    c = bert_config(keys, NAMES, heads(keys), token_types=False)
    bias, width = keys("attention_bias", bool, False), c.attention.head_dim
    if not (reach := keys.positive("local_attention", 128) // 2):
        raise keys.error("local_attention", "= 1 is not supported")
    wide = Layer(rope_config(keys, width, FULL_ATTENTION, "global_rope_theta", 160_000.0))
    local = Layer(rope_config(keys, width, "sliding_attention", "local_rope_theta"), reach)
    period = keys.positive("global_attn_every_n_layers", 3)
    default = (local if i % period else wide for i in range(len(c.layers)))
    kinds = {FULL_ATTENTION: wide, "sliding_attention": local}
    return replace(
        c, positions="", layers=tuple(keys.each_layer("layer_types", kinds, default)),
        attention=replace(c.attention, bias=bias, out_bias=bias, fused="rows"),
        mlp=replace(c.mlp, fused=True, gated=True, bias=keys("mlp_bias", bool, False)),
        norm=replace(c.norm, bias=keys("norm_bias", bool, False)),
    )  # fmt: skip
