"""Recorded times of plan runs, as one `Row` per step, and sums of rows.

`_row` joins what was measured (times, from the backend's `TimestampLog`) with what the op declares:
bytes and FLOPs are those of `OpDef.node_cost` at the values of the Vars of each run.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..backends import Segment, TimestampLog
from ..compiler.plan import TRANSFER
from ..engine.sequence import Chunk
from ..graph.fused_op import decompose
from ..ops import get

if TYPE_CHECKING:
    from ..compiler.plan import Plan, Step
    from ..runtime.recorder import BoundSegments


@dataclass(frozen=True, eq=False)
class Row:
    """One step of a plan, over all runs of the plan.

    Attributes:
        times: nanoseconds of each run, from the end of the step before to the end of this step on
            the device's clock.
        overlap: nanoseconds that the step ran before the step before it ended; sum over all runs.
        bytes: bytes that the op must move, by its declared cost; sum over all runs.
        flops: operations that the op must do, by its declared cost; sum over all runs.
    """

    plan: int  # index of the plan in the recorder
    step: int
    op: str
    parts: tuple[str, ...]  # ops that a fused op replaces
    scope: str
    layer: int | None
    origin: str
    shape: str
    inputs: tuple[str, ...]
    weight: str  # formats of its weight matrices, or empty
    backend: str
    kernel: str
    why: str  # why it does not run on the first backend; empty if it does
    copy: bool  # copies between memories
    integer: bool  # multiplies integers
    times: tuple[int, ...]
    overlap: int
    bytes: float
    flops: float

    @property
    def ns(self) -> int:
        """Nanoseconds of all runs."""
        return sum(self.times)

    @property
    def fastest(self) -> Row:
        """The row of its fastest run alone; all runs must be of one size."""
        calls = len(self.times)
        size = self.bytes / calls, self.flops / calls
        return replace(self, times=(min(self.times),), overlap=0, bytes=size[0], flops=size[1])


@dataclass(frozen=True)
class Run:
    """One profiled run of a plan.

    Attributes:
        plan: the plan.
        env: values of its Vars.
        called: time at which the host began the run, in nanoseconds.
        returned: time at which the host got control back; before the end of the last step if the
            device runs asynchronously.
        ends: for each segment the end of each step, preceded by the begin of the first, as in
            `graphllm.backends.TimestampLog`.
        starts: for each segment the start of each step.
        chunks: what the engine computed; empty if something else ran the plan.
    """

    plan: Plan
    env: Mapping[str, int]
    called: int
    returned: int
    ends: tuple[np.ndarray, ...]
    starts: tuple[np.ndarray, ...]
    chunks: tuple[Chunk, ...] = ()

    @property
    def times(self) -> np.ndarray:
        """Nanoseconds of each step [n]."""
        return np.concatenate([np.diff(ends) for ends in self.ends])

    @property
    def overlaps(self) -> np.ndarray:
        """Nanoseconds by which each step [n] overlaps the step before it."""
        pairs = zip(self.ends, self.starts)
        return np.concatenate([np.maximum(ends[:-1] - starts, 0) for ends, starts in pairs])


@dataclass(frozen=True)
class _Pending:
    """A run whose times may not be available yet: for each segment its log and the index in it."""

    plan: Plan
    env: Mapping[str, int]
    called: int
    returned: int
    places: tuple[tuple[TimestampLog, int], ...]
    chunks: tuple[Chunk, ...]


class Recorder:
    """Run plans with timestamps and keep them; implements `graphllm.engine.sequence.StepRecorder`.

    Rows are computed on access, not while plans run.

    Args:
        new_log: makes the log of a segment.
    """

    def __init__(self, new_log: Callable[[], TimestampLog] = TimestampLog) -> None:
        self._new_log = new_log
        self._pending: list[_Pending] = []
        self._logs: dict[Segment, TimestampLog] = {}
        self._counts: Counter[Segment] = Counter()  # profiled runs so far
        self._chunks: tuple[Chunk, ...] = ()  # of the next run

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Note the chunks that the next run computes."""
        self._chunks = tuple(chunks)

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` of ``plan`` with timestamps; ``env``: values of the Vars."""
        places, called = [], time.perf_counter_ns()
        for segment, _ in segments:
            if segment not in self._logs:
                self._logs[segment] = self._new_log()
            log = self._logs[segment]
            segment.run(log)
            places.append((log, self._counts[segment]))
            self._counts[segment] += 1
        now = time.perf_counter_ns()
        self._pending.append(_Pending(plan, dict(env), called, now, tuple(places), self._chunks))
        self._chunks = ()

    @property
    def runs(self) -> list[Run]:
        """All runs; waits for the end of the last."""
        for log in self._logs.values():
            log.collect()
        return [
            Run(
                p.plan, p.env, p.called, p.returned,
                tuple(log.runs[at][0] for log, at in p.places),
                tuple(log.runs[at][1] for log, at in p.places),
                p.chunks,
            )
            for p in self._pending
        ]  # fmt: skip

    @property
    def rows(self) -> list[Row]:
        """Rows of all runs (`rows_of`)."""
        return rows_of(self.runs)


def plans_of(runs: Iterable[Run]) -> list[Plan]:
    """Return the distinct plans of ``runs`` in the order of their first run."""
    return list(dict.fromkeys(run.plan for run in runs))


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Return one row per step of each plan, in execution order."""
    rows = []
    for index, plan in enumerate(plans_of(runs)):
        own = [run for run in runs if run.plan is plan]
        times = np.stack([run.times for run in own])  # [runs, steps]
        overlaps = np.stack([run.overlaps for run in own]).sum(0)
        for step in range(len(plan.steps)):
            measured = tuple(times[:, step].tolist()), int(overlaps[step])
            rows.append(_row(index, step, plan.steps[step], [run.env for run in own], *measured))
    return rows


def _row(
    plan: int, index: int, step: Step, envs: Sequence[Mapping[str, int]], times: tuple[int, ...],
    overlap: int,
) -> Row:  # fmt: skip
    """Join the times of a step with the cost that its op declares, summed over the runs."""
    node, op = step.node, get(step.node.op)
    costs = [op.node_cost(node, env) for env in envs]
    own = decompose(node) if op.fusion else None
    largest = max(envs, key=lambda env: env.get("T", 0))
    layer = re.search(r"\.(\d+)(\.|$)", node.scope)
    return Row(
        plan=plan,
        step=index,
        op=node.op,
        parts=tuple(part.op for part in own.nodes) if own else (),
        scope=node.scope,
        layer=int(layer[1]) if layer else None,
        origin=node.origin,
        shape=" ".join(str(meta.at(largest)) for meta in step.results),
        inputs=tuple(str(s.meta.at(largest)) for s in node.sources),
        weight=step.weight_formats,
        backend=step.backend.name,
        kernel=step.kernel.name,
        why=step.choice.why,
        copy=op.role == TRANSFER,
        integer=step.integer,
        times=times,
        overlap=overlap,
        bytes=sum(cost.bytes for cost in costs),
        flops=sum(cost.flops for cost in costs),
    )


@dataclass
class Total:
    """Sum of several rows. ``limit``: nanoseconds the rows would take at their ceilings."""

    calls: int = 0
    ns: int = 0
    overlap: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    limit: float = 0.0

    def add(self, row: Row, limit: float = 0.0) -> None:
        """Add a row; ``limit``: its nanoseconds at the ceiling."""
        self.calls += len(row.times)
        self.ns += row.ns
        self.overlap += row.overlap
        self.bytes += row.bytes
        self.flops += row.flops
        self.limit += limit

    @property
    def gb_s(self) -> float:
        """Bandwidth in GB/s."""
        return self.bytes / self.ns if self.ns else 0.0

    @property
    def gflop_s(self) -> float:
        """Rate in GFLOP/s."""
        return self.flops / self.ns if self.ns else 0.0


GROUP_KEYS = {
    "op": lambda r: f"{r.op} {r.weight}".strip(),
    "scope": lambda r: r.scope or "-",
    "layer": lambda r: ".".join(r.scope.split(".")[:3]) or "-",
    "backend": lambda r: r.backend,
    "format": lambda r: r.weight or "-",
}


def totals(
    rows: Iterable[Row], by: str = "op", limits: Mapping[Row, float] | None = None
) -> dict[str, Total]:
    """Sum rows by group, the longest first.

    Args:
        rows: rows of a profile.
        by: one of `GROUP_KEYS`: op, scope, layer, backend or format.
        limits: nanoseconds that each row would take at its ceiling.
    """
    sums: dict[str, Total] = {}
    for row in rows:
        sums.setdefault(GROUP_KEYS[by](row), Total()).add(row, (limits or {}).get(row, 0.0))
    return dict(sorted(sums.items(), key=lambda item: -item[1].ns))
