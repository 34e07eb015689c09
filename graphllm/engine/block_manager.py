"""Paged KV cache of many sequences, which share the blocks of common prefixes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..model.batch import CacheSpec
from .block_pool import TOKEN_BYTES, BlockPool, BlockPools
from .prefix_lookup import chain, int32_bytes, longest_prefix, root_key
from .sequence_blocks import BlockCopy, CachedBlock, SequenceBlocks


class BlockManager(BlockPools):
    """Block pools of all cache groups, and an index of the prefixes whose blocks can be reused.

    Token ``i`` of a sequence is stored in pool row ``table[i // block] * block + i % block`` of
    each group. A block is found by the digest of the tokens up to its end, chained block by block
    (blake2b of 16 bytes: two sequences with equal digests are taken to be equal), so a full block
    that several sequences have in common is stored once and never written again.

    Args:
        groups: the cache groups.
        pool_blocks: number of blocks of each group's pool.
        block: tokens of a block.
        width: length of a block table, in blocks.
        take_continued: whether a block may be taken over that other cached blocks continue, which
            cannot be found then. That suits one conversation at a time. Of several with a common
            beginning, each would take a block of another one's, and lose its own in turn.

    Attributes:
        hits: number of tokens that sequences found in the cache.
        queries: number of tokens that they looked up.
        releases: changes whenever a sequence gives up blocks, so that more can be taken.
    """

    def __init__(
        self,
        groups: Sequence[CacheSpec],
        pool_blocks: Mapping[str, int],
        block: int,
        width: int,
        take_continued: bool = True,
    ) -> None:
        self.width, self._take_continued = width, take_continued
        self.hits = self.queries = self.releases = 0
        super().__init__(groups, pool_blocks, block)
        self._windowed = [g for g, pool in enumerate(self._pools) if pool.window]
        self._live: set[SequenceBlocks] = set()
        self._computing: dict[bytes, int] = {}  # sequences that will compute a block, by its key

    # -- sequences
    def begin(self, tokens: Sequence[int], prefix: int = 0, reuse: bool = True) -> SequenceBlocks:
        """Hold the blocks of the longest cached prefix of ``tokens``.

        The prefix ends at any token, not only at the end of a block: a cached block that no
        sequence holds and that agrees in its first tokens is taken over, and its later tokens are
        overwritten. Until the first `reserve` that succeeds, `release` undoes that.

        Args:
            tokens: the sequence. A list that `commit` is given again may only be appended to.
            prefix: length of its bidirectional prefix, whose keys depend on all of its tokens.
            reuse: False to find nothing, for a sequence whose logits are all needed.

        Returns:
            The blocks, with ``cached < len(tokens)``, since the last token is always computed.
            ``cached`` is 0 or at least ``prefix``.
        """
        if not 0 <= prefix <= len(tokens) <= self.width * self.block or not tokens:
            raise ValueError(f"{len(tokens)} tokens with a prefix of {prefix}")
        data = int32_bytes(tokens)
        root = root_key(data[: TOKEN_BYTES * prefix])
        blocks = SequenceBlocks(self.pools, self.width, tokens, root, prefix)
        blocks._data, blocks._expected = data, chain(root, data, self.block)
        keys = [root, *blocks._expected]
        found: tuple[int, int, list[int]] = 0, 0, []
        if reuse:
            continued = self._take_continued
            found = longest_prefix(self._pools, keys, data, self.block, prefix, continued)
        shared, common, takeover = found
        blocks.cached = blocks.computed = shared * self.block + common
        firsts = [min(shared, pool.first_block(blocks.cached)) for pool in self._pools]
        needed = [keys[first + 1 : shared + 1] for first in firsts]
        self._share(blocks, keys, [list(map(p.find, k)) for p, k in zip(self._pools, needed)])
        if common:
            blocks._used = shared + 1
            for pool, table, block in zip(self._pools, blocks.tables.values(), takeover):
                blocks._taken.append(pool.forget(block))
                pool.counts[block] = 1
                table[shared] = block
        for key in blocks._expected[shared:]:
            self._computing[key] = self._computing.get(key, 0) + 1
        return blocks

    def fork(
        self, blocks: SequenceBlocks, tokens: Sequence[int], copy: bool = False
    ) -> SequenceBlocks:
        """Return the blocks of another sequence that begins with the same ``tokens``.

        Args:
            blocks: what the first sequence holds.
            tokens: tokens that it has computed, at least the bidirectional prefix.
            copy: whether the caller copies the partial last block, as `SequenceBlocks.copies` says,
                before another step is launched.

        Returns:
            The full blocks, shared, and one for the copy unless a pool has none left. ``cached``
            is the number of tokens in them; it is smaller if a windowed group has lost blocks that
            the token at ``cached`` attends to.
        """
        length, prefix = len(tokens), blocks._prefix
        if not prefix <= length <= blocks.computed:
            raise ValueError(f"{length} tokens of {blocks.computed} computed ones")
        lengths = list(range(length // self.block * self.block, -1, -self.block))
        if copy and length % self.block:
            lengths.insert(0, length)
        for cached in lengths:
            sources = self._sources(blocks, cached)
            if sources is not None and not 0 < cached < prefix:
                break
        assert sources is not None  # nothing is needed for a length of 0
        other = SequenceBlocks(self.pools, self.width, tokens, blocks._keys[0], prefix)
        other.cached = other.computed = cached
        self._share(other, blocks._keys, sources)
        if cached % self.block:
            at, other._used = other._used, other._used + 1
            for name, pool in self.pools.items():
                other.tables[name][at] = copied = pool.take()
                other.copies.append(BlockCopy(name, int(blocks.tables[name][at]), copied))
        return other

    def refork(self, blocks: SequenceBlocks, source: SequenceBlocks, tokens: Sequence[int]) -> bool:
        """Let ``blocks`` hold what `fork` of ``source`` would, all of whose tokens are computed.

        That is quicker than to release and to fork: two sequences that began together have most
        blocks in common, and a partial last block is copied to the one that is held already.

        Args:
            blocks: blocks of a sequence that is not needed any more; as many tokens are computed.
            source: the blocks to share.
            tokens: see `commit`; the first ``source.computed`` are those of ``source``.

        Returns:
            False, and nothing has changed, if both differ too much. Otherwise the caller makes
            ``blocks.copies`` before another step is launched.
        """
        full, part = divmod(source.computed, self.block)
        if not (blocks.alike(source) and len(source._keys) == full + 1):
            return False
        pairs = [*zip(self._pools, blocks.tables.values(), source.tables.values(), blocks._first)]
        for pool, own, _, _ in pairs:  # those that are not shared stay
            last = own[full : blocks._used].tolist()
            if any(pool.counts[block] != 1 or pool.entries[block] for block in last):
                return False
        for pool, own, other, first in pairs:
            unequal = (first + np.flatnonzero(own[first:full] != other[first:full])).tolist()
            for j in range(unequal[-1] if unequal else first - 1, first - 1, -1):  # as in `release`
                if own[j] == other[j]:
                    self._touch_equal(pool, blocks, own, j)
                    continue
                self._drop(pool, blocks, own, j)
                own[j] = other[j]
                pool.hold(int(own[j]))
        blocks.copies = [
            BlockCopy(name, int(source.tables[name][full]), int(own[full]))
            for name, own in blocks.tables.items()
            if part
        ]
        blocks._keys, blocks._tokens = source._keys[:], tokens
        blocks._given, blocks._data, blocks._expected = tokens, b"", []
        blocks.cached = blocks.computed
        return True

    @staticmethod
    def _touch_equal(pool: BlockPool, blocks: SequenceBlocks, table: np.ndarray, j: int) -> None:
        """Count the indexed block that equals a sequence's full block ``j`` as used now.

        So it is evicted after those that continue it.
        """
        if pool.entries[table[j]] is None and j + 1 < len(blocks._keys):
            pool.touch(pool.find(blocks._keys[j + 1]))

    def _sources(self, blocks: SequenceBlocks, length: int) -> list[list[int]] | None:
        """Return by group the full blocks that a fork of this length shares.

        They are the sequence's own, or equal ones where a windowed group has dropped these. None if
        one of them is gone, or if the partial last block cannot be copied.
        """
        full, part = divmod(length, self.block)
        sources = []
        for pool, table in zip(self._pools, blocks.tables.values()):
            first = pool.first_block(length)
            own = zip(table[first:full].tolist(), blocks._keys[first + 1 :])
            found = [block if block >= 0 else pool.find(key) for block, key in own]
            unheld = sum(not pool.counts[block] for block in found)
            if -1 in found or (part and (table[full] < 0 or pool.available <= unheld)):
                return None
            sources.append(found)
        return sources

    def _share(
        self, blocks: SequenceBlocks, keys: list[bytes], sources: Iterable[list[int]]
    ) -> None:
        """Hold the full blocks before ``blocks.cached``, of each group the last ones."""
        self._live.add(blocks)
        shared = blocks.cached // self.block
        blocks._keys, blocks._used = keys[: shared + 1], shared
        tables = list(blocks.tables.values())
        for g, (pool, found) in enumerate(zip(self._pools, sources)):
            blocks._first[g] = shared - len(found)
            tables[g][blocks._first[g] : shared] = found
            for block in found:
                pool.hold(block)

    def awaited(self, blocks: SequenceBlocks) -> bytes | None:
        """Return the key of the first block not found, if another sequence will compute it.

        None if nobody will, or if the block contains the last token, which is always computed.
        """
        at = len(blocks._keys) - 1
        if at < (len(blocks._tokens) - 1) // self.block and at < len(blocks._expected):
            key = blocks._expected[at]
            return key if self._computing.get(key, 0) > 1 else None
        return None

    def is_computing(self, key: bytes) -> bool:
        """Whether a sequence will compute the block with this key."""
        return key in self._computing

    def reserve(self, blocks: SequenceBlocks, start: int, stop: int) -> bool:
        """Take the blocks for a step that computes tokens ``start`` to ``stop - 1``.

        Windowed groups first drop the blocks that the first token not computed yet, at ``start`` or
        before it in a step that may still fail, does not attend to. Cached blocks are evicted where
        no free ones are left.

        Returns:
            False, and nothing has changed, if a group has too few free and cached blocks.
        """
        if stop <= blocks._reserved and blocks.computed < blocks._drop_at:
            return True
        used = max(blocks._used, -(-stop // self.block))
        if not blocks.computed <= start < stop or used > self.width:
            raise ValueError(f"tokens {start} to {stop} after {blocks.computed}")
        tables = list(blocks.tables.values())
        firsts = list(blocks._first)
        for g, pool in enumerate(self._pools):
            firsts[g] = max(firsts[g], pool.first_block(blocks.computed))
            dropped = tables[g][blocks._first[g] : firsts[g]].tolist()
            gained = sum(pool.counts[block] == 1 for block in dropped)
            if used - blocks._used > pool.available + gained:
                return False
        if not blocks._reserved:
            self._first_reservation(blocks)
        for g, pool in enumerate(self._pools):
            for j in range(blocks._first[g], firsts[g]):
                self._drop(pool, blocks, tables[g], j)
            tables[g][blocks._used : used] = [pool.take() for _ in range(blocks._used, used)]
        blocks._first, blocks._used, blocks._reserved = firsts, used, used * self.block
        blocks._drop_at = min(
            ((firsts[g] + 1) * self.block + self._pools[g].window - 1 for g in self._windowed),
            default=sys.maxsize,
        )
        return True

    def _first_reservation(self, blocks: SequenceBlocks) -> None:
        """Give up what was in blocks taken over, now that they will be written."""
        self.hits += blocks.cached
        self.queries += len(blocks._tokens)
        for pool, entry in zip(self._pools, blocks._taken):
            if entry.key is not None and pool.find(entry.key) < 0 and not pool.window:
                pool.forget_descendants(entry.key)
        blocks._taken = []

    def commit(
        self, blocks: SequenceBlocks, tokens: Sequence[int], computed: int | None = None
    ) -> None:
        """Record that the keys and values of the first ``computed`` tokens are in the blocks.

        Full blocks can be found from now on. Where an equal block can be found already, because two
        sequences computed it at the same time, this one stays private.

        Args:
            blocks: what the sequence holds.
            tokens: the sequence, as given to `begin` and longer. It is not copied: what was
                computed must not change until `release`.
            computed: all of ``tokens`` by default.
        """
        computed = len(tokens) if computed is None else computed
        if not blocks.computed <= computed <= blocks._reserved:
            raise ValueError(f"{computed} tokens, {blocks._reserved} reserved")
        blocks._tokens, blocks.computed = tokens, computed
        if computed >= len(blocks._keys) * self.block and not blocks.private:
            self._index_full_blocks(blocks)

    def _index_full_blocks(self, blocks: SequenceBlocks) -> None:
        """Make the full blocks computed since the last call findable."""
        if blocks.computed < blocks._prefix:
            raise ValueError(f"{blocks.computed} tokens of a prefix of {blocks._prefix}")
        first, stop = len(blocks._keys) - 1, blocks.computed // self.block
        held = [table[first:stop].tolist() for table in blocks.tables.values()]
        for j in range(first, stop):
            parent, key, data = blocks._keys[j], *self._key_and_data(blocks, j)
            blocks._keys.append(key)
            entry = CachedBlock(key, parent, data, j)
            for pool, table in zip(self._pools, held):
                if table[j - first] >= 0:
                    pool.add(table[j - first], entry)

    def _key_and_data(self, blocks: SequenceBlocks, j: int) -> tuple[bytes, bytes]:
        """Return key and int32 bytes of full block ``j``, the first one without a key."""
        size = TOKEN_BYTES * self.block
        data = blocks._data[j * size : (j + 1) * size]
        new = j >= len(blocks._expected)
        if new or blocks._tokens is not blocks._given:
            tokens = blocks._tokens[j * self.block : (j + 1) * self.block]
            if not new and int32_bytes(tokens) != data:
                raise ValueError("the tokens are not those given to `begin`")
            data = int32_bytes(tokens)
        if new:
            return chain(blocks._keys[j], data, self.block)[0], data
        self._end_computing(blocks._expected[j])
        return blocks._expected[j], data

    def _entry(self, blocks: SequenceBlocks, j: int) -> CachedBlock:
        """Return the content of block ``j``, which may be partial."""
        full = j + 1 < len(blocks._keys)
        part = blocks._tokens[j * self.block : min((j + 1) * self.block, blocks.computed)]
        return CachedBlock(
            blocks._keys[j + 1] if full else None, blocks._keys[j], int32_bytes(part), j
        )

    def _end_computing(self, key: bytes) -> None:
        """Note that a sequence has computed the block, or never will."""
        self._computing[key] -= 1
        if not self._computing[key]:
            del self._computing[key]

    def _drop(self, pool: BlockPool, blocks: SequenceBlocks, table: np.ndarray, j: int) -> None:
        """Give up a sequence's block ``j``.

        Where an equal block was indexed when this one was computed, that one counts as used now; if
        it has been evicted since, this one takes its place.
        """
        block, table[j] = int(table[j]), -1
        self.releases += 1
        known = j + 1 < len(blocks._keys) or j * self.block < blocks.computed
        if pool.entries[block] is None and known and not blocks.private:
            entry = self._entry(blocks, j)
            if not pool.add(block, entry) and entry.key is not None:
                pool.touch(pool.find(entry.key))
        pool.drop(block)

    def release(self, blocks: SequenceBlocks) -> None:
        """Give up all blocks of a sequence. What was committed stays cached until evicted.

        ValueError: they are released already.
        """
        if blocks not in self._live:
            raise ValueError("these blocks are not held")
        self._live.remove(blocks)
        for key in blocks._expected[len(blocks._keys) - 1 :]:
            self._end_computing(key)
        tables = blocks.tables.values()
        if blocks._taken:  # nothing was written
            blocks._used -= 1
            for pool, table, entry in zip(self._pools, tables, blocks._taken):
                pool.add(int(table[blocks._used]), entry)
                pool.drop(int(table[blocks._used]))
                table[blocks._used] = -1
        for pool, table, first in zip(self._pools, tables, blocks._first):
            for j in range(blocks._used - 1, first - 1, -1):  # children are evicted before parents
                self._drop(pool, blocks, table, j)

    def clear(self) -> None:
        """Forget all cached prefixes. ValueError: a sequence holds blocks."""
        if self._live:
            raise ValueError(f"{len(self._live)} sequences hold blocks")
        for pool in self._pools:
            pool.clear()

    def check(self) -> None:
        """Raise AssertionError unless each block of each pool is free, held or cached, and so on.

        Slow; for tests.
        """
        keys = {key for blocks in self._live for key in blocks._keys}
        keys |= {e.key for blocks in self._live for e in blocks._taken if e.key is not None}
        for name, pool in self.pools.items():
            pool.check([blocks.tables[name] for blocks in self._live], keys)
        missing = [k for blocks in self._live for k in blocks._expected[len(blocks._keys) - 1 :]]
        assert sum(self._computing.values()) == len(missing)
        assert set(missing) == self._computing.keys()
