"""Llama 1, 2 and 3 (Touvron et al. 2023), and what GGUF files call llama."""

from graphllm.decoder import Decoder, DecoderConfig, Rope
from graphllm.weights import WeightRule
from graphllm.weights.gguf_model import LLAMA_RULES, Keys, base_config

GGUF = ("llama",)
Model = Decoder
RULES = (*LLAMA_RULES, WeightRule("rope_freqs.weight", "rope_freqs.weight"))


def config(keys: Keys) -> DecoderConfig:
    # GGUF stores q and k rows permuted so that rotation pairs are neighbours.
    factors = "rope_freqs.weight" if keys.has_tensor("rope_freqs.weight") else ""
    return base_config(keys, Rope(style="interleaved", factors=factors))
