"""Where the wall time of timed runs went: it adds up, and what is left has a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..compiler.plan import TRANSFER
from ..ops import get
from .record import Run


@dataclass(frozen=True)
class Pass:
    """The wall window of one timed pass, and the wall time of the same pass without times; all in
    nanoseconds."""

    start: int
    end: int
    plain: int


@dataclass
class TimeAccounting:
    """Nanoseconds of all passes by what they were spent on.

    ``ops`` and ``copies`` (between memories): steps. ``gaps``: no step runs, though the host has
    asked for one: threads wake, launches are on their way, a segment follows another. ``host``:
    nothing is asked for; the host is in Python, between two runs. ``unattributed``: the rest of
    ``wall``, by which clocks differ.
    """

    ops: int = 0
    copies: int = 0
    gaps: int = 0
    host: int = 0
    unattributed: int = 0
    wall: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @property
    def attributed(self) -> float:
        """The share of the wall time that is not unattributed."""
        return 1 - abs(self.unattributed) / self.wall if self.wall else 1.0


def account(passes: Sequence[Pass], runs: Sequence[Run]) -> TimeAccounting:
    """Account for the passes' wall time with the runs that were called in them."""
    total = TimeAccounting()
    for each in passes:
        _account_pass(total, each, [run for run in runs if each.start <= run.called < each.end])
    return total


def _account_pass(total: TimeAccounting, window: Pass, runs: Sequence[Run]) -> None:
    at, spent = window.start, 0  # until when the time is accounted for; sum of what is
    for run in runs:
        host = max(0, run.called - at)
        at = max(at, run.called)
        gaps = busy = 0
        for ends in run.ends:
            gaps += int(ends[0]) - at  # below zero where the clocks differ by more than that
            at = int(ends[-1])
            busy += at - int(ends[0])
        if run.returned > at:
            gaps, at = gaps + run.returned - at, run.returned
        copies = int(run.times[_copy_steps(run)].sum())
        total.ops += busy - copies
        total.copies += copies
        total.gaps += gaps
        total.host += host
        spent += busy + gaps + host
    if window.end > at:  # what follows the last step is Python's
        total.host += window.end - at
        spent += window.end - at
    total.wall += window.end - window.start
    total.unattributed += window.end - window.start - spent


def _copy_steps(run: Run) -> np.ndarray:
    """Which steps copy between memories: bool [n]."""
    return np.array([get(step.node.op).role == TRANSFER for step in run.plan.steps])
