"""BERT (Devlin et al. 2019); RoBERTa, XLM-RoBERTa and CamemBERT differ in keys and names."""

from graphllm.model.config import ACTIVATIONS
from graphllm.model.config_keys import Keys, mha_sizes
from graphllm.model.encoder import Attention, Encoder, EncoderConfig, Layer, Mlp, ModuleNames, Norm
from graphllm.weights.weight_rules import WeightRule, optional_prefix

TYPES = ("roberta", "xlm-roberta", "camembert")
Model = Encoder
TINY = (
    {"vocab_size": 131, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6,
     "intermediate_size": 52, "max_position_embeddings": 64},
    {"hidden_size": 44, "num_attention_heads": 11, "hidden_act": "gelu_new", "type_vocab_size": 3,
     "layer_norm_eps": 1e-3},
    {"num_attention_heads": 1, "intermediate_size": 131},
    {"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1,
     "max_position_embeddings": 66},
    {"model_type": "xlm-roberta", "pad_token_id": 4, "max_position_embeddings": 69},
)  # fmt: skip
UNUSED = ("pooler.{*}", "embeddings.position_ids")
# Settings of other tasks, and of the pooler, which the embeddings do not use.
OTHER_TASKS = ("directionality", *(f"pooler_{name}" for name in (
    "fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type",
)))  # fmt: skip


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    """Leave out pooler and language model heads, and rename norms of TensorFlow checkpoints."""
    roots = ("", f"{(model := config.names.model)}.")
    return (
        *(WeightRule("", f"{head}.{{*}}") for head in ("cls", "lm_head")),
        *(WeightRule("", root + name) for root in roots for name in UNUSED),
        *(WeightRule(f"{model}.{{*}}.LayerNorm.{name}", f"{root}{{*}}.LayerNorm.{old}")
          for name, old in (("weight", "gamma"), ("bias", "beta")) for root in reversed(roots)),
        *optional_prefix(model, "lm_head"),
    )  # fmt: skip


def config(keys: Keys) -> EncoderConfig:
    bert = keys("model_type", str, "bert") == "bert"
    for name in ("is_decoder", "add_cross_attention"):
        keys.require(name, False)
    keys.require("position_embedding_type", "absolute")
    keys.ignore("tie_word_embeddings", *OTHER_TASKS)
    dim, heads, width = mha_sizes(keys)
    offset = 0 if bert else keys("pad_token_id", int, 1) + 1  # RoBERTa counts on from the padding
    return EncoderConfig(
        vocab=keys.positive("vocab_size"), dim=dim,
        context=keys.positive("max_position_embeddings", 512) - offset,
        layers=(Layer(None),) * keys.layers(),
        attention=Attention(heads, heads, width, bias=True, out_bias=True),
        mlp=Mlp(
            keys.positive("intermediate_size"), keys.choice("hidden_act", ACTIVATIONS, "gelu"),
            gated=False, bias=True,
        ),
        norm=Norm(keys.eps("layer_norm_eps", 1e-12), "layer"),
        names=names("bert" if bert else "roberta"),
        token_types=keys.positive("type_vocab_size", 2),
        positions="learned", position_offset=offset,
    )  # fmt: skip


def names(model: str) -> ModuleNames:
    """Return the names of the modules; ``model``: prefix of all of them."""
    return ModuleNames(
        model=model, embed="embeddings.word_embeddings", embed_norm="embeddings.LayerNorm",
        positions="embeddings.position_embeddings", token_types="embeddings.token_type_embeddings",
        layers="encoder.layer", norm="", attn="attention", pre_attn_norm="", q="self.query",
        k="self.key", v="self.value", out="output.dense", mlp="", pre_mlp_norm="",
        post_attn_norm="attention.output.LayerNorm", up="intermediate.dense", down="output.dense",
        post_mlp_norm="output.LayerNorm",
    )  # fmt: skip
