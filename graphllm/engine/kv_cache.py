"""Block table of the paged KV cache: the pool rows that hold a sequence's tokens."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError


class BlockTable:
    """Block table of one sequence in one cache group.

    Token ``i`` is stored in pool row ``table[i // block] * block + i % block``. Blocks are taken
    from a free list as the sequence grows.

    Args:
        free: indices of the pool's free blocks, shared by all sequences of the group.
        block: tokens per block.
        width: length of the table, in blocks.
        max_blocks: maximum number of blocks owned at a time, ``width`` by default. Beyond that the
            oldest block is reused, and its tokens are lost.
        window: sliding window of the group's layers, in tokens; 0 without one.
    """

    def __init__(
        self,
        free: list[int],
        block: int,
        width: int,
        max_blocks: int | None = None,
        window: int = 0,
    ) -> None:
        self._free, self._block, self._window = free, block, window
        self._max_blocks = width if max_blocks is None else max_blocks
        self.table = np.full(width, -1, np.int32)
        self._first = self._used = 0  # entries [first, used) of the table are owned blocks

    def grow(self, tokens: int) -> bool:
        """Take the blocks needed for ``tokens`` tokens in all; return whether there were new ones.

        RequestError: the pool is full.
        """
        need, before = -(-tokens // self._block), self._used
        while self._used < need:
            full = self._used == len(self.table)
            if not full and self._used - self._first == self._max_blocks:
                taken, self.table[self._first] = self.table[self._first], -1
                self._first += 1
            elif not full and self._free:
                taken = self._free.pop(0)
            else:
                raise RequestError(f"the KV cache is full: {tokens} tokens do not fit")
            self.table[self._used] = taken
            self._used += 1
        return self._used != before

    def holds(self, tokens: int) -> bool:
        """Whether the keys that a token after the first ``tokens`` attends to are still stored."""
        oldest = max(0, tokens - self._window + 1) if self._window else 0
        return tokens == 0 or oldest // self._block >= self._first

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Return the pool rows int32 [stop - start] of tokens ``start`` to ``stop - 1``."""
        at = np.arange(start, stop)
        return (self.table[at // self._block] * self._block + at % self._block).astype(np.int32)

    def release(self) -> None:
        """Return all blocks to the front of the free list, since their memory is already in use."""
        self._free[:0] = sorted(self.table[self._first : self._used].tolist())
        self.table[:] = -1
        self._first = self._used = 0
