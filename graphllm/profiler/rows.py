"""Profile rows: one for each step that ran, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..ops import get
from ..ops.parts import parts

if TYPE_CHECKING:
    from ..plan import Step


@dataclass(frozen=True)
class Row:
    """One step of one run. ``ns`` is its end minus the previous step's end on the device's clock;
    ``bytes`` and ``flops`` are what the op must move and compute, by its declared cost."""

    op: str
    scope: str
    origin: str
    shape: str
    weight: str  # the formats of its weight matrices, if it has any
    backend: str
    kernel: str
    why: str  # why not on the first backend; empty when it is
    ns: int
    bytes: float
    flops: float
    parts: tuple[str, ...] = ()  # the ops that a fused one stands for


def make_row(step: Step, env: Mapping[str, int], ns: int) -> Row:
    node, op = step.node, get(step.node.op)
    cost = op.price(node, env)
    weights = [s.dtype.name for s in node.sources if s.base.op == "weight" and s.meta.ndim > 1]
    own = parts(node) if op.fusion else None
    shapes = [r.meta for r, s in zip(own.results, own.states) if s is None] if own else [node.meta]
    return Row(
        op=node.op,
        scope=node.scope,
        origin=node.origin,
        shape=" ".join(str(meta.at(env)) for meta in shapes),
        weight="+".join(dict.fromkeys(weights)),
        backend=step.backend.name,
        kernel=step.kernel.name,
        why=step.choice.why,
        ns=ns,
        bytes=cost.bytes,
        flops=cost.flops,
        parts=tuple(part.op for part in own.nodes) if own else (),
    )


class Recorder:
    """Collects what a run's segments measured; rows are made when asked for, not while it runs."""

    def __init__(self) -> None:
        self._runs: list[tuple[Sequence[Step], Mapping[str, int], np.ndarray]] = []

    def record(self, steps: Sequence[Step], env: Mapping[str, int], times: np.ndarray) -> None:
        """``times``: clock readings in nanoseconds, before the first step and after each."""
        self._runs.append((steps, env, times))

    @property
    def rows(self) -> list[Row]:
        return [
            make_row(step, env, int(ns))
            for steps, env, times in self._runs
            for step, ns in zip(steps, np.diff(times))
        ]


@dataclass
class Total:
    """Rows of one kind, summed."""

    calls: int = 0
    ns: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, row: Row) -> None:
        self.calls += 1
        self.ns += row.ns
        self.bytes += row.bytes
        self.flops += row.flops

    @property
    def gb_s(self) -> float:
        return self.bytes / self.ns if self.ns else 0.0

    @property
    def gflop_s(self) -> float:
        return self.flops / self.ns if self.ns else 0.0


KEYS = {
    "op": lambda r: f"{r.op} {r.weight}".strip(),
    "scope": lambda r: r.scope or "-",
    "layer": lambda r: ".".join(r.scope.split(".")[:3]) or "-",
    "backend": lambda r: r.backend,
    "format": lambda r: r.weight or "-",
}


def totals(rows: Iterable[Row], by: str = "op") -> dict[str, Total]:
    """Rows summed by op, scope, layer, backend or format, the longest first."""
    sums: dict[str, Total] = {}
    for row in rows:
        sums.setdefault(KEYS[by](row), Total()).add(row)
    return dict(sorted(sums.items(), key=lambda item: -item[1].ns))
