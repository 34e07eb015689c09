"""MPNet (Song et al. 2020): RoBERTa without token types, with biases of relative positions."""

from dataclasses import replace

from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderConfig
from graphllm.model.encoder_config import bert_config, bert_names, encoder_rules, roberta_heads
from graphllm.model.relative_positions import BiasByDistance
from graphllm.weights.weight_rules import WeightRule

BUCKETS, REACH = 32, 128  # of distances, as transformers has them whatever config.json states
BIAS = "mpnet.encoder.relative_attention_bias.weight"
Model = Encoder
TINY = (
    {"vocab_size": 131, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 6,
     "intermediate_size": 52, "max_position_embeddings": 66},
    {"hidden_size": 44, "num_attention_heads": 11},
)  # fmt: skip


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    c = config.attention
    bias = BiasByDistance(c.bias_reach, c.bias_buckets, bidirectional=True)
    return (
        *(WeightRule(BIAS, name, bias) for name in (BIAS, BIAS.removeprefix("mpnet."))),
        *encoder_rules(config, "lm_head", "pooler"),
    )


def config(keys: Keys) -> EncoderConfig:
    names = replace(
        bert_names("mpnet"), q="attn.q", k="attn.k", v="attn.v", out="attn.o",
        post_attn_norm="attention.LayerNorm",
    )  # fmt: skip
    c = bert_config(keys, names, roberta_heads(), position_offset=2, token_types=False)
    keys.require("relative_attention_num_buckets", BUCKETS)
    attention = replace(c.attention, bias_name=BIAS, bias_reach=REACH, bias_buckets=BUCKETS)
    return replace(c, attention=attention)
