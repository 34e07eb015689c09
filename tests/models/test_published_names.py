"""Checkpoints with the tensor names of their publication, which transformers renames."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import safetensors.numpy

import graphllm
from graphllm.errors import ConfigError

IDS = [int(i) for i in np.random.default_rng(7).integers(3, 120, 20)]
MASK = np.tril(np.ones((1, 1, 8, 8), np.float32))
# By model_type: prefix that published names lack, or have; tensors that are not weights; keys of
# published configurations without effect.
PUBLISHED: dict[str, tuple[tuple[str, str], dict[str, np.ndarray], dict[str, Any]]] = {
    "gpt2": (
        ("transformer.", ""),
        {"h.0.attn.bias": MASK, "h.2.attn.masked_bias": np.float32([-1e4])},
        {"n_ctx": 64, "summary_type": "cls_index", "n_inner": None,
         "task_specific_params": {"text-generation": {"do_sample": True}}},
    ),
    "gpt_neox": (
        ("lm_head.", "embed_out."),
        {"gpt_neox.layers.1.attention.bias": MASK,
         "gpt_neox.layers.1.attention.masked_bias": np.float32([-1e4]),
         "gpt_neox.layers.0.attention.rotary_emb.inv_freq": np.ones(2, np.float32)},
        {"is_decoder": True, "rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 10000},
    ),
    "bloom": (
        ("transformer.", ""),
        {},
        {"n_embed": 64, "num_attention_heads": 8, "offset_alibi": 100, "skip_bias_add": True,
         "n_inner": None, "seq_length": 2048, "masked_softmax_fusion": True, "unk_token_id": 0},
    ),
    "xglm": (
        ("lm_head.", "lm_head."),
        {"model.embed_positions.weights": np.ones((66, 60), np.float32)},
        {"layerdrop": 0.0, "init_std": 0.02},
    ),
}  # fmt: skip


def saved(folder: Path, kind: str) -> Any:
    """Save transformers' model in ``folder`` under its published names and return it."""
    (old, new), extra, keys = PUBLISHED[kind]
    model = hf_models.write(folder, hf_models.SPECS[kind], 0)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    named = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    safetensors.numpy.save_file(named | extra, folder / "model.safetensors")
    restate(folder, keys)
    return model


def restate(folder: Path, keys: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parity
@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_names_and_keys(tmp_path: Path, kind: str) -> None:
    model = saved(tmp_path, kind)
    found = graphllm.load(tmp_path, device="reference").logits(IDS)
    assert hf_models.distance(found, hf_models.logits_of(model, IDS)) <= 1e-4


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt2", {"n_head": 7}, "n_head = 7 does not divide the hidden size 60"),
        ("gpt2", {"activation_function": "relu6"}, "activation_function = 'relu6'"),
        ("gpt2", {"hidden_size": 61}, "hidden_size = 61, but n_embd = 60"),
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.5}, "rotary_pct rotates 5 of 10"),
        ("bloom", {"n_embed": 32}, "hidden_size = 64, but n_embed = 32"),
        ("xglm", {"pad_token_id": 5}, "pad_token_id"),
        ("xglm", {"rope_theta": 5.0}, "does not know the key 'rope_theta'"),
    ],
)
def test_refused_values(tmp_path: Path, kind: str, change: dict[str, Any], message: str) -> None:
    saved(tmp_path, kind)
    restate(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        graphllm.load(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
