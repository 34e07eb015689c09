"""DistilBERT (Sanh et al. 2019): BERT without token types and pooler."""

from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderConfig, Head, ModuleNames
from graphllm.model.encoder_config import (
    MASKED_LM,
    SEQUENCE,
    TOKEN,
    TOKEN_HEAD,
    bert_config,
    encoder_rules,
)
from graphllm.weights.weight_rules import WeightRule

Model = Encoder
NAMES = ModuleNames(
    model="distilbert", embed="embeddings.word_embeddings",
    embed_norm="embeddings.LayerNorm", positions="embeddings.position_embeddings",
    layers="transformer.layer", norm="", attn="attention", pre_attn_norm="", q="q_lin", k="k_lin",
    v="v_lin", out="out_lin", post_attn_norm="sa_layer_norm", mlp="ffn", pre_mlp_norm="", up="lin1",
    down="lin2", post_mlp_norm="output_layer_norm",
)  # fmt: skip
TINY = (
    {"vocab_size": 131, "dim": 60, "n_layers": 3, "n_heads": 6, "hidden_dim": 52,
     "max_position_embeddings": 64},
    {"dim": 44, "n_heads": 11, "activation": "relu", "sinusoidal_pos_embds": True},
)  # fmt: skip


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    return encoder_rules(config, "vocab_transform", "vocab_layer_norm", "vocab_projector")


def config(keys: Keys) -> EncoderConfig:
    keys.rename(
        hidden_size="dim", num_hidden_layers="n_layers", num_attention_heads="n_heads",
        intermediate_size="hidden_dim", hidden_act="activation",
    )  # fmt: skip
    # Sinusoidal positions are stored as a table, too; the others are for training.
    keys.ignore("sinusoidal_pos_embds", "tie_weights_", "dropout", "qa_dropout",
                "seq_classif_dropout")  # fmt: skip
    keys.require("layer_norm_eps", 1e-12)  # transformers does not read it
    act = keys("hidden_act", str, "gelu")
    heads = {
        SEQUENCE: Head(
            "classifier", "classifier.bias", "pre_classifier", act="relu", pooling="cls"
        ),
        TOKEN: TOKEN_HEAD,
        MASKED_LM: Head(
            "vocab_projector", "vocab_projector.bias", "vocab_transform", act=act,
            norm="vocab_layer_norm",
        ),
    }  # fmt: skip
    return bert_config(keys, NAMES, heads, token_types=False)
