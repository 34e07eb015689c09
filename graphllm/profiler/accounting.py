"""Accounting of wall time: ops, copies, gaps, host time and the unattributed rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from ..compiler.plan import TRANSFER
from ..ops import get
from .record import Run


@dataclass(frozen=True)
class Pass:
    """One profiled pass; all values in nanoseconds.

    Attributes:
        start: begin of the profiled pass.
        end: end of the profiled pass.
        plain: wall time of the same pass without profiling.
    """

    start: int
    end: int
    plain: int


@dataclass
class TimeAccounting:
    """Wall time of all passes in nanoseconds, split by cause.

    Attributes:
        ops: steps that compute.
        copies: steps that copy between memories.
        gaps: a run is in progress, but none of its steps: threads wake up, a launch is on its way,
            or the next segment begins.
        host: no run is in progress: Python code between two runs.
        unattributed: the rest of ``wall``, due to differences between clocks.
        wall: wall time of the profiled passes.
    """

    ops: int = 0
    copies: int = 0
    gaps: int = 0
    host: int = 0
    unattributed: int = 0
    wall: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the JSON form."""
        return asdict(self)

    @property
    def attributed(self) -> float:
        """Share of the wall time that is attributed to a cause."""
        return 1 - abs(self.unattributed) / self.wall if self.wall else 1.0


class RunTime(NamedTuple):
    """Nanoseconds of one run: ``host`` before it, ``gaps`` within it, and its steps (``busy``)."""

    host: int
    gaps: int
    busy: int


def account(passes: Sequence[Pass], runs: Sequence[Run]) -> TimeAccounting:
    """Split the wall time of ``passes`` by cause; ``runs``: the runs that began within them."""
    total = TimeAccounting()
    for each in passes:
        _account_pass(total, each, runs_of(each, runs))
    return total


def runs_of(window: Pass, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that began within a pass."""
    return [run for run in runs if window.start <= run.called < window.end]


def run_times(window: Pass, runs: Sequence[Run]) -> tuple[list[RunTime], int]:
    """Return the times of the runs of a pass, and those of the host after the last step."""
    found, at = [], window.start
    for run in runs:
        own, at = run_time(run, at)
        found.append(own)
    return found, max(0, window.end - at)


def run_time(run: Run, at: int) -> tuple[RunTime, int]:
    """Return the times of a run from ``at`` on, when the run before it had ended; and its end."""
    host = max(0, run.called - at)
    at = max(at, run.called)
    gaps = busy = 0
    for ends in run.ends:
        gaps += int(ends[0]) - at  # negative if the clocks differ by more than the gap
        at = int(ends[-1])
        busy += at - int(ends[0])
    if run.returned > at:
        gaps, at = gaps + run.returned - at, run.returned
    return RunTime(host, gaps, busy), at


def _account_pass(total: TimeAccounting, window: Pass, runs: Sequence[Run]) -> None:
    times, rest = run_times(window, runs)
    host, gaps, busy = (sum(each) for each in zip(*times)) if times else (0, 0, 0)
    copies = sum(int(run.times[_copy_steps(run)].sum()) for run in runs)
    total.ops += busy - copies
    total.copies += copies
    total.gaps += gaps
    total.host += host + rest
    wall = window.end - window.start
    total.wall += wall
    total.unattributed += wall - host - gaps - busy - rest


def _copy_steps(run: Run) -> np.ndarray:
    """Mask of the steps that copy between memories: bool [n]."""
    return np.array([get(step.node.op).role == TRANSFER for step in run.plan.steps])
