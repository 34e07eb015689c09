"""Marian (Junczys-Dowmunt et al. 2018), as Opus-MT uses it: sinusoidal positions, norms last."""

import numpy as np

from graphllm.model.bart_config import SIDES, bart_config, bart_rules
from graphllm.model.config_keys import Keys
from graphllm.model.encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from graphllm.weights import Weights

MAX_TABLE = 1 << 24
HF = bart_rules()
TINY = (
    {"vocab_size": 131, "d_model": 60, "encoder_layers": 2, "decoder_layers": 3,
     "encoder_attention_heads": 6, "decoder_attention_heads": 5, "encoder_ffn_dim": 52,
     "decoder_ffn_dim": 44, "max_position_embeddings": 64, "decoder_start_token_id": 130,
     "pad_token_id": 130},
    {"scale_embedding": True, "activation_function": "swish", "d_model": 30},
)  # fmt: skip


class Model(EncoderDecoder):
    def __init__(self, cfg: EncoderDecoderConfig, weights: Weights) -> None:
        super().__init__(cfg, weights)
        for side, first in zip(SIDES, (0, -1), strict=True):  # targets count from one
            table = sinusoids(np.arange(first, cfg.context), cfg.dim)
            self.weights.add(f"model.{side}.embed_positions.weight", table)


def sinusoids(positions: np.ndarray, width: int) -> np.ndarray:
    """Return embeddings [positions, width]: sines, then cosines (Vaswani et al. 2017)."""
    frequencies = 10000.0 ** (-2 * (np.arange(width) // 2) / width)
    angles = positions[:, None] * frequencies
    parts = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
    return np.concatenate(parts, axis=1).astype(np.float32)


def config(keys: Keys) -> EncoderDecoderConfig:
    keys.require("share_encoder_decoder_embeddings", True)
    keys.require("decoder_vocab_size", keys.positive("vocab_size"))
    found = bart_config(keys, pre_norm=False, embed_norm=False)
    if found.context * found.dim > MAX_TABLE:  # the tables are not in the file
        text = f"= {found.context} with d_model = {found.dim} is too large"
        raise keys.error("max_position_embeddings", text)
    return found
