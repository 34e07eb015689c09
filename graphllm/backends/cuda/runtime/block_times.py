"""Start and end of thread blocks: where each launch records them, and what was recorded.

Only the build with BLOCK_TIMES (common.cuh) records them. A launch has at most `MAX_BLOCKS` entries
in device memory; of a launch with more blocks, one in an odd number of blocks records its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...block_times import BlockTimes
from .arguments import ArgumentStruct
from .work import HostCall, Launch, Work

MAX_BLOCKS = 4096  # of a launch whose times are recorded
ENTRY = np.dtype([("start", np.int64), ("end", np.int64)])  # struct BlockTimes of common.cuh
_SAMPLE = ArgumentStruct("common.cuh", "BlockSample")


@dataclass(frozen=True)
class BlockEntries:
    """Entries of one launch: ``count`` from ``first`` on, of one in ``every`` blocks."""

    first: int
    count: int
    every: int

    @classmethod
    def of(cls, launch: Launch, first: int) -> BlockEntries:
        """The entries of ``launch``, at ``first``."""
        blocks = prod(launch.grid)
        every = -(-blocks // MAX_BLOCKS)
        every += 1 - every % 2  # an even number could miss whole columns of an even grid
        return cls(first, -(-blocks // every), every)

    def argument(self, address: int) -> bytes:
        """The kernel's argument; ``address``: that of entry 0."""
        return _SAMPLE.pack(to=address + ENTRY.itemsize * self.first, every=self.every)


class BlockTable:
    """Entries of all launches of a segment. Launches with an empty grid are not made and have none.

    Args:
        work: launches and host calls of each step.
    """

    def __init__(self, work: Sequence[Sequence[Work]]) -> None:
        self.count = 0  # of entries
        self._calls_host = [any(isinstance(each, HostCall) for each in part) for part in work]
        self._entries: list[dict[int, BlockEntries]] = []  # of each step, by index of its work
        for part in work:
            own: dict[int, BlockEntries] = {}
            for index, each in enumerate(part):
                if isinstance(each, Launch) and 0 not in each.grid:
                    own[index] = BlockEntries.of(each, self.count)
                    self.count += own[index].count
            self._entries.append(own)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory of the entries."""
        return ENTRY.itemsize * self.count

    def find(self, step: int, index: int) -> BlockEntries | None:
        """The entries of work ``index`` of a step; None if it is not launched."""
        return self._entries[step].get(index)

    def read(self, raw: np.ndarray, offset: int) -> list[tuple[BlockTimes, ...] | None]:
        """The times of the launches of each step, as in `graphllm.backends.TimestampLog`.

        Args:
            raw: the bytes of all entries.
            offset: nanoseconds to add to the GPU's clock.
        """
        times = raw[: self.nbytes].view(ENTRY)
        found: list[tuple[BlockTimes, ...] | None] = []
        for own, calls_host in zip(self._entries, self._calls_host):
            parts = [(times[e.first : e.first + e.count], e.every) for e in own.values()]
            launches = (BlockTimes(t["start"] + offset, t["end"] + offset, n) for t, n in parts)
            found.append(None if calls_host else tuple(launches))
        return found
