"""Blocks of the KV cache: which pool rows hold which tokens of a sequence."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError


class BlockTable:
    """One sequence's blocks in one cache group, taken from a free list as the sequence grows.

    Token ``i`` lies in pool row ``table[i // block] * block + i % block``. A sequence owns ``most``
    blocks at a time: beyond that a new block is the oldest one, whose tokens are lost. Where the
    group's layers look back on a ``window`` (0: on all), they have no need of them.
    """

    def __init__(
        self, free: list[int], block: int, width: int, most: int | None = None, window: int = 0
    ) -> None:
        self._free, self._block, self._window = free, block, window
        self._most = width if most is None else most
        self.table = np.full(width, -1, np.int32)
        self._first = self._used = 0  # the blocks that it owns: first..used

    def grow(self, tokens: int) -> bool:
        """Own enough blocks for ``tokens`` tokens; whether that took new ones.

        RequestError when the pool is full.
        """
        need, before = -(-tokens // self._block), self._used
        while self._used < need:
            full = self._used == len(self.table)
            if not full and self._used - self._first == self._most:
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
        """Whether all is there that a next token after the first ``tokens`` may look back on."""
        oldest = max(0, tokens - self._window + 1) if self._window else 0
        return tokens == 0 or oldest // self._block >= self._first

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Pool rows of the tokens ``start..stop``, which must be within what was grown."""
        at = np.arange(start, stop)
        return (self.table[at // self._block] * self._block + at % self._block).astype(np.int32)

    def release(self) -> None:
        """Give all blocks back, to be taken again first: their memory is in use already."""
        self._free[:0] = sorted(self.table[self._first : self._used].tolist())
        self.table[:] = -1
        self._first = self._used = 0
