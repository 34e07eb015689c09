"""Search for the longest prefix of a sequence whose blocks are in the KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from .block_pool import TOKEN_BYTES, BlockPool


def int32_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as int32 bytes."""
    return array("i", tokens).tobytes()


def root_key(prefix: bytes) -> bytes:
    """Return the key before the first block of a sequence with this bidirectional prefix.

    Keys in the prefix depend on all of its tokens, so sequences with different prefixes have
    nothing in common, whatever their first tokens are.
    """
    return blake2b(prefix, digest_size=16, person=b"prefix").digest()


def chain(parent: bytes, data: bytes, block: int) -> list[bytes]:
    """Return the keys up to the end of each full block of ``data``, which follows ``parent``."""
    size, keys = TOKEN_BYTES * block, []
    for at in range(0, len(data) - size + 1, size):
        parent = blake2b(parent + data[at : at + size], digest_size=16).digest()
        keys.append(parent)
    return keys


def longest_prefix(
    pools: Sequence[BlockPool],
    keys: list[bytes],
    data: bytes,
    block: int,
    prefix: int,
    continued: bool,
) -> tuple[int, int, list[int]]:
    """Find the longest cached prefix of a sequence, shorter than the sequence.

    Args:
        pools: pools of all cache groups.
        keys: the root's key, and the keys up to the end of each full block.
        data: the tokens, as int32 bytes.
        block: tokens of a block.
        prefix: length of the bidirectional prefix; the result is 0 or at least as long.
        continued: whether a block may be taken over that other cached blocks continue.

    Returns:
        Number of full blocks to share, number of tokens in the block after them, and the block of
        each group to take over for these tokens.
    """
    length = len(data) // TOKEN_BYTES
    most = (length - 1) // block
    runs = [_runs(pool, keys, most) for pool in pools]
    whole = [len(run) - 1 for pool, run in zip(pools, runs) if not pool.window]
    for shared in range(min([most, *whole]), -1, -1):
        stop = min((shared + 1) * block, length) - 1
        if not _in_windows(pools, runs, shared, stop):
            continue
        part = data[TOKEN_BYTES * shared * block : TOKEN_BYTES * stop]
        found = [pool.most_similar(keys[shared], part, continued) for pool in pools]
        common = min(count for count, _ in found)
        at = shared * block + common
        if at >= prefix and _in_windows(pools, runs, shared, at):
            return shared, common, [index for _, index in found]
    return 0, 0, []


def _runs(pool: BlockPool, keys: list[bytes], most: int) -> list[int]:
    """Return for each number of blocks how many of the last of them are in the cache.

    Without a window all blocks are needed, so the list ends before the first missing one.
    """
    runs = [0]
    for key in keys[1 : most + 1]:
        found = pool.find(key) >= 0
        if not found and not pool.window:
            break
        runs.append(runs[-1] + 1 if found else 0)
    return runs


def _in_windows(
    pools: Sequence[BlockPool], runs: list[list[int]], shared: int, position: int
) -> bool:
    """Whether all groups have the full blocks that the token at ``position`` attends to."""
    return all(pool.first_block(position) >= shared - run[shared] for pool, run in zip(pools, runs))
