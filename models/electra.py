"""ELECTRA (Clark et al. 2020): BERT whose embedding may be narrower than its layers."""

from graphllm import ops
from graphllm.graph.tensor import Tensor
from graphllm.model.config_keys import Keys
from graphllm.model.encoder import Encoder, EncoderBatch, EncoderConfig, Head
from graphllm.model.encoder_config import (
    MASKED_LM,
    bert_config,
    bert_names,
    encoder_rules,
    roberta_heads,
)
from graphllm.weights.weight_rules import WeightRule

TINY = (
    {"vocab_size": 131, "embedding_size": 28, "hidden_size": 60, "num_hidden_layers": 3,
     "num_attention_heads": 6, "intermediate_size": 52, "max_position_embeddings": 64},
    {"embedding_size": 44, "hidden_size": 44, "num_attention_heads": 11, "hidden_act": "gelu_new"},
)  # fmt: skip


class Model(Encoder):
    def embed(self, batch: EncoderBatch) -> Tensor:
        c, n, width = self.cfg, self.cfg.names, self.cfg.heads[MASKED_LM].width
        x = self.embedding(batch.ids, n.embed, c.vocab, width)
        x = ops.add(x, self.embedding(batch.token_types, n.token_types, c.token_types, width))
        x = ops.add(x, self.embedding(batch.pos, n.positions, c.context, width))
        x = self.norm(x, n.embed_norm)
        return x if width == c.dim else self.linear(x, "embeddings_project", c.dim, True)


def HF(config: EncoderConfig) -> tuple[WeightRule, ...]:
    return encoder_rules(
        config, "generator_predictions", "generator_lm_head", "discriminator_predictions"
    )


def config(keys: Keys) -> EncoderConfig:
    for name in ("is_decoder", "add_cross_attention"):
        keys.require(name, False)
    keys.require("position_embedding_type", "absolute")
    keys.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    out, predictions = "generator_lm_head", "generator_predictions"
    width = keys.positive("embedding_size", 128)
    masked = Head(out, f"{out}.bias", f"{predictions}.dense", width=width,
                  norm=f"{predictions}.LayerNorm")  # fmt: skip
    heads = {**roberta_heads("gelu"), MASKED_LM: masked}
    return bert_config(keys, bert_names("electra"), heads)
