"""BERT (Devlin et al. 2019); RoBERTa, XLM-RoBERTa and CamemBERT differ in keys and names."""

from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderConfig
from graphllm.model.encoder_config import (
    bert_config,
    bert_heads,
    bert_names,
    encoder_rules,
    roberta_heads,
)
from graphllm.weights.weight_rules import WeightRule

GGUF = ("bert",)
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
# Settings of other tasks, and of the pooler, which the embeddings do not use.
OTHER_TASKS = ("directionality", *(f"pooler_{name}" for name in (
    "fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type",
)))  # fmt: skip


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    """Leave out the heads that are not computed."""
    return encoder_rules(config, "cls", "cls.seq_relationship", "lm_head", "pooler")


def config(keys: Keys) -> EncoderConfig:
    bert = keys("model_type", str, "bert") == "bert"
    for name in ("is_decoder", "add_cross_attention"):
        keys.require(name, False)
    keys.require("position_embedding_type", "absolute")
    keys.ignore(*OTHER_TASKS)
    if bert:
        return bert_config(keys, bert_names("bert"), bert_heads(keys, "bert"))
    first = keys("pad_token_id", int, 1) + 1  # RoBERTa counts on from the padding
    return bert_config(keys, bert_names("roberta"), roberta_heads(), first)
