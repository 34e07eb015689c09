"""What timed runs of plans noted: a row for each step, and sums of rows."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..backends import Segment, TimestampLog
from ..compiler.plan import TRANSFER
from ..graph.fused_op import decompose
from ..ops import get

if TYPE_CHECKING:
    from ..compiler.plan import Plan, Step
    from ..runtime.recorder import BoundSegments


@dataclass(frozen=True, eq=False)
class Row:
    """One step of a plan, over all its runs.

    ``times``: nanoseconds of each run, its end less the end of the step before on the device's
    clock. ``overlap``: how long it had been running by then, in all. ``bytes`` and ``flops``: what
    the op must move and compute in these runs, by its declared cost.
    """

    plan: int  # counts the plans of a recorder
    step: int
    op: str
    parts: tuple[str, ...]  # the ops that a fused one stands for
    scope: str
    layer: int | None
    origin: str
    shape: str
    inputs: tuple[str, ...]
    weight: str  # the formats of its weight matrices, if it has any
    backend: str
    kernel: str
    why: str  # why not on the first backend; empty when it is
    copy: bool  # between memories
    integer: bool  # its products are of integers
    times: tuple[int, ...]
    overlap: int
    bytes: float
    flops: float

    @property
    def ns(self) -> int:
        return sum(self.times)

    @property
    def fastest(self) -> Row:
        """Its fastest run alone, of runs of one size."""
        calls = len(self.times)
        size = self.bytes / calls, self.flops / calls
        return replace(self, times=(min(self.times),), overlap=0, bytes=size[0], flops=size[1])


@dataclass(frozen=True)
class Run:
    """One run of a plan: when the host began it and had it back, and its segments' times, as in
    `graphllm.backends.TimestampLog`."""

    plan: Plan
    env: Mapping[str, int]
    called: int
    returned: int
    ends: tuple[np.ndarray, ...]
    starts: tuple[np.ndarray, ...]

    @property
    def times(self) -> np.ndarray:
        """Nanoseconds of each step [n]."""
        return np.concatenate([np.diff(ends) for ends in self.ends])

    @property
    def overlaps(self) -> np.ndarray:
        """Nanoseconds that each step [n] had been running when the one before it ended."""
        pairs = zip(self.ends, self.starts)
        return np.concatenate([np.maximum(ends[:-1] - starts, 0) for ends, starts in pairs])


@dataclass(frozen=True)
class _Pending:
    """A run whose times may not be there yet: for each segment its log, and the place in it."""

    plan: Plan
    env: Mapping[str, int]
    called: int
    returned: int
    places: tuple[tuple[TimestampLog, int], ...]


class Recorder:
    """Times runs, and keeps what they note. Rows are made when asked for, not while plans run."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []
        self._logs: dict[Segment, TimestampLog] = {}
        self._counts: Counter[Segment] = Counter()  # timed runs

    def run(self, plan: Plan, pieces: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``pieces`` of ``plan``, timed, with these values of the Vars."""
        places, called = [], time.perf_counter_ns()
        for segment, _ in pieces:
            log = self._logs.setdefault(segment, TimestampLog())
            segment.run(log)
            places.append((log, self._counts[segment]))
            self._counts[segment] += 1
        now = time.perf_counter_ns()
        self._pending.append(_Pending(plan, dict(env), called, now, tuple(places)))

    @property
    def runs(self) -> list[Run]:
        """All of them, once they are over."""
        for log in self._logs.values():
            log.collect()
        return [
            Run(
                p.plan, p.env, p.called, p.returned,
                tuple(log.runs[at][0] for log, at in p.places),
                tuple(log.runs[at][1] for log, at in p.places),
            )
            for p in self._pending
        ]  # fmt: skip

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.runs)


def plans_of(runs: Iterable[Run]) -> list[Plan]:
    """The plans that were run, each once, in order."""
    return list(dict.fromkeys(run.plan for run in runs))


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each step of each plan, in the order of running."""
    rows = []
    for index, plan in enumerate(plans_of(runs)):
        own = [run for run in runs if run.plan is plan]
        times = np.stack([run.times for run in own])  # [runs, steps]
        overlaps = np.stack([run.overlaps for run in own]).sum(0)
        for step in range(len(plan.steps)):
            some = tuple(times[:, step].tolist()), int(overlaps[step])
            rows.append(_row(index, step, plan.steps[step], [run.env for run in own], *some))
    return rows


def _row(
    plan: int, index: int, step: Step, envs: Sequence[Mapping[str, int]], times: tuple[int, ...],
    overlap: int,
) -> Row:  # fmt: skip
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
    """Rows of one kind, summed. ``limit``: nanoseconds at the ceiling that binds each of them."""

    calls: int = 0
    ns: int = 0
    overlap: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    limit: float = 0.0

    def add(self, row: Row, limit: float = 0.0) -> None:
        self.calls += len(row.times)
        self.ns += row.ns
        self.overlap += row.overlap
        self.bytes += row.bytes
        self.flops += row.flops
        self.limit += limit

    @property
    def gb_s(self) -> float:
        return self.bytes / self.ns if self.ns else 0.0

    @property
    def gflop_s(self) -> float:
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
    """Rows summed by op, scope, layer, backend or format, the longest first.

    ``limits``: nanoseconds at the ceiling of each row.
    """
    sums: dict[str, Total] = {}
    for row in rows:
        sums.setdefault(GROUP_KEYS[by](row), Total()).add(row, (limits or {}).get(row, 0.0))
    return dict(sorted(sums.items(), key=lambda item: -item[1].ns))
