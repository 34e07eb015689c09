"""The KV cache blocks that one sequence holds, and their content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class CachedBlock(NamedTuple):
    """Content of a block that a later sequence may use.

    Attributes:
        key: digest of the sequence up to the end of the block; None for a partial block.
        parent: digest of the sequence up to the start of the block.
        tokens: the tokens in the block, as int32 bytes.
        position: index of the block in its sequence.
    """

    key: bytes | None
    parent: bytes
    tokens: bytes
    position: int


class BlockCopy(NamedTuple):
    """A copy of a block in the pools of a cache group."""

    group: str
    source: int
    target: int


class SequenceBlocks:
    """The blocks that one sequence holds, by cache group; made by `BlockManager.begin`.

    What is private belongs to the manager.

    Attributes:
        tables: block table int32 [width] by group; -1 where no block is held.
        cached: number of tokens whose keys and values were found in the cache.
        computed: number of tokens whose keys and values are in the blocks.
        private: whether no other sequence may find them.
        copies: what the caller of `BlockManager.fork` copies.
    """

    def __init__(
        self, names: Iterable[str], width: int, tokens: Sequence[int], root: bytes, prefix: int
    ) -> None:
        self.tables = {name: np.full(width, -1, np.int32) for name in names}
        self.cached = self.computed = 0
        self.private = False
        self.copies: list[BlockCopy] = []
        self._tokens = tokens
        self._prefix = prefix
        self._keys = [root]  # the root's, and the digest up to the end of each computed full block
        self._given = tokens  # to `begin`
        self._data = b""  # the same tokens, as int32
        self._expected: list[bytes] = []  # keys of their full blocks
        self._first = [0] * len(self.tables)  # by group: entries [first, used) are held
        self._used = 0
        self._taken: list[CachedBlock] = []  # what was in the blocks being taken over, by group
        self._reserved = 0  # tokens for which blocks were reserved
        self._drop_at = 0  # number of computed tokens from which a windowed group drops a block

    @property
    def complete(self) -> bool:
        """Whether they include the last block that a sequence of any length has."""
        return all(self._used >= len(table) for table in self.tables.values())

    def alike(self, other: SequenceBlocks) -> bool:
        """Whether both hold as many blocks, all of them computed or reserved."""
        mine, others = (
            (each.computed, each._used, each._first, each._prefix) for each in (self, other)
        )
        pending = self._taken or other._taken or self._expected[len(self._keys) - 1 :]
        return mine == others and not pending
