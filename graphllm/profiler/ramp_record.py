"""Recording of ramps: runs whose thread blocks record their times, and sums by group.

Such runs have a pass of their own after those of the profile, since each run is read before the
next one begins. `graphllm.profiler.ramps` has the assumptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import TimestampLog
from ..backends.block_times import BlockTimes
from ..errors import RequestError
from ..ops import get
from . import roofline
from .ramps import LEVEL, Ramp, clock_resolution, ramp
from .record import GROUP_KEYS, Recorder, Row, plans_of

if TYPE_CHECKING:
    from ..backends import Backend
    from ..compiler.plan import Plan, Step
    from ..runtime.recorder import BoundSegments

MAX_RUNS = 16  # of each plan


@dataclass(frozen=True)
class StepRamps:
    """Ramps of one step.

    Attributes:
        row: the step.
        calls: its ramps in each run; empty if its blocks are unknown.
        every: one in this many of its thread blocks was recorded.
    """

    row: Row
    calls: tuple[Ramp, ...]
    every: int


@dataclass
class RampTotal:
    """Sum of several steps, in nanoseconds; ``up`` and ``down`` of the calls that ``reached``."""

    calls: int = 0
    reached: int = 0
    ns: float = 0.0
    up: float = 0.0
    down: float = 0.0
    below: float = 0.0

    def add(self, each: Ramp) -> None:
        """Add a call."""
        self.calls += 1
        self.ns += each.time
        self.below += each.below
        if each.reached:
            self.reached += 1
            self.up += each.up
            self.down += each.down


@dataclass(frozen=True)
class PhaseRamps:
    """Ramps of all steps of a phase.

    Attributes:
        bytes_s: memory bandwidth that they are held against, in bytes per second.
        resolution: nanoseconds by which the GPU's clock advances.
        runs: number of runs that were recorded.
        steps: the steps, those without ramps included.
    """

    bytes_s: float
    resolution: int
    runs: int
    steps: tuple[StepRamps, ...]

    def totals(self, by: str) -> dict[str, RampTotal]:
        """Sum the recorded steps by one of `record.GROUP_KEYS`, the longest first."""
        sums: dict[str, RampTotal] = {}
        for step in self.steps:
            for each in step.calls:
                sums.setdefault(GROUP_KEYS[by](step.row), RampTotal()).add(each)
        return dict(sorted(sums.items(), key=lambda item: -item[1].ns))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form (docs/profile-format.md)."""
        return {
            "level": LEVEL,
            "bytes_s": self.bytes_s,
            "resolution": self.resolution,
            "runs": self.runs,
            "rows": [_plain(step) for step in self.steps if step.calls],
        }


def _plain(step: StepRamps) -> dict[str, Any]:
    total = RampTotal()
    for each in step.calls:
        total.add(each)
    names = ("op", "scope", "weight", "backend", "kernel")
    own = {name: getattr(step.row, name) for name in names}
    return {**own, "every": step.every, **vars(total)}


class RampRecorder(Recorder):
    """Records the first runs of each plan with the times of thread blocks; runs all others plainly.

    Args:
        bytes_s: memory bandwidth in bytes per second.
        most: number of runs of each plan to record.
    """

    def __init__(self, bytes_s: float, most: int = MAX_RUNS) -> None:
        super().__init__(lambda: TimestampLog(blocks=[]))
        self._bytes_s, self._most = bytes_s, most
        self._recorded: Counter[Plan] = Counter()
        self._calls: dict[tuple[Plan, int], list[Ramp]] = {}
        self._every: dict[tuple[Plan, int], int] = {}
        self._resolution = 0

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` of ``plan``, and compute its ramps; ``env``: values of the Vars."""
        if self._recorded[plan] == self._most:
            for segment, _ in segments:
                segment.run(None)
            return
        self._recorded[plan] += 1
        super().run(plan, segments, env)
        first = 0
        for (_, steps), (log, at) in zip(segments, self._pending[-1].places):
            log.collect()
            blocks = log.blocks.pop() if log.blocks else [None] * len(steps)
            ends = log.runs[at][0]
            for index, (step, launches) in enumerate(zip(steps, blocks)):
                if launches:
                    window = int(ends[index]), int(ends[index + 1])
                    self._add((plan, first + index), step, launches, env, window)
            first += len(steps)

    def _add(
        self, key: tuple[Plan, int], step: Step, launches: Sequence[BlockTimes],
        env: Mapping[str, int], window: tuple[int, int],
    ) -> None:  # fmt: skip
        begin, end = window
        nbytes = get(step.node.op).node_cost(step.node, env).bytes
        times = [(each.starts - begin, each.ends - begin) for each in launches]
        found = ramp(times, 0, end - begin, nbytes, self._bytes_s)
        self._calls.setdefault(key, []).append(found)
        self._every[key] = max(each.every for each in launches)
        finest = clock_resolution(np.concatenate([part for pair in times for part in pair]))
        known = [each for each in (finest, self._resolution) if each]
        self._resolution = min(known, default=0)

    def ramps(self) -> PhaseRamps:
        """Return the ramps of all recorded runs."""
        found, plans = [], plans_of(self.runs)
        for row in self.rows:
            key = plans[row.plan], row.step
            calls = tuple(self._calls.get(key, ()))
            found.append(StepRamps(row, calls, self._every.get(key, 1)))
        runs = sum(self._recorded.values())
        return PhaseRamps(self._bytes_s, self._resolution, runs, tuple(found))


def bandwidth_of(backends: Sequence[Backend]) -> float:
    """Return the measured memory bandwidth of the backend that records blocks, in bytes/s.

    Raises:
        RequestError: there is no such backend, or its ceilings have not been measured.
    """
    able = [backend.name for backend in backends if backend.block_times]
    if not able:
        used = ", ".join(backend.name for backend in backends)
        raise RequestError(
            f"ramps = True needs a GPU of CUDA, whose kernels record them; in use: {used}", "ramps"
        )
    ceilings = roofline.load_cached(able[0])
    bytes_s = ceilings.bytes_s() if ceilings is not None else 0.0
    if not bytes_s:
        how = "graphllm doctor --measure"
        raise RequestError(
            f"ramps = True needs the memory bandwidth of {able[0]}: run {how} first", "ramps"
        )
    return bytes_s
