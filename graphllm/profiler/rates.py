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
from ..dtype import F16, F32, Q8_0, DType, dtype
from ..executor import Executor
from ..quant import Blocks
from ..tensor import Tensor, Var, feed, scope, weight
from ..weights import Arrays
from ..weights.random import random_bytes
from .rows import Recorder, Row

KINDS: dict[str, DType] = {"float": F16, "integer": Q8_0}  # of a linear's weights
FORMATS = ("f16", "q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k")  # that most files are made of
ROUNDS = 5  # of which the fastest counts
WIDTH, _TOKENS = 4096, 512  # of the large linears
_SMALL = 512  # rows and columns of the small ones, of 1 MiB in float32
_MOST = 512 << 20  # bytes of all small ones: they are held twice while they are packed


def arithmetic(backend: str, threads: int) -> Iterator[tuple[str, float]]:
    """(kind, operations a second) of linears of many tokens, for kinds that the backend runs."""
    for kind, form in KINDS.items():
        row = _linear(backend, threads, form, WIDTH, _TOKENS)
        if row is not None:
            yield kind, row.flops / max(row.ns, 1) * 1e9


def streamed(backend: str, threads: int, nbytes: int) -> Iterator[tuple[str, float]]:
    """(format, bytes a second) of linears of one token with ``nbytes`` of weights, for formats that
    the backend runs: what is left of the memory's rate when blocks are unpacked."""
    for name in FORMATS:
        rows = max(1, nbytes // dtype(name).row_nbytes(WIDTH))
        row = _linear(backend, threads, dtype(name), rows, 1)
        if row is not None:
            yield name, row.bytes / max(row.ns, 1) * 1e9
        gc.collect()  # these weights go before the next are there


def _linear(backend: str, threads: int, form: DType, rows: int, tokens: int) -> Row | None:
    """The fastest run of a linear of ``rows`` outputs; None where the backend does not run it."""
    raw = np.resize(random_bytes(form), rows * form.row_nbytes(WIDTH)).reshape(rows, -1)
    x = feed("x", (Var("T", 1, tokens), WIDTH), F32)
    with scope("product"):
        y = ops.linear(x, weight("w", (rows, WIDTH), form))
    executor = _executor(backend, threads, {"w": Blocks(raw, form, WIDTH)})
    plan = executor.compile({"y": y})
    if {step.backend.name for step in plan.steps} != {backend}:
        return None
    recorder, feeds = Recorder(), {"x": np.ones((tokens, WIDTH), np.float32)}
    for _ in range(ROUNDS):
        executor.run(plan, feeds, profile=recorder)
    return max(recorder.rows, key=lambda row: row.flops).fastest


def step_cost(backend: str, threads: int, nbytes: int, rate: float) -> float | None:
    """Seconds that a step takes beside its bytes at ``rate`` a second; None as for `_linear`.

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
    if {step.backend.name for step in plan.steps} != {backend}:
        return None
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
) -> tuple[dict[str, dict[int, float]], dict[int, float], dict[str, float]]:  # fmt: skip
    """What `Ceiling` calls flops, steps and shares.

    ``best``: bytes a second with so many threads. ``nbytes``: of weights to go over.
    """
    flops: dict[str, dict[int, float]] = {}
    steps: dict[int, float] = {}
    tries = sorted(counts)
    for done, threads in enumerate(tries):
        show("measuring arithmetic", done, len(tries))
        for kind, rate in arithmetic(backend, threads):
            flops.setdefault(kind, {})[threads] = rate
        own = step_cost(backend, threads, nbytes, best(threads))
        if own is not None:
            steps[threads] = own
        gc.collect()
    # By one thread, which shares memory with nobody: several have the same share of what they get.
    found = streamed(backend, tries[0], min(nbytes, _MOST))
    shares = {name: min(1.0, rate / best(tries[0])) for name, rate in found}
    show("measuring arithmetic", len(tries), len(tries))
    return flops, steps, shares
