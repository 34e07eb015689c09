"""Qwen2 and Qwen2.5 (Yang et al. 2024): a llama with biases on q, k and v."""

from graphllm.decoder import Decoder, DecoderConfig, Rope
from graphllm.weights.gguf_model import LLAMA_RULES, Keys, base_config

GGUF = ("qwen2",)
Model = Decoder
RULES = LLAMA_RULES


def config(keys: Keys) -> DecoderConfig:
    return base_config(keys, Rope())
