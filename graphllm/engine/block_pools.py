"""The block pools of all cache groups: counts and capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..model.batch import CacheSpec
from .block_pool import BlockPool
from .sequence_blocks import SequenceBlocks


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
