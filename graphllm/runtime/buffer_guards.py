"""A watch over buffers, for tests: canaries around each, and NaN in arenas before each run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..backends import Operand
from ..compiler.plan import Place
from ..errors import GraphError

GUARD = 64  # bytes of canary on each side of a buffer
CANARY = 0xA5
POISON = 0xFF  # makes every f32 and f16 a NaN


def surround(buffer: Any, nbytes: int) -> None:
    """Put canaries before and behind the ``nbytes`` that begin `GUARD` bytes into the buffer."""
    buffer[:GUARD] = CANARY
    buffer[GUARD + nbytes :] = CANARY


def check_surrounded(buffers: Iterable[tuple[str, str, Operand]]) -> None:
    """GraphError for one of the buffers (name, memory, operand) that was written outside of."""
    for name, _, operand in buffers:
        buffer, nbytes = operand.buffer, operand.meta.bound().nbytes
        if (buffer[:GUARD] != CANARY).any() or (buffer[GUARD + nbytes :] != CANARY).any():
            raise GraphError(f"a kernel wrote outside the buffer of {name!r}")


def check_arenas(arenas: Mapping[str, Any], spots: Iterable[Place]) -> None:
    """GraphError for a byte of an arena, by memory, that is in no spot and was written."""
    spots = list(spots)
    for memory, arena in arenas.items():
        outside = np.ones(arena.nbytes, bool)
        for spot in spots:
            if spot.memory == memory:
                outside[spot.offset : spot.offset + spot.nbytes] = False
        strays = np.flatnonzero(outside & (arena[:] != POISON))
        if strays.size:
            raise GraphError(f"a kernel wrote outside its buffers, at arena byte {strays[0]}")
