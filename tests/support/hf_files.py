"""Hugging Face directories for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny_models as tiny
from safetensors.numpy import save_file

CONFIG = {
    "model_type": "llama", "vocab_size": len(tiny.VOCAB["pieces"]), "hidden_size": tiny.DIM,
    "intermediate_size": tiny.HIDDEN, "num_hidden_layers": tiny.LAYERS,
    "num_attention_heads": tiny.HEADS, "num_key_value_heads": tiny.KV, "head_dim": tiny.WIDTH,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "architectures": ["LlamaForCausalLM"], "rope_scaling": None,
}  # fmt: skip


def write(folder: Path, weights: dict[str, np.ndarray] | None = None, **keys: object) -> Path:
    """Write a directory; ``keys`` change its configuration."""
    folder.mkdir(exist_ok=True)
    weights = tiny.llama_weights() if weights is None else weights
    save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    return folder
