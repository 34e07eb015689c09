"""Pegasus (Zhang et al. 2020): sinusoidal positions from a table of the file, norms first."""

from graphllm.model.bart_config import bart_config, bart_rules
from graphllm.model.config_keys import Keys
from graphllm.model.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

Model = EncoderDecoder
HF = bart_rules(offset=0)
TINY = (
    {"vocab_size": 131, "d_model": 60, "encoder_layers": 2, "decoder_layers": 2,
     "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 52,
     "decoder_ffn_dim": 52, "max_position_embeddings": 64, "decoder_start_token_id": 0},
)  # fmt: skip


def config(keys: Keys) -> EncoderDecoderConfig:
    return bart_config(keys, pre_norm=True, embed_norm=False)
