"""Where intermediates live: offsets in one arena, shared by values whose lifetimes do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..backends.alignment import aligned


@dataclass(frozen=True)
class Interval:
    """A buffer of ``nbytes`` needed from step ``first`` to step ``last``, both included."""

    first: int
    last: int
    nbytes: int


def assign(intervals: Sequence[Interval], guard: int = 0) -> tuple[list[int], int]:
    """Offsets for the intervals, and the arena's size in bytes.

    Largest first, each at the lowest offset free for its whole life. With ``guard`` nothing is
    shared and as many bytes are left free before and after each buffer, for canaries.
    """
    if guard:
        offsets, top = [], aligned(guard)
        for interval in intervals:
            offsets.append(top)
            top += aligned(interval.nbytes) + aligned(guard)
        return offsets, top
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, Interval]] = []  # (start, end, whose), by start
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
