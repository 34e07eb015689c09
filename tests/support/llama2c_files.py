"""llama2.c files for tests."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

DIM, HIDDEN, LAYERS, HEADS, KV, VOCAB, CONTEXT = 24, 20, 3, 6, 2, 17, 11
NORMS = {"rms_att": "input_layernorm", "rms_ffn": "post_attention_layernorm"}
MATRICES = {
    "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj", "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj",
}  # fmt: skip


def write_model(path: Path, shared: bool) -> dict[str, np.ndarray]:
    """Write a model file; return its weights by Hugging Face names."""
    rng = np.random.default_rng(0)
    width = DIM // HEADS

    def stack(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype("<f4")

    named = {
        "embed": stack(VOCAB, DIM),
        "rms_att": stack(LAYERS, DIM),
        "wq": stack(LAYERS, HEADS * width, DIM),
        "wk": stack(LAYERS, KV * width, DIM),
        "wv": stack(LAYERS, KV * width, DIM),
        "wo": stack(LAYERS, DIM, HEADS * width),
        "rms_ffn": stack(LAYERS, DIM),
        "w1": stack(LAYERS, HIDDEN, DIM),
        "w2": stack(LAYERS, DIM, HIDDEN),
        "w3": stack(LAYERS, HIDDEN, DIM),
        "rms_final": stack(DIM),
        "freq_cis_real": stack(CONTEXT, width // 2),
        "freq_cis_imag": stack(CONTEXT, width // 2),
    }
    if not shared:
        named["wcls"] = stack(VOCAB, DIM)
    vocab = VOCAB if shared else -VOCAB
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV, vocab, CONTEXT)
    path.write_bytes(header + b"".join(value.tobytes() for value in named.values()))
    weights = {"model.embed_tokens.weight": named["embed"], "model.norm.weight": named["rms_final"]}
    if not shared:
        weights["lm_head.weight"] = named["wcls"]
    for i in range(LAYERS):
        for short, name in (NORMS | MATRICES).items():
            weights[f"model.layers.{i}.{name}.weight"] = named[short][i]
    return weights
