"""Memory planning: arena offsets of intermediates; disjoint lifetimes share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..backends.alignment import aligned


@dataclass(frozen=True)
class Interval:
    """A buffer of ``nbytes`` that is live from step ``first`` to step ``last``, inclusive."""

    first: int
    last: int
    nbytes: int


def assign(intervals: Sequence[Interval], guard: int = 0) -> tuple[list[int], int]:
    """Return an offset for each interval, and the arena's size in bytes.

    The largest buffer comes first; each gets the lowest offset that is free during its lifetime.
    With ``guard``, buffers share no memory and have that many guard bytes before and after them.
    """
    if guard:
        offsets, top = [], aligned(guard)
        for interval in intervals:
            offsets.append(top)
            top += aligned(interval.nbytes) + aligned(guard)
        return offsets, top
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, Interval]] = []  # (start, end, interval), by start
    for index in sorted(range(len(intervals)), key=lambda i: (-intervals[i].nbytes, i)):
        interval = intervals[index]
        need, start = aligned(interval.nbytes), 0
        for low, high, other in placed:
            if other.first > interval.last or other.last < interval.first:
                continue
            if start + need <= low:
                break
            start = max(start, high)
        offsets[index] = start
        placed.append((start, start + need, interval))
        placed.sort(key=lambda p: p[0])
    return offsets, max((end for _, end, _ in placed), default=0)
