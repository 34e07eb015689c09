"""GLM-4-0414 and GLM-Z1 (Z.ai 2025): `glm` with norms also after attention and MLP."""

from dataclasses import replace

from graphllm.model.config_keys import Keys
from graphllm.model.decoder import Decoder, DecoderConfig
from graphllm.models import glm

GGUF = ("glm4",)
Model = Decoder
TINY = glm.TINY


def config(keys: Keys) -> DecoderConfig:
    c = glm.config(keys)
    names = replace(
        c.names, post_attn_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"
    )
    return replace(c, names=names)
