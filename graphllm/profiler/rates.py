"""What a backend's steps give at best beside the memory's rate: arithmetic, and a step's own cost.

Measured through an Executor, as plans run: any backend can be asked.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from .. import ops
from ..backends import Options
from ..dtype import F16, F32, Q8_0, DType
from ..executor import Executor
from ..quant import Blocks
from ..tensor import Tensor, Var, feed, scope, weight
from ..weights import Arrays
from ..weights.random import random_bytes
from .rows import Recorder

KINDS: dict[str, DType] = {"float": F16, "integer": Q8_0}  # of a linear's weights
ROUNDS = 5  # of which the fastest counts
WIDTH, _TOKENS = 4096, 512  # of the large linears
_SMALL = 512  # rows and columns of the small ones, of 1 MiB in float32
_MOST = 512 << 20  # bytes of all small ones: they are held twice while they are packed


def arithmetic(backend: str, threads: int) -> Iterator[tuple[str, float]]:
    """(kind, operations a second) of linears of many tokens, for kinds that the backend runs."""
    width = WIDTH
    for kind, form in KINDS.items():
        raw = np.resize(random_bytes(form), width * form.row_nbytes(width)).reshape(width, -1)
        x = feed("x", (Var("T", 1, _TOKENS), width), F32)
        with scope("product"):
            y = ops.linear(x, weight("w", (width, width), form))
        executor = _executor(backend, threads, {"w": Blocks(raw, form, width)})
        plan = executor.compile({"y": y})
        if {step.backend.name for step in plan.steps} != {backend}:
            continue
        best = 0.0
        feeds = {"x": np.ones((_TOKENS, width), np.float32)}
        for _ in range(ROUNDS):
            recorder = Recorder()
            executor.run(plan, feeds, profile=recorder)
            row = max(recorder.rows, key=lambda row: row.flops)
            best = max(best, row.flops / max(row.ns, 1) * 1e9)
        yield kind, best


def step_cost(backend: str, threads: int, nbytes: int, rate: float) -> float:
    """Seconds that a step takes beside its bytes at ``rate`` a second.

    Of small linears of one token, one after another, over ``nbytes`` of weights in all.
    """
    count = max(1, min(nbytes, _MOST) // (4 * _SMALL * _SMALL))
    ones = np.full((_SMALL, _SMALL), 1 / _SMALL, np.float32)
    y: Tensor = feed("x", (1, _SMALL), F32)
    for i in range(count):
        with scope(f"step.{i}"):
            y = ops.linear(y, weight(f"w{i}", (_SMALL, _SMALL), F32))
    executor = _executor(backend, threads, {f"w{i}": ones for i in range(count)})
    plan = executor.compile({"y": y})
    feeds, took = {"x": np.ones((1, _SMALL), np.float32)}, float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        executor.run(plan, feeds)
        took = min(took, time.perf_counter() - start)
    return max(0.0, took - count * ones.nbytes / rate) / count


def _executor(backend: str, threads: int, weights: Mapping[str, np.ndarray | Blocks]) -> Executor:
    return Executor(Arrays(weights), (backend, "reference"), Options(threads=threads))


def measure(
    backend: str, best: Callable[[int], float], counts: Iterable[int], nbytes: int,
    show: Callable[[str, int, int], None],
) -> tuple[dict[str, dict[int, float]], dict[int, float]]:  # fmt: skip
    """Operations a second by kind and count of threads, and seconds of a step by count of threads.

    ``best``: bytes a second with so many threads. ``nbytes``: of weights to go over.
    """
    flops: dict[str, dict[int, float]] = {}
    steps: dict[int, float] = {}
    tries = sorted(counts)
    for done, threads in enumerate(tries):
        show("measuring arithmetic", done, len(tries))
        for kind, rate in arithmetic(backend, threads):
            flops.setdefault(kind, {})[threads] = rate
        steps[threads] = step_cost(backend, threads, nbytes, best(threads))
        gc.collect()  # the weights go before the next are there
    show("measuring arithmetic", len(tries), len(tries))
    return flops, steps
