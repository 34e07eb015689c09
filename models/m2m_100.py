"""M2M-100 (Fan et al. 2020) and NLLB (NLLB Team 2022): sinusoidal positions, norms first."""

from graphllm.model.bart_config import bart_config, bart_rules
from graphllm.model.config_keys import Keys
from graphllm.model.encoder_decoder import EncoderDecoder, EncoderDecoderConfig

Model = EncoderDecoder
HF = bart_rules()
TINY = (
    {"vocab_size": 131, "d_model": 60, "encoder_layers": 2, "decoder_layers": 3,
     "encoder_attention_heads": 6, "decoder_attention_heads": 5, "encoder_ffn_dim": 52,
     "decoder_ffn_dim": 44, "max_position_embeddings": 64, "decoder_start_token_id": 2},
    {"scale_embedding": False, "activation_function": "gelu", "pad_token_id": 3},
)  # fmt: skip


def config(keys: Keys) -> EncoderDecoderConfig:
    return bart_config(
        keys, pre_norm=True, embed_norm=False, positions="sinusoidal", act="relu", scaled=True,
        first_position=keys("pad_token_id", int, 1) + 1, logits_bias=False,
    )  # fmt: skip
