"""Memory planning: arena offsets of intermediates; disjoint lifetimes share memory."""

from __future__ import annotations

from bisect import insort
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
    placed: list[tuple[int, int, int, int]] = []  # (start, end, first, last step), by start
    for index in sorted(range(len(intervals)), key=lambda i: (-intervals[i].nbytes, i)):
        first, last = intervals[index].first, intervals[index].last
        need, start = aligned(intervals[index].nbytes), 0
        for low, high, from_step, to_step in placed:
            if from_step <= last and to_step >= first:
                if start + need <= low:
                    break
                start = max(start, high)
        offsets[index] = start
        insort(placed, (start, start + need, first, last))
    return offsets, max((end for _, end, *_ in placed), default=0)
