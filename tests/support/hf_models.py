"""Small random models of every family, as Hugging Face writes them, with transformers as the
oracle."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from graphllm import models
from graphllm.model.spec import ModelSpec

SPECS = {spec.name: spec for spec in models.specs()}
ELSEWHERE = ("chatglm", "chatglm2")  # transformers has them no more: tests/models/test_chatglm.py
VARIANTS = [
    (f.name, i)
    for f in SPECS.values()
    if f.name not in ELSEWHERE and f.is_decoder  # the others have tests of their own
    for i in range(len(f.tiny))
]


def config_of(spec: ModelSpec, variant: int) -> dict[str, Any]:
    """The configuration of one of a family's small models."""
    return {**spec.tiny[0], **spec.tiny[variant]}


def randomise(model, seed: int = 0) -> None:
    """Numbers of a size that keeps sums near one, in place of what initialises training: vectors
    keep what they are near (ones, zeros) but for a part that tells them apart. They depend on the
    names alone, so that files that keep results of other programs stay true."""
    import torch

    with torch.no_grad():
        for name, value in (*model.named_parameters(), *_saved_buffers(model)):
            draw = np.random.default_rng([seed, zlib.crc32(name.encode())])
            noise = torch.from_numpy(draw.standard_normal(value.shape, np.float32))
            if value.ndim > 1:
                value.copy_(noise / value.shape[-1] ** 0.5)
            else:
                value.add_(0.2 * noise)


def _saved_buffers(model):
    """Buffers that are saved and are weights: corrections of routers."""
    return [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]


def oracle(config: Mapping[str, Any], kind: str, seed: int = 0):
    """transformers' model of this ``model_type`` and configuration: float32, eager, random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoConfig.for_model(kind, **deepcopy(dict(config)))  # it writes to what it gets
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, **plain)
    for module in model.modules():  # gpt-oss; constants in transformers 5.17
        if hasattr(module, "limit") and hasattr(module, "alpha"):
            module.alpha = config.get("swiglu_alpha", module.alpha)
            module.limit = config.get("swiglu_limit", module.limit)
    randomise(model, seed)
    return model.eval()


def write(folder: Path, spec: ModelSpec, variant: int):
    """A directory as `save_pretrained` leaves it; returns the oracle."""
    model = oracle(config_of(spec, variant), spec.name)
    model.save_pretrained(folder)
    return model


def logits_of(model, ids: list[int]) -> np.ndarray:
    """float32 [T, vocab]."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def distance(have: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a share of the range of what is wanted."""
    return float(np.abs(have - want).max() / (want.max() - want.min()))
