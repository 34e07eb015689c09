"""Blocks of the KV cache: which pool rows hold which tokens of a sequence."""

from __future__ import annotations

import numpy as np

from ..errors import RequestError


class BlockTable:
    """One sequence's blocks in one cache group, taken from a free list as the sequence grows.

    Token ``i`` lies in pool row ``table[i // block] * block + i % block``.
    """

    def __init__(self, free: list[int], block: int, width: int) -> None:
        self._free, self._block = free, block
        self.table = np.full(width, -1, np.int32)
        self._used = 0

    def grow(self, tokens: int) -> bool:
        """Own enough blocks for ``tokens`` tokens; whether that took new ones.

        RequestError when the pool is full.
        """
        need, before = -(-tokens // self._block), self._used
        while self._used < need:
            if self._used == len(self.table) or not self._free:
                raise RequestError(f"the KV cache is full: {tokens} tokens do not fit")
            self.table[self._used] = self._free.pop(0)
            self._used += 1
        return self._used != before

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Pool rows of the tokens ``start..stop``, which must be within what was grown."""
        at = np.arange(start, stop)
        return (self.table[at // self._block] * self._block + at % self._block).astype(np.int32)

    def release(self) -> None:
        """Give all blocks back."""
        self._free.extend(self.table[: self._used].tolist())
        self.table[:] = -1
        self._used = 0
