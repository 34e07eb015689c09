"""BART (Lewis et al. 2020): learned positions, norms after attention and MLP."""

from graphllm.model.bart_config import bart_config, bart_rules
from graphllm.model.config_keys import Keys
from graphllm.model.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

Model = EncoderDecoder
HF = bart_rules(offset=2)
TINY = (
    {"vocab_size": 131, "d_model": 60, "encoder_layers": 2, "decoder_layers": 3,
     "encoder_attention_heads": 6, "decoder_attention_heads": 5, "encoder_ffn_dim": 52,
     "decoder_ffn_dim": 44, "max_position_embeddings": 64, "decoder_start_token_id": 2},
    {"scale_embedding": True, "activation_function": "relu"},
)  # fmt: skip


def config(keys: Keys) -> EncoderDecoderConfig:
    return bart_config(keys, pre_norm=False, embed_norm=True)
