"""Physical blocks of KV cache groups: free, held by sequences, or cached for later ones."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..model.batch import CacheSpec
from .sequence_blocks import CachedBlock, SequenceBlocks

TOKEN_BYTES = 4  # tokens are compared and hashed as int32


class BlockPool:
    """Blocks of one cache group.

    A block is free, held (in the block tables of ``counts[block]`` sequences), or cached: held by
    none, with content that a later sequence may use. Held blocks have an entry as well as soon as
    their content is computed. Blocks are taken from the free list, the last one returned first, and
    then from the cached blocks, the least recently used first.

    Args:
        size: number of blocks.
        window: sliding window of the group's layers, in tokens; 0 without one.
        block: tokens of a block.

    Attributes:
        counts: number of tables that contain each block.
        entries: content of each block that can be found; None for the others.
        evictions: number of cached blocks whose content was lost to another sequence.
    """

    def __init__(self, size: int, window: int, block: int) -> None:
        self.window, self._block = window, block
        self.counts = [0] * size
        self.entries: list[CachedBlock | None] = [None] * size
        self.evictions = 0
        self._free = list(range(size - 1, -1, -1))
        self._unheld: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[bytes, int] = {}  # full blocks by key
        self._children: dict[bytes, dict[int, None]] = {}  # all blocks with an entry, by parent

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.counts)

    @property
    def free(self) -> int:
        """Number of blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks with content that no sequence holds."""
        return len(self._unheld)

    @property
    def held(self) -> int:
        """Number of blocks that sequences hold."""
        return self.size - self.available

    @property
    def available(self) -> int:
        """Number of blocks that can be taken."""
        return len(self._free) + len(self._unheld)

    def first_block(self, position: int) -> int:
        """Return the first block that the token at ``position`` attends to."""
        return max(0, position - self.window + 1) // self._block if self.window else 0

    def kept(self, step: int) -> int:
        """Return how many blocks a sequence holds at most when a step computes ``step`` tokens."""
        return -(-(self.window + step) // self._block) + 1 if self.window else sys.maxsize

    # -- references
    def take(self) -> int:
        """Return a block for new content, held once."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._unheld))
            self.forget(block)
            self.evictions += 1
        self.counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a reference to a block with content."""
        if not self.counts[block]:
            del self._unheld[block]
        self.counts[block] += 1

    def drop(self, block: int) -> None:
        """Give up a reference. A block that nobody holds then stays cached if it has an entry."""
        self.counts[block] -= 1
        if not self.counts[block]:
            if self.entries[block] is None:
                self._free.append(block)
            else:
                self._unheld[block] = None

    def touch(self, block: int) -> None:
        """Make ``block`` the most recently used one if it is cached."""
        if block in self._unheld:
            self._unheld.move_to_end(block)

    # -- content
    def find(self, key: bytes) -> int:
        """Return the full block with this digest; -1 if there is none."""
        return self._index.get(key, -1)

    def add(self, block: int, entry: CachedBlock) -> bool:
        """Make a held block's content findable; return False if an equal full block is already."""
        if entry.key is not None and self._index.setdefault(entry.key, block) != block:
            return False
        self.entries[block] = entry
        self._children.setdefault(entry.parent, {})[block] = None
        return True

    def forget(self, block: int) -> CachedBlock:
        """Remove and return the entry of a block."""
        entry = self.entries[block]
        assert entry is not None
        self.entries[block] = None
        if entry.key is not None:
            del self._index[entry.key]
        siblings = self._children[entry.parent]
        del siblings[block]
        if not siblings:
            del self._children[entry.parent]
        self._unheld.pop(block, None)
        return entry

    def forget_descendants(self, key: bytes) -> None:
        """Free the cached blocks that continue ``key``, which no sequence can find any more."""
        keys: list[bytes] = [key]
        while keys:
            for block in list(self._children.get(keys.pop(), ())):
                if not self.counts[block]:
                    entry = self.forget(block)
                    self._free.append(block)
                    keys += [entry.key] if entry.key is not None else []

    def clear(self) -> None:
        """Free all cached blocks."""
        for block in list(self._unheld):
            self.forget(block)
            self._free.append(block)

    def most_similar(self, parent: bytes, tokens: bytes, continued: bool) -> tuple[int, int]:
        """Find the cached block that continues ``parent`` with the most tokens of ``tokens``.

        Among equals, one that no cached block continues is preferred: taking it over costs no other
        sequence more than this block.

        Args:
            parent: key of the sequence up to the start of the block.
            tokens: the tokens wanted, as int32 bytes.
            continued: whether blocks that others continue are considered at all.

        Returns:
            (number of equal tokens at the start, block), or (0, -1).
        """
        most, found, costly = 0, -1, False
        for block in self._children.get(parent, ()):
            entry = self.entries[block]
            if self.counts[block] or entry is None:
                continue
            inner = entry.key in self._children
            same = entry.tokens.startswith
            if inner and not continued:
                continue
            if TOKEN_BYTES * most < len(tokens) and same(tokens[: TOKEN_BYTES * (most + 1)]):
                most = _common_tokens(entry.tokens, tokens)
            elif inner or not costly or not same(tokens[: TOKEN_BYTES * most]):
                continue
            found, costly = block, inner
        return most, found

    # -- for tests
    def check(self, tables: Iterable[np.ndarray], keys: set[bytes]) -> None:
        """Raise AssertionError unless each block is in exactly one state, and can be found so.

        Args:
            tables: the block tables of all sequences.
            keys: digests that sequences hold blocks of, findable or not.
        """
        counts = [0] * len(self.counts)
        positions: dict[int, int] = {}
        for table in tables:
            for position, block in enumerate(table.tolist()):
                if block >= 0:
                    counts[block] += 1
                    assert positions.setdefault(block, position) == position, block
        assert counts == self.counts
        held = {block for block, count in enumerate(counts) if count}
        free, unheld = set(self._free), set(self._unheld)
        assert len(free) == len(self._free)
        assert sorted([*held, *free, *unheld]) == list(range(len(counts)))  # each exactly once
        with_entry = {block for block, entry in enumerate(self.entries) if entry is not None}
        assert unheld <= with_entry and not free & with_entry
        full = {e.key: block for block, e in enumerate(self.entries) if e and e.key is not None}
        assert full == self._index
        listed = [(p, block) for p, found in self._children.items() for block in found]
        expected = [(e.parent, block) for block, e in enumerate(self.entries) if e]
        assert sorted(listed) == sorted(expected) and all(self._children.values())
        age = {block: number for number, block in enumerate(self._unheld)}
        for block, entry in enumerate(self.entries):
            if entry is None:
                continue
            size = TOKEN_BYTES * self._block
            assert 0 < len(entry.tokens) <= size
            assert entry.key is None or len(entry.tokens) == size
            assert entry.key is not None or block in unheld  # partial blocks end their sequence
            assert positions.get(block, entry.position) == entry.position
            if not self.window and entry.position and block in unheld:
                parent = self._index.get(entry.parent)
                assert parent is not None or entry.parent in keys  # else nobody could find it
                if parent in age:
                    assert age[block] < age[parent]  # children are evicted before parents


class BlockPools:
    """One `BlockPool` of each cache group.

    Args:
        groups: the cache groups.
        pool_blocks: number of blocks of each group's pool.
        block: tokens of a block.

    Attributes:
        pools: the pools by group.
    """

    def __init__(
        self, groups: Sequence[CacheSpec], pool_blocks: Mapping[str, int], block: int
    ) -> None:
        self.block = block
        self.pools = {g.name: BlockPool(pool_blocks[g.name], g.window, block) for g in groups}
        self._pools = list(self.pools.values())

    @property
    def free(self) -> dict[str, int]:
        """Number of blocks without content, by group."""
        return {name: pool.free for name, pool in self.pools.items()}

    @property
    def held(self) -> dict[str, int]:
        """Number of blocks that sequences hold, by group."""
        return {name: pool.held for name, pool in self.pools.items()}

    @property
    def cached(self) -> dict[str, int]:
        """Number of blocks with content that no sequence holds, by group."""
        return {name: pool.cached for name, pool in self.pools.items()}

    @property
    def evictions(self) -> dict[str, int]:
        """Number of cached blocks whose content was lost to another sequence, by group."""
        return {name: pool.evictions for name, pool in self.pools.items()}

    def can_hold(self, wanted: Iterable[tuple[SequenceBlocks, int]], step: int, spare: int) -> bool:
        """Whether sequences can be computed up to given lengths, all at the same time.

        Args:
            wanted: sequences and their lengths in tokens.
            step: tokens that one step computes at most, which a windowed group holds at a time.
            spare: number of blocks of each pool to leave for others.
        """
        missing = [spare] * len(self._pools)
        for blocks, length in wanted:
            for g, pool in enumerate(self._pools):
                need = -(-length // self.block) - blocks._first[g]
                need = min(need, pool.kept(step))
                missing[g] += max(0, need - blocks._used + blocks._first[g])
        return all(n <= pool.available for n, pool in zip(missing, self._pools))

    def missing(self, context: int, step: int) -> dict[str, int]:
        """Return by group the blocks that a pool lacks to compute a sequence that is alone.

        Args:
            context: length of the sequence.
            step: tokens that one step computes at most.
        """
        width = -(-context // self.block)
        return {
            name: max(0, min(width, pool.kept(step)) - pool.size)
            for name, pool in self.pools.items()
        }


def _common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of equal tokens at the start of both."""
    size = min(len(a), len(b))
    differ = np.frombuffer(a[:size], np.int32) != np.frombuffer(b[:size], np.int32)
    return int(differ.argmax()) if differ.any() else size // TOKEN_BYTES
