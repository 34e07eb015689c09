"""Every built-in model against transformers, on small random models of its TINY."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import hf_models
import numpy as np
import pytest
from cuda_cases import DEVICES, need_device

import graphllm

IDS = [int(i) for i in np.random.default_rng(7).integers(3, 120, 48)]
PROMPTS = (1, 7, 40)
STEPS = 8


@pytest.fixture(
    scope="module", params=hf_models.VARIANTS, ids=[f"{n}-{i}" for n, i in hf_models.VARIANTS]
)
def model(request, tmp_path_factory):
    """Return the directory and transformers' model."""
    name, variant = request.param
    folder = tmp_path_factory.mktemp(name)
    return folder, hf_models.write(folder, hf_models.SPECS[name], variant)


def stepwise_logits(llm: graphllm.LLM, ids: list[int], prompt: int) -> np.ndarray:
    """Return the logits [T, vocab] of a prefill and of decode steps after it."""
    with llm.engine.evaluation(ids) as sequence:
        first = sequence.step_logits(ids[:prompt])
        return np.concatenate([first, *(sequence.step_logits([i]) for i in ids[prompt:])])


def loader(folder: Path, device: str) -> Callable[[int], graphllm.LLM]:
    """Return a function from the context length to the model.

    It is the same model for all lengths unless its rotary positions depend on the length.
    """

    @cache
    def made(context: int) -> graphllm.LLM:
        strict = device == "cuda"  # no fallback
        return graphllm.load(folder, device=device, kv_type="f32", context=context, strict=strict)

    whole = made(len(IDS))
    ropes = (layer.rope for layer in whole.decoder.cfg.layers)
    return (
        made
        if any(rope is not None and rope.original_context for rope in ropes)
        else lambda _: whole
    )


@pytest.mark.parity
@pytest.mark.parametrize("device", DEVICES)
def test_logits_agree_with_transformers(model, device):
    need_device(device)
    folder, oracle = model
    of = loader(folder, device)
    for prompt in PROMPTS:
        ids = IDS[: prompt + STEPS]
        want = hf_models.logits_of(oracle, ids)
        assert hf_models.distance(stepwise_logits(of(len(ids)), ids, prompt), want) <= 1e-4
