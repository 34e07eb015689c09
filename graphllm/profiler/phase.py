"""One phase of a profile: times, bytes and FLOPs of every step of prefill or decode."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..compiler.plan import Plan
from . import machine_load
from .accounting import Pass, TimeAccounting, account
from .arena_map import arenas
from .record import Row, Run, plans_of, rows_of
from .request_costs import RequestCost, request_costs
from .speed import Speed, speed

if TYPE_CHECKING:
    from ..engine.sequence import ActiveSequence
    from .ramp_record import PhaseRamps


@dataclass(frozen=True)
class Roofline:
    """Ceilings of a backend at the thread count of the run: memory bandwidth and peak FLOP/s.

    Attributes:
        date: time of the measurement, ISO 8601.
        stale: measured on another machine, or too long ago.
        doubt: reason to measure again, or empty.
        bytes_s: memory read bandwidth in bytes per second.
        float_flop_s: peak operations per second on floats.
        integer_flop_s: peak operations per second on quantized activations.
    """

    date: str
    stale: bool
    doubt: str
    bytes_s: float
    float_flop_s: float
    integer_flop_s: float

    def limit(self, row: Row) -> tuple[float, str]:
        """Return the nanoseconds that the row would take at its ceiling, and what binds it.

        What binds is ``memory`` or ``arithmetic``, or empty if neither ceiling is known.
        """
        rate = self.integer_flop_s if row.integer else self.float_flop_s
        memory = 1e9 * row.bytes / self.bytes_s if self.bytes_s else 0.0
        arithmetic = 1e9 * row.flops / rate if rate else 0.0
        if not memory and not arithmetic:
            return 0.0, ""
        return max((memory, "memory"), (arithmetic, "arithmetic"))


@dataclass(frozen=True)
class Phase:
    """Prefill or decode: all profiled runs of ``passes`` passes of ``tokens`` tokens each.

    ``indices``: index of the request of each sequence, in every pass. ``ramps``: ramps of its
    launches, from a pass of their own, if they were asked for.
    """

    name: str
    tokens: int
    passes: tuple[Pass, ...]
    runs: tuple[Run, ...]
    rooflines: Mapping[str, Roofline]
    indices: Mapping[ActiveSequence, int] = field(default_factory=dict)
    ramps: PhaseRamps | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """One row per step of each plan (`record.rows_of`)."""
        return rows_of(self.runs)

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans that ran."""
        return plans_of(self.runs)

    @cached_property
    def requests(self) -> list[RequestCost]:
        """Cost of each request in this phase (`request_costs`)."""
        return request_costs(self.passes, self.runs, self.indices)

    @cached_property
    def limits(self) -> dict[Row, tuple[float, str]]:
        """Nanoseconds of each row at its ceiling, and the binding resource."""
        known = ((row, self.rooflines.get(row.backend)) for row in self.rows)
        return {row: roofline.limit(row) for row, roofline in known if roofline is not None}

    @cached_property
    def accounting(self) -> TimeAccounting:
        """Wall time of the profiled passes by cause."""
        return account(self.passes, self.runs)

    @cached_property
    def speed(self) -> Speed:
        """Speed of the passes without profiling."""
        return speed(self.tokens, [p.plain for p in self.passes])

    @property
    def tok_s(self) -> float:
        """Median tokens per second of the passes without profiling."""
        return self.speed.tok_s

    @cached_property
    def interference(self) -> float:
        """Excess of a slow run over the fastest: `machine_load.interference_of_steps`."""
        found = [0.0]
        for plan in self.plans:
            own = [run for run in self.runs if run.plan is plan]
            times = np.stack([run.times for run in own], axis=1)
            each = machine_load.times_by_pass(
                times, np.array([self._pass(run) for run in own]), len(self.passes)
            )
            found.append(machine_load.interference_of_steps(each))
        return max(found)

    def _pass(self, run: Run) -> int:
        """Return the index of the pass that contains the run."""
        return next(i for i, p in enumerate(self.passes) if p.start <= run.called < p.end)

    @property
    def overhead(self) -> float:
        """Profiling overhead: median ratio of profiled to plain wall time, minus 1."""
        return statistics.median((p.end - p.start) / p.plain for p in self.passes) - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form (docs/profile-format.md)."""
        zero = self.passes[0].start
        return {
            "name": self.name,
            "tokens": self.tokens,
            "passes": [
                {"start": p.start - zero, "end": p.end - zero, "plain": p.plain}
                for p in self.passes
            ],
            "speed": self.speed.as_dict(),
            "overhead": self.overhead,
            "disturbed": self.interference,
            "closing": self.accounting.as_dict(),
            "requests": [cost.as_dict() for cost in self.requests],
            "rows": [self._row(row) for row in self.rows],
            "runs": [self._run(run, zero) for run in self.runs],
            "arena": [
                {"plan": index, **each}
                for index, plan in enumerate(self.plans)
                for each in arenas(plan)
            ],
            **({"ramps": self.ramps.as_dict()} if self.ramps else {}),
        }

    def _row(self, row: Row) -> dict[str, Any]:
        limit, bound = self.limits.get(row, (None, ""))
        own = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "integer"}
        return {**own, "limit": limit if bound else None, "bound": bound}

    def _run(self, run: Run, zero: int) -> dict[str, Any]:
        segments, first = [], 0
        for ends in run.ends:
            count = len(ends) - 1
            segments.append({"first": first, "count": count, "begin": int(ends[0]) - zero})
            first += count
        return {
            "plan": next(i for i, plan in enumerate(self.plans) if plan is run.plan),
            "pass": self._pass(run),
            "called": run.called - zero,
            "returned": run.returned - zero,
            "env": dict(run.env),
            "segments": segments,
        }
