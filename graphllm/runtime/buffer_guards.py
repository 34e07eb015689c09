"""A watch over buffers, for tests: canaries around each, and NaN in arenas before each run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..backends import Operand
from ..compiler.plan import Allocation
from ..errors import GraphError

GUARD_BYTES = 64  # bytes of canary on each side of a buffer
GUARD_VALUE = 0xA5
NAN_BYTE = 0xFF  # makes every f32 and f16 a NaN


def write_guards(buffer: Any, nbytes: int) -> None:
    """Fill the guards around the ``nbytes`` that begin at offset `GUARD_BYTES` of the buffer."""
    buffer[:GUARD_BYTES] = GUARD_VALUE
    buffer[GUARD_BYTES + nbytes :] = GUARD_VALUE


def check_guards(buffers: Iterable[tuple[str, str, Operand]]) -> None:
    """GraphError for one of the buffers (name, memory, operand) that was written outside of."""
    for name, _, operand in buffers:
        buffer, nbytes = operand.buffer, operand.meta.bound().nbytes
        if (buffer[:GUARD_BYTES] != GUARD_VALUE).any() or (
            buffer[GUARD_BYTES + nbytes :] != GUARD_VALUE
        ).any():
            raise GraphError(f"a kernel wrote outside the buffer of {name!r}")


def check_arenas(arenas: Mapping[str, Any], allocations: Iterable[Allocation]) -> None:
    """GraphError for a byte of an arena, by memory, that is in no spot and was written."""
    allocations = list(allocations)
    for memory, arena in arenas.items():
        outside = np.ones(arena.nbytes, bool)
        for allocation in allocations:
            if allocation.memory == memory:
                outside[allocation.offset : allocation.offset + allocation.nbytes] = False
        strays = np.flatnonzero(outside & (arena[:] != NAN_BYTE))
        if strays.size:
            raise GraphError(f"a kernel wrote outside its buffers, at arena byte {strays[0]}")
