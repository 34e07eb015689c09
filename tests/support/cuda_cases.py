"""What tests of the CUDA backend share: samples of ops, each in a plan made for its own count of
rows (what kernels are chosen depends on that), and greedy answers of whole decoders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cases import groups
from fusion_cases import IDS
from op_runs import run_one

from graphllm import ops
from graphllm.backends import Options
from graphllm.backends.cuda import BACKEND
from graphllm.engine.request import Sampling
from graphllm.formats import activation_of
from graphllm.formats.quantization import Blocks, quantise
from graphllm.graph.dtype import dtype
from graphllm.ops import Arg, Sample
from graphllm.runtime.buffer_guards import GuardedExecutor
from graphllm.weights import Arrays

ORDER = ("cuda", "reference")
ARCHS = ("llama", "qwen2", "gemma3")
DEVICES = ["reference", "cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TIE = 1e-2  # of logits: behind a tie all may differ


def need_gpu() -> None:
    """Skip, or fail where GRAPHLLM_REQUIRE names cuda, with the reason why there is none."""
    ok, reason = BACKEND.available()
    if not ok and "cuda" in os.environ.get("GRAPHLLM_REQUIRE", "").split():
        pytest.fail(reason)
    if not ok:
        pytest.skip(reason)


def need_device(name: str) -> None:
    """As `need_gpu`, of a test that takes one device of `DEVICES` after the other."""
    if name == "cuda":
        need_gpu()


def run_bounded(
    name: str, samples: Sequence[Sample], options: Options | None = None, least: float = 0.0
) -> list[str]:
    """What is wrong, a line each. ``least``: a tolerance that is allowed in any case."""
    own = groups(replace(ops.get(name), samples=tuple(samples)))
    weights = {k: v for group in own if group.cases for k, v in group.weights.items()}
    executor = GuardedExecutor(Arrays(weights), ORDER, options or Options())
    wrong = []
    for group in own:
        for case in group.cases:
            bounds = {name: (0, max(1, value)) for name, value in case.sample.env.items()}
            plan = executor.compile({"y": group.node}, bounds)
            executor.bind(plan)
            assert [s.node.op for s in plan.steps if s.backend.name == "cuda"][-1] == name
            problem = run_one(executor, plan, group, case, max(case.tolerance, least))
            if problem:
                wrong.append(f"{case.sample.label}: {problem}")
    return wrong


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Weights that keep a result's size near one."""
    return rng.standard_normal(shape) / np.sqrt(shape[-1])


def linear_sample(
    tokens: int, shape: tuple[int, int], kind: str, x: str = "f32", bias: bool = False
):
    args = (
        Arg(("T", shape[1]), dtype(x)),
        Arg(shape, dtype(kind), leaf="weight", make=normal),
        Arg(shape[:1], leaf="weight") if bias else None,
    )
    return Sample(args, {}, {"T": tokens})


def activation_name(kind: str) -> str:
    """The activations that a quantised weight is multiplied with."""
    found = activation_of(dtype(kind))
    return found.name if found else "f32"


# ---------------------------------------------------------------------------------- whole decoders


def greedy(llm, count: int = 64) -> list[int]:
    """The likeliest tokens after `IDS`."""
    ids = llm.engine.generate(IDS, Sampling(temperature=0.0), ())
    return [next(ids) for _ in range(count)]


def disagreement(have: list[int], want: list[int], reference) -> str:
    """Where two greedy answers part though the reference's logits do not tie; empty if nowhere."""
    at = next((i for i, pair in enumerate(zip(have, want)) if pair[0] != pair[1]), None)
    if at is None:
        return ""
    logits = reference.logits(IDS + want[:at], last=True)
    apart = abs(float(logits[have[at]] - logits[want[at]]))
    return "" if apart < TIE else f"token {at}: {have[at]}, not {want[at]}, {apart:.3g} apart"


def quantised(values: np.ndarray, kind: str) -> np.ndarray | Blocks:
    """Weights as `Arrays` accepts them."""
    form = dtype(kind)
    if not form.quantised:
        return values.astype(form.numpy)
    return Blocks(quantise(values, form), form, values.shape[-1])
