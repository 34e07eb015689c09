"""What a backend's steps give at best beside the memory's rate: linears and attention of many
tokens, what unpacking a format costs, a step's own cost.

Measured through an Executor, as plans run: any backend can be asked.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from .. import ops
from ..backends import Options
from ..backends.probe_results import Table, spread
from ..checkpoints.random_weights import random_bytes
from ..formats.quantization import Blocks
from ..graph.dtype import F16, F32, I32, Q8_0, DType, dtype
from ..graph.fused_op import decompose
from ..graph.tensor import Tensor, Var, feed, scope, state, weight
from ..ops import get
from ..runtime.executor import Executor
from ..weights import Arrays
from .record import Recorder

KINDS = FLOAT, INTEGER, ATTENTION, ELEMENTS = ("float", "integer", "attention", "elementwise")
FORMATS = ("f16", "q8_0", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k")  # that most files are made of
_REFERENCE_FORMATS = (F16, Q8_0)  # the formats whose arithmetic is taken for a kind's
MIN_ROUNDS, MIN_SECONDS = 5, 0.25  # so often at least, and so long; the fastest counts
WIDTH, TOKENS = 4096, 512  # of the large linears
_HEAD_COUNTS, _HEAD_DIM, _BLOCK = (
    (8, 2),
    128,
    64,
)  # of attention: heads of queries and of keys, their width
_DIM = 1024  # of the elementwise op
_CHAIN_WIDTH = 512  # rows and columns of the small linears, of 1 MiB in float32
_MAX_CHAIN_BYTES = (
    256 << 20
)  # bytes of a chain of linears; half of what one linear of a token reads

Show = Callable[[str, int, int], None]


def arithmetic_kind(node: Tensor) -> str:
    """What kind of operations an op that is not fused is made of: one of `KINDS`."""
    if node.op == "attention":
        return ATTENTION
    if node.op != "linear":
        return ELEMENTS
    return INTEGER if any(s.dtype.name.startswith("a8_") for s in node.sources) else FLOAT


def operations(node: Tensor, env: Mapping[str, int]) -> Iterator[tuple[str, str, float]]:
    """What a step computes, for each op that it is made of: its kind, a linear's format of weights
    (else nothing), operations."""
    for part in decompose(node).nodes if get(node.op).fusion else (node,):
        kind = arithmetic_kind(part)
        form = part.sources[1].dtype.name if kind in (INTEGER, FLOAT) else ""
        yield kind, form, get(part.op).node_cost(part, env).flops


@dataclass
class KernelRates:
    """``flops``: operations a second by kind and count of threads, of `TOKENS` tokens, with their
    ``spreads``; ``steps``: seconds of a step beside its bytes, by count. By format: ``shares``, the
    part of the memory's rate that linears of one token reach, and ``many``, the part of their
    kind's ``flops`` that linears of `TOKENS` tokens reach."""

    flops: Table = field(default_factory=dict)
    spreads: Table = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    many: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _StepSample:
    """The longest step of a plan: its kind, bytes, operations, and seconds of each run."""

    kind: str
    nbytes: float
    flops: float
    seconds: Sequence[float]


def measure(
    backend: str, best: Callable[[int], float], counts: Sequence[int], nbytes: int, show: Show
) -> KernelRates:
    """``best``: bytes a second with so many threads. ``nbytes``: of weights to go over."""
    found, alone = KernelRates(), min(counts)
    total = len(counts) + len(FORMATS)
    for done, threads in enumerate(counts):
        show("measuring linears", done, total)
        for form in _REFERENCE_FORMATS:
            _add_rate(found, threads, _linear(backend, threads, form, WIDTH, TOKENS))
        _add_rate(found, threads, _attention(backend, threads))
        _add_rate(found, threads, _elementwise(backend, threads))
        own = step_overhead(backend, threads, nbytes)
        if own is not None:
            found.steps[threads] = own
        gc.collect()
    # By one thread, which shares memory with nobody: several have the same share of what they get.
    for done, name in enumerate(FORMATS, len(counts)):
        show("measuring linears", done, total)
        form = dtype(name)
        rows = max(1, min(nbytes, 2 * _MAX_CHAIN_BYTES) // form.row_nbytes(WIDTH))
        one, many = (_linear(backend, alone, form, *n) for n in ((rows, 1), (WIDTH, TOKENS)))
        if one is not None:
            found.shares[name] = min(1.0, one.nbytes / min(one.seconds) / best(alone))
        if many is not None:
            if (
                form in _REFERENCE_FORMATS or many.kind not in found.flops
            ):  # the best of both counts
                _add_rate(found, alone, many)
            usual = found.flops[many.kind][alone]
            found.many[name] = many.flops / min(many.seconds) / usual
        gc.collect()  # these weights go before the next are there
    show("measuring linears", total, total)
    return found


def _add_rate(found: KernelRates, threads: int, step: _StepSample | None) -> None:
    if step is not None:
        rates = found.flops.setdefault(step.kind, {})
        rates[threads] = max(rates.get(threads, 0.0), step.flops / min(step.seconds))
        found.spreads.setdefault(step.kind, {})[threads] = spread(step.seconds)


def _linear(backend: str, threads: int, form: DType, rows: int, tokens: int) -> _StepSample | None:
    """A linear of ``rows`` outputs; None where the backend does not run it."""
    raw = np.resize(random_bytes(form), rows * form.row_nbytes(WIDTH)).reshape(rows, -1)
    x = feed("x", (Var("T", 1, tokens), WIDTH), F32)
    with scope("product"):
        y = ops.linear(x, weight("w", (rows, WIDTH), form))
    executor = _executor(backend, threads, {"w": Blocks(raw, form, WIDTH)})
    return _time_plan(executor, y, {"x": np.ones((tokens, WIDTH), np.float32)}, {})


def _attention(backend: str, threads: int) -> _StepSample | None:
    """Attention of `TOKENS` tokens to themselves; None where the backend does not run it."""
    heads, kv_heads = _HEAD_COUNTS
    feeds = {
        "q": np.ones((TOKENS, heads, _HEAD_DIM), np.float32),
        "q_start": np.array([0, TOKENS], np.int32),
        "kv_len": np.array([TOKENS], np.int32),
        "table": np.arange(TOKENS // _BLOCK, dtype=np.int32)[None],
    }
    shapes = {name: data.shape for name, data in feeds.items()}
    q, *small = (feed(n, s, F32 if n == "q" else I32) for n, s in shapes.items())
    k, v = (state(name, (TOKENS, kv_heads, _HEAD_DIM), F16) for name in ("k", "v"))
    with scope("attention"):
        y = ops.attention(q, k, v, *small, scale=_HEAD_DIM**-0.5, block=_BLOCK)
    pairs = TOKENS * (TOKENS + 1) // 2
    return _time_plan(_executor(backend, threads, {}), y, feeds, {"kv_sum": pairs})


def _elementwise(backend: str, threads: int) -> _StepSample | None:
    """One of the ops that go from element to element; None as for `_linear`."""
    x = feed("x", (Var("T", 1, TOKENS), _DIM), F32)
    with scope("elements"):
        y = ops.silu(x)
    executor = _executor(backend, threads, {})
    return _time_plan(executor, y, {"x": np.ones((TOKENS, _DIM), np.float32)}, {})


def _time_plan(
    executor: Executor, y: Tensor, feeds: Mapping[str, np.ndarray], env: Mapping[str, int]
) -> _StepSample | None:
    """The step of a plan that computes most; None where not all is on the first backend."""
    plan = executor.compile({"y": y})
    if {step.backend for step in plan.steps} != {executor.backends[0]}:
        return None
    recorder = Recorder()
    for _ in _rounds(MIN_ROUNDS + 1):
        executor.run(plan, feeds, env, profile=recorder, fetch=())
    row = max(recorder.rows, key=lambda row: row.flops)
    seconds = [max(ns, 1) / 1e9 for ns in row.times[1:]]  # the first run loads what it needs
    calls = len(row.times)
    kind = arithmetic_kind(plan.steps[row.step].node)
    return _StepSample(kind, row.bytes / calls, row.flops / calls, seconds)


def step_overhead(backend: str, threads: int, nbytes: int) -> float | None:
    """Seconds that a step takes beside its bytes; None where the backend does not run it.

    Of linears of one token, one after another, over ``nbytes`` of weights: many small ones take so
    much longer than a few large ones of as many bytes. Both are run in turns.
    """
    few = max(1, min(nbytes, _MAX_CHAIN_BYTES) // (4 * 4 * _CHAIN_WIDTH * _CHAIN_WIDTH))
    counts = 4 * few, few  # of `_CHAIN_WIDTH` rows and columns, and of twice as many
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
    """A run of so many linears of one token, each of the result of the one before."""
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
    run()  # loads what it needs
    return run


def _rounds(least: int) -> Iterator[int]:
    """So often, and on until `MIN_SECONDS` are over."""
    end = time.perf_counter() + MIN_SECONDS
    for done in itertools.count():
        if done >= least and time.perf_counter() > end:
            return
        yield done


def _executor(backend: str, threads: int, weights: Mapping[str, np.ndarray | Blocks]) -> Executor:
    return Executor(Arrays(weights), (backend, "reference"), Options(threads=threads))
