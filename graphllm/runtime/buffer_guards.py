"""An executor that detects out-of-bounds writes and reads of uninitialised memory. For tests.

Every buffer is surrounded by guard bytes, intermediates do not share memory, and arenas are filled
with NaN before each run. After the run, guards and unused arena bytes must be unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..backends import Operand
from ..compiler.plan import Allocation, Plan
from ..errors import GraphError
from .buffers import GUARD_VALUE
from .executor import Executor
from .recorder import BoundSegments, Recorder

GUARD_BYTES = 64  # on each side of a buffer
NAN_BYTE = 0xFF  # repeated, it is a NaN in f32 and f16


class GuardedExecutor(Executor):
    """An `Executor` that raises GraphError after a run with an out-of-bounds write."""

    guard_bytes = GUARD_BYTES

    def _recorder(self, profile: Recorder | None) -> Recorder:
        """Return a recorder that guards the run."""
        return _GuardedRun(self, super()._recorder(profile))


class _GuardedRun:
    """A `Recorder` that runs segments between filling the arenas and checking all guards."""

    def __init__(self, executor: Executor, recorder: Recorder | None) -> None:
        self._executor, self._recorder = executor, recorder

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        arenas = {memory: self._executor.arenas[memory] for memory in plan.arena}
        for arena in arenas.values():
            arena[:] = NAN_BYTE
        if self._recorder is not None:
            self._recorder.run(plan, segments, env)
        else:
            for segment, _ in segments:
                segment.run(None)
        check_guards(self._executor.buffers.values())
        check_arenas(arenas, [*plan.allocations.values(), *plan.scratch.values()])


def check_guards(buffers: Iterable[tuple[str, str, Operand]]) -> None:
    """Raise GraphError if the guards of one of the buffers (name, memory, operand) were written."""
    for name, _, operand in buffers:
        buffer, end = operand.buffer, GUARD_BYTES + operand.meta.bound().nbytes
        if (buffer[:GUARD_BYTES] != GUARD_VALUE).any() or (buffer[end:] != GUARD_VALUE).any():
            raise GraphError(f"a kernel wrote outside the buffer of {name!r}")


def check_arenas(arenas: Mapping[str, Any], allocations: Iterable[Allocation]) -> None:
    """Raise GraphError if a byte outside the allocations of an arena (by memory) was written."""
    allocations = list(allocations)
    for memory, arena in arenas.items():
        outside = np.ones(arena.nbytes, bool)
        for allocation in allocations:
            if allocation.memory == memory:
                outside[allocation.offset : allocation.offset + allocation.nbytes] = False
        written = np.flatnonzero(outside & (arena[:] != NAN_BYTE))
        if written.size:
            raise GraphError(f"a kernel wrote outside its buffers, at arena byte {written[0]}")
