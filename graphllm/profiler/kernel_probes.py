"""Roofline probes that run through an Executor, and so work with any backend.

They measure linears, attention and elementwise ops at many tokens, the cost of unpacking each
weight format, and the fixed overhead of a step.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from .. import ops
from ..backends import Options, find
from ..backends.probe_results import Table, spread
from ..checkpoints.random_weights import random_bytes
from ..compiler.plan import HOST
from ..formats.legacy import Q8_0
from ..formats.quantization import Blocks
from ..graph.dtype import F16, F32, I32, DType, dtype
from ..graph.fused_op import decompose
from ..graph.op import ATTENTION, ELEMENTWISE, MATMUL
from ..graph.tensor import Tensor, Var, feed, scope, state, weight
from ..ops import get
from ..runtime.executor import Executor
from ..weights import Arrays
from .record import Recorder

FLOAT, INTEGER = "float", "integer"  # kinds of matrix products, by the dtype of activations
KINDS = (FLOAT, INTEGER, ATTENTION, ELEMENTWISE)
FORMATS = ("f16", "q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k")  # of most model files
_REFERENCE_FORMATS = (F16, Q8_0)  # weight formats that stand for float and integer arithmetic
MIN_ROUNDS, MIN_SECONDS = 5, 0.25  # of each measurement; the fastest round counts
WIDTH, TOKENS = 4096, 512  # of the large linears
# Outputs of these in times of their width, on devices with memory of their own. They run a linear
# of 4096 outputs and few tokens in less time than its launch takes, from their L2 cache.
_DEVICE_ROWS = 16
COUNTS = (4, 16, 64, TOKENS)  # numbers of tokens of the linears of each format
FEW_TOKENS = 256  # of a linear whose overhead counts: kernels for few tokens have these at most
_SMALL_ROWS, _SMALL_COUNT = 1024, 16  # outputs and tokens of a linear that is mostly overhead
_HEAD_COUNTS = (8, 2)  # of attention: query heads and key heads
_HEAD_DIM, _BLOCK = 128, 64
_DIM = 1024  # of the elementwise op
_CHAIN_WIDTH = 512  # rows and columns of the small linears, 1 MiB each in float32
_MAX_CHAIN_BYTES = 256 << 20  # half of what the large linear of one token reads

Show = Callable[[str, int, int], None]


def arithmetic_kind(node: Tensor) -> str:
    """Return the kind of arithmetic of an unfused op, one of `KINDS`."""
    declared = get(node.op).arithmetic
    if declared != MATMUL:
        return declared
    return INTEGER if any(s.dtype.name.startswith("a8_") for s in node.sources) else FLOAT


class Operations(NamedTuple):
    """Operations of a part of a step.

    ``form`` is the weight format of a linear and ``tokens`` its number of rows, or "" and 0.
    """

    kind: str
    form: str
    tokens: int
    flops: float


def operations(node: Tensor, env: Mapping[str, int]) -> Iterator[Operations]:
    """Yield the operations of each part of a step."""
    for part in decompose(node).nodes if get(node.op).fusion else (node,):
        kind = arithmetic_kind(part)
        form = part.sources[1].dtype.name if kind in (INTEGER, FLOAT) else ""
        tokens = int(part.sources[0].meta.at(env).shape[0]) if form else 0  # type: ignore[arg-type]
        yield Operations(kind, form, tokens, get(part.op).node_cost(part, env).flops)


@dataclass
class KernelRates:
    """Rates of a backend's kernels.

    Attributes:
        flops: operations/s at `TOKENS` tokens, by kind and number of threads.
        spreads: excess of the best over the median repetition of ``flops``, as a share.
        steps: fixed overhead of a step in seconds, by number of threads.
        kernel_overheads: the same of kernels for which it is longer: attention in a decode step,
            and, on devices with memory of their own, linears of 2 to `FEW_TOKENS` tokens
            (``matmul``).
        shares: by weight format, the share of memory bandwidth that a linear of 1 token reaches.
        many: by weight format and number of tokens (`COUNTS`), the share of the kind's ``flops``
            that a linear reaches.
    """

    flops: Table = field(default_factory=dict)
    spreads: Table = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    kernel_overheads: Table = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    many: Table = field(default_factory=dict)


@dataclass(frozen=True)
class StepSample:
    """The step of a plan that computes most: kind, bytes, operations, seconds of each run."""

    kind: str
    nbytes: float
    flops: float
    seconds: Sequence[float]


def measure(
    backend: str, best: Callable[[int], float], counts: Sequence[int], nbytes: int, show: Show
) -> KernelRates:
    """Run all probes of ``backend``.

    Args:
        backend: name of the backend.
        best: read bandwidth in bytes/s for a number of threads.
        counts: numbers of threads to measure with.
        nbytes: bytes of weights that a linear of one token reads.
        show: progress callback.
    """
    found, alone = KernelRates(), min(counts)
    large = WIDTH * (1 if find(backend).memory == HOST else _DEVICE_ROWS)
    total = len(counts) + len(FORMATS)
    for done, threads in enumerate(counts):
        show("measuring linears", done, total)
        for form in _REFERENCE_FORMATS:
            _add_rate(found, threads, time_linear(backend, threads, form, large, TOKENS))
        _add_rate(found, threads, _attention(backend, threads, TOKENS))
        _add_rate(found, threads, _elementwise(backend, threads))
        own = step_overhead(backend, threads, nbytes)
        if own is not None:
            found.steps[threads] = own
        one = _attention(backend, threads, 1)
        if one is not None and ATTENTION in found.flops:
            rest = one.nbytes / best(threads) + one.flops / found.flops[ATTENTION][threads]
            longer = found.kernel_overheads.setdefault(ATTENTION, {})
            longer[threads] = max(0.0, min(one.seconds) - rest)
        gc.collect()
    # With one thread, which has the memory bandwidth to itself. More threads reach the same share.
    for done, name in enumerate(FORMATS, len(counts)):
        show("measuring linears", done, total)
        form = dtype(name)
        rows = max(1, min(nbytes, 2 * _MAX_CHAIN_BYTES) // form.row_nbytes(WIDTH))
        one = time_linear(backend, alone, form, rows, 1)
        if one is not None:
            found.shares[name] = min(1.0, one.nbytes / min(one.seconds) / best(alone))
        for tokens in reversed(COUNTS):
            _add_share(found, alone, form, tokens, time_linear(backend, alone, form, large, tokens))
        gc.collect()  # free these weights before the next are made
    few = time_linear(backend, alone, Q8_0, _SMALL_ROWS, _SMALL_COUNT) if large > WIDTH else None
    if few is not None:
        rate = found.flops[few.kind][alone] * found.many[Q8_0.name][_SMALL_COUNT]
        found.kernel_overheads[MATMUL] = {alone: max(0.0, min(few.seconds) - few.flops / rate)}
    show("measuring linears", total, total)
    return found


def _add_share(
    found: KernelRates, threads: int, form: DType, tokens: int, step: StepSample | None
) -> None:
    """Add the share of FLOP/s of a linear of some tokens; the largest number comes first."""
    if step is None:
        return
    if tokens == TOKENS and (form in _REFERENCE_FORMATS or step.kind not in found.flops):
        _add_rate(found, threads, step)
    reference = found.flops[step.kind][threads]
    found.many.setdefault(form.name, {})[tokens] = step.flops / min(step.seconds) / reference


def _add_rate(found: KernelRates, threads: int, step: StepSample | None) -> None:
    if step is not None:
        rates = found.flops.setdefault(step.kind, {})
        rates[threads] = max(rates.get(threads, 0.0), step.flops / min(step.seconds))
        found.spreads.setdefault(step.kind, {})[threads] = spread(step.seconds)


def time_linear(
    backend: str, threads: int, form: DType, rows: int, tokens: int
) -> StepSample | None:
    """Time a linear with random weights; None if the backend does not run it.

    Args:
        backend: name of the backend.
        threads: number of threads.
        form: format of the weights.
        rows: number of outputs; `WIDTH` inputs.
        tokens: number of tokens.
    """
    raw = np.resize(random_bytes(form), rows * form.row_nbytes(WIDTH)).reshape(rows, -1)
    x = feed("x", (Var("T", 1, tokens), WIDTH), F32)
    with scope("product"):
        y = ops.linear(x, weight("w", (rows, WIDTH), form))
    executor = _executor(backend, threads, {"w": Blocks(raw, form, WIDTH)})
    return _time_plan(executor, y, {"x": np.ones((tokens, WIDTH), np.float32)}, {})


def _attention(backend: str, threads: int, tokens: int) -> StepSample | None:
    """Time causal attention of the last ``tokens`` of `TOKENS` tokens; None if the backend does not
    run it."""
    heads, kv_heads = _HEAD_COUNTS
    feeds = {
        "q": np.ones((tokens, heads, _HEAD_DIM), np.float32),
        "q_start": np.array([0, tokens], np.int32),
        "kv_len": np.array([TOKENS], np.int32),
        "table": np.arange(TOKENS // _BLOCK, dtype=np.int32)[None],
    }
    shapes = {name: data.shape for name, data in feeds.items()}
    q, *small = (feed(n, s, F32 if n == "q" else I32) for n, s in shapes.items())
    k, v = (state(name, (TOKENS, kv_heads, _HEAD_DIM), F16) for name in ("k", "v"))
    with scope("attention"):
        y = ops.attention(q, k, v, *small, scale=_HEAD_DIM**-0.5, block=_BLOCK)
    pairs = tokens * (2 * TOKENS - tokens + 1) // 2
    return _time_plan(_executor(backend, threads, {}), y, feeds, {"kv_sum": pairs})


def _elementwise(backend: str, threads: int) -> StepSample | None:
    """Time an elementwise op; None if the backend does not run it."""
    x = feed("x", (Var("T", 1, TOKENS), _DIM), F32)
    with scope("elements"):
        y = ops.silu(x)
    executor = _executor(backend, threads, {})
    return _time_plan(executor, y, {"x": np.ones((TOKENS, _DIM), np.float32)}, {})


def _time_plan(
    executor: Executor, y: Tensor, feeds: Mapping[str, np.ndarray], env: Mapping[str, int]
) -> StepSample | None:
    """Time the step of a plan that computes most; None if a step is not on the first backend."""
    plan = executor.compile({"y": y})
    if {step.backend for step in plan.steps} != {executor.backends[0]}:
        return None
    recorder = Recorder()
    for _ in _rounds(MIN_ROUNDS + 1):
        executor.run(plan, feeds, env, profile=recorder, fetch=())
    row = max(recorder.rows, key=lambda row: row.flops)
    seconds = [max(ns, 1) / 1e9 for ns in row.times[1:]]  # the first run compiles and loads kernels
    calls = len(row.times)
    kind = arithmetic_kind(plan.steps[row.step].node)
    return StepSample(kind, row.bytes / calls, row.flops / calls, seconds)


def step_overhead(backend: str, threads: int, nbytes: int) -> float | None:
    """Return the fixed overhead of a step in seconds; None if the backend does not support it.

    It is the difference per step between a chain of many small linears of one token and a chain of
    a few large ones that read the same number of bytes. Runs of both chains are interleaved.

    Args:
        backend: name of the backend.
        threads: number of threads.
        nbytes: upper bound of the weight bytes of a chain.
    """
    few = max(1, min(nbytes, _MAX_CHAIN_BYTES) // (4 * 4 * _CHAIN_WIDTH * _CHAIN_WIDTH))
    counts = 4 * few, few  # linears of width `_CHAIN_WIDTH`, and of twice that
    chains = [
        _linear_chain(backend, threads, n, side * _CHAIN_WIDTH) for n, side in zip(counts, (1, 2))
    ]
    took = [float("inf"), float("inf")]
    for _ in _rounds(MIN_ROUNDS):
        for i, run in enumerate(chains):
            if run is None:
                return None
            start = time.perf_counter()
            run()
            took[i] = min(took[i], time.perf_counter() - start)
    return max(0.0, took[0] - took[1]) / (counts[0] - counts[1])


def _linear_chain(
    backend: str, threads: int, count: int, width: int
) -> Callable[[], object] | None:
    """Compile a chain of ``count`` linears of one token; return a function that runs it."""
    ones = np.full((width, width), 1 / width, np.float32)
    y: Tensor = feed("x", (1, width), F32)
    for i in range(count):
        with scope(f"step.{i}"):
            y = ops.linear(y, weight(f"w{i}", (width, width), F32))
    executor = _executor(backend, threads, {f"w{i}": ones for i in range(count)})
    plan = executor.compile({"y": y})
    if {step.backend.name for step in plan.steps} != {backend}:
        return None
    run = partial(executor.run, plan, {"x": np.ones((1, width), np.float32)})
    run()  # compiles and loads kernels
    return run


def _rounds(least: int) -> Iterator[int]:
    """Count up to ``least``, and on until `MIN_SECONDS` have passed."""
    end = time.perf_counter() + MIN_SECONDS
    for done in itertools.count():
        if done >= least and time.perf_counter() > end:
            return
        yield done


def _executor(backend: str, threads: int, weights: Mapping[str, np.ndarray | Blocks]) -> Executor:
    return Executor(Arrays(weights), (backend, "reference"), Options(threads=threads))
