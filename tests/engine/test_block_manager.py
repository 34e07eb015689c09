"""Block manager: shared prefixes, takeover, windows, eviction, reference counts."""

from __future__ import annotations

import numpy as np
import pytest
from kv_content import KvContent, groups

from graphllm.engine.block_manager import BlockManager, SequenceBlocks
from graphllm.engine.forward_feeds import Span, forward_feeds

BLOCK = 4


class Cache:
    """A block manager whose sequences are computed in a model of its pools."""

    def __init__(
        self, pool: int = 20, width: int = 16, take_continued: bool = True, **windows: int
    ) -> None:
        specs = groups(**(windows or {"full": 0}))
        sizes = {spec.name: pool for spec in specs}
        self.manager = BlockManager(specs, sizes, BLOCK, width, take_continued)
        self.content = KvContent(specs, sizes, BLOCK)

    def begin(self, tokens: list[int], prefix: int = 0) -> SequenceBlocks:
        blocks = self.manager.begin(tokens, prefix)
        self.manager.check()
        return blocks

    def extend(self, blocks: SequenceBlocks, tokens: list[int], prefix: int = 0) -> None:
        """Compute the tokens that are not computed yet, in one step."""
        start = blocks.computed
        assert self.manager.reserve(blocks, start, len(tokens))
        self.manager.check()
        self.content.compute(blocks, tokens, start, prefix)
        self.manager.commit(blocks, tokens)
        self.manager.check()

    def compute(self, tokens: list[int], prefix: int = 0) -> SequenceBlocks:
        blocks = self.begin(tokens, prefix)
        self.extend(blocks, tokens, prefix)
        return blocks

    def release(self, *sequences: SequenceBlocks) -> None:
        for blocks in sequences:
            self.manager.release(blocks)
            self.manager.check()

    def cached(self, tokens: list[int], prefix: int = 0) -> int:
        """Tokens that a new sequence would find."""
        blocks = self.begin(tokens, prefix)
        self.release(blocks)
        return blocks.cached


def ids(count: int, first: int = 100) -> list[int]:
    return list(range(first, first + count))


def state(manager: BlockManager) -> list:
    return [
        (p._free[:], list(p._unheld), p.counts[:], p.entries[:], dict(p._index))
        for p in manager.pools.values()
    ]


# ------------------------------------------------------------------------------------- one sequence


def test_rows_follow_the_table():
    cache = Cache(a=0, b=5)
    blocks, other = cache.compute(ids(10)), cache.compute(ids(3, 50))
    assert blocks.cached == 0 and blocks.computed == 10
    assert cache.manager.held == {"a": 4, "b": 4}
    spans = [Span(ids(10)[2:], 2, 0, blocks), Span(ids(3, 50), 0, 0, other)]
    feeds, env = forward_feeds(cache.manager, spans)
    assert feeds["pos"].tolist() == [*range(2, 10), *range(3)] and feeds["kv_len"].tolist() == [
        10,
        3,
    ]
    assert env == {"kv_sum": sum(range(3, 11)) + sum(range(1, 4)), "prefix_sum": 0}
    for group, table in blocks.tables.items():
        assert table.dtype == np.int32 and table.shape == (16,)
        assert (table[:3] >= 0).all() and (table[3:] == -1).all()
        places = [(table, i) for i in range(2, 10)] + [(other.tables[group], i) for i in range(3)]
        rows = [int(own[i // BLOCK]) * BLOCK + i % BLOCK for own, i in places]
        assert feeds[f"slot.{group}"].dtype == np.int32
        assert feeds[f"slot.{group}"].tolist() == rows


def test_a_sequence_grows_block_by_block():
    cache = Cache()
    blocks = cache.begin(ids(3))
    for length in range(3, 65):
        cache.extend(blocks, ids(length))
        assert cache.manager.held["full"] == -(-length // BLOCK)
    with pytest.raises(ValueError, match="tokens 64 to 65"):
        cache.manager.reserve(blocks, 64, 65)  # beyond the table


def test_blocks_in_use_before_are_taken_first():
    cache = Cache()
    first = cache.begin(ids(9))
    assert cache.manager.reserve(first, 0, 9)
    used = first.tables["full"][:3].tolist()
    cache.release(first)  # nothing was computed
    assert cache.manager.free == {"full": 20} and cache.manager.cached == {"full": 0}
    second = cache.compute(ids(9, 500))
    assert second.tables["full"][:3].tolist() == used


def test_a_windowed_group_holds_only_its_window():
    cache = Cache(window=9)
    blocks = cache.begin(ids(1))
    for length in range(1, 65):
        cache.extend(blocks, ids(length))  # reads the window
        first = max(0, length - 1 - 8) // BLOCK
        assert cache.manager.held["window"] == -(-length // BLOCK) - first


# ---------------------------------------------------------------------------------- shared prefixes


def test_full_blocks_are_shared_and_not_written_again():
    cache = Cache()
    first = cache.compute([*ids(10), 1, 2, 3])
    second = cache.compute([*ids(10), 7, 8, 9])
    assert second.cached == 8  # the third block is held by the first sequence, and not used
    assert (first.tables["full"][:2] == second.tables["full"][:2]).all()
    assert first.tables["full"][2] != second.tables["full"][2]
    assert cache.manager.held == {"full": 6}
    cache.release(first)
    third = cache.compute([*ids(8), 5])
    assert third.cached == 8
    cache.release(second, third)
    assert cache.manager.held == {"full": 0}


@pytest.mark.parametrize("common", range(1, 14))
def test_a_prefix_is_found_to_the_token_when_its_sequence_has_ended(common):
    cache = Cache(a=0, b=6)
    cache.release(cache.compute(ids(14)))
    blocks = cache.compute([*ids(common), 1, 2])
    assert blocks.cached == common


def test_the_last_token_is_always_computed():
    cache = Cache()
    held = cache.compute(ids(8))
    again = cache.begin(ids(8))
    assert again.cached == 4  # the last block is held, and would have to be written
    cache.release(again, held)
    assert cache.begin(ids(8)).cached == 7


def test_a_conversation_computes_only_its_new_tokens():
    cache = Cache(a=0, b=7)
    tokens = ids(5)
    for turn in range(8):
        blocks = cache.begin(tokens)
        assert blocks.cached == (len(tokens) - 4 if turn else 0)
        cache.extend(blocks, tokens)
        cache.release(blocks)
        tokens = [*tokens, *ids(4, 1000 * turn)]


def test_what_a_block_taken_over_held_is_lost():
    cache = Cache()
    cache.release(cache.compute(ids(12)))
    other = cache.compute([*ids(6), 1, 2, 3])  # takes over the second block
    assert other.cached == 6
    cache.release(other)
    assert cache.cached([*ids(6), 1, 2, 3]) == 8
    assert cache.cached(ids(12)) == 6
    assert cache.manager.free["full"] == 20 - 3  # the third block of the first was freed


def test_blocks_that_continue_one_taken_over_are_freed():
    cache = Cache()
    cache.release(cache.compute(ids(15)))
    cache.release(cache.compute([*ids(9), 1, 2]))
    assert cache.manager.cached == {"full": 3}


def test_release_before_the_first_step_undoes_a_takeover():
    cache = Cache(a=0, b=6)
    cache.release(cache.compute(ids(15)))
    entries = [sorted(map(str, pool.entries)) for pool in cache.manager.pools.values()]
    blocks = cache.begin([*ids(6), 1, 2, 3])
    assert blocks.cached == 6
    assert cache.begin(ids(15)).cached in (4, 5)  # while it is taken over, others do not find it
    cache.release(*cache.manager._live)
    assert [sorted(map(str, p.entries)) for p in cache.manager.pools.values()] == entries
    assert cache.cached(ids(15)) == 14
    assert cache.manager.hits == 0


def test_a_block_that_nothing_continues_is_taken_over_first():
    cache = Cache()
    first = cache.compute(ids(16))
    cache.release(cache.compute([*ids(6), 1]))  # leaves a partial second block
    cache.release(first)
    blocks = cache.compute([*ids(6), 7, 8])
    assert blocks.cached == 6
    assert cache.cached(ids(16)) == 15  # undisturbed


@pytest.mark.parametrize("take_continued", [True, False])
def test_conversations_with_a_common_beginning_in_turns(take_continued):
    """Three of them, whose first 10 tokens, or 2.5 blocks, are equal."""
    cache = Cache(pool=60, take_continued=take_continued)
    talks = [[*ids(10), *ids(12, 1000 * i)] for i in range(1, 4)]
    for tokens in talks:
        cache.release(cache.compute(tokens))
    for turn in range(1, 5):
        for tokens in talks:
            known = len(tokens)
            tokens += ids(5, 10_000 * turn)
            blocks = cache.compute(tokens)
            assert blocks.cached == (10 if take_continued else known)
            cache.release(blocks)


def test_only_what_was_computed_is_found():
    cache = Cache()
    blocks = cache.begin(ids(12))
    assert cache.manager.reserve(blocks, 0, 12)
    cache.content.compute(blocks, ids(6), 0)
    cache.manager.commit(blocks, ids(12), 6)
    cache.release(blocks)
    assert cache.cached(ids(12)) == 6


def test_equal_blocks_elsewhere_are_not_shared():
    cache = Cache()
    cache.release(cache.compute([1, 2, 3, 4, 1, 2, 3, 4, 9]))
    assert cache.cached([1, 2, 3, 4, 9, 9, 9, 9, 1]) == 4
    assert cache.cached([5, 2, 3, 4, 1, 2, 3, 4, 9]) == 0


def test_two_sequences_that_compute_the_same_at_the_same_time():
    cache = Cache()
    tokens = ids(10)
    first, second = cache.begin(tokens), cache.begin(tokens)
    cache.extend(first, tokens)
    cache.extend(second, tokens)
    assert not set(first.tables["full"][:3]) & set(second.tables["full"][:3])
    third = cache.begin(tokens)
    assert (third.tables["full"][:2] == first.tables["full"][:2]).all()
    cache.release(third, second)
    assert cache.manager.cached == {"full": 1}  # its last, partial block; the others are private
    cache.release(first)
    assert cache.manager.cached == {"full": 4} and cache.cached(tokens) == 9


def test_a_private_block_takes_the_place_of_an_evicted_equal_one():
    cache = Cache(pool=6)
    first, second = cache.begin(ids(8)), cache.begin(ids(8))
    cache.extend(first, ids(8))
    cache.extend(second, ids(8))
    cache.release(first)
    third = cache.compute(ids(16, 500))
    assert cache.manager.evictions == {"full": 2}
    cache.release(second)
    assert cache.cached(ids(8)) == 7
    cache.release(third)


# ------------------------------------------------------------------------------------------ windows


def test_a_prefix_needs_only_the_window_before_its_end():
    cache = Cache(full=0, window=6)
    blocks = cache.begin(ids(4))
    for length in range(4, 33):
        cache.extend(blocks, ids(length))
    again = cache.compute([*ids(30), 1])
    assert again.cached == 28
    assert (again.tables["window"] >= 0).sum() == 3  # of token 23 to 31


def test_a_match_is_shortened_to_a_length_whose_window_is_there():
    cache = Cache(pool=12, full=0, window=6)
    cache.release(cache.compute(ids(32)))
    pool = cache.manager.pools["window"]
    by_position = {e.position: block for block, e in enumerate(pool.entries) if e}
    for position in (7, 4):  # tokens 16 to 19 and 28 to 31
        pool.forget(by_position[position])
        pool._free.append(by_position[position])
    # Tokens 20 to 27 are there, but a prefix of 28 needs 23 to 27, one of 25 needs 20 to 24.
    assert cache.cached(ids(32)) == 28
    assert cache.cached([*ids(26), 1]) == 26
    assert cache.cached([*ids(25), 1]) == 25
    assert cache.cached([*ids(24), 1]) == 16
    assert cache.cached([*ids(18), 1]) == 16
    blocks = cache.compute([*ids(26), 1])
    assert blocks.cached == 26
    cache.release(blocks)


def test_dropped_blocks_are_cached_until_evicted():
    cache = Cache(pool=8, width=40, window=6)
    blocks = cache.begin(ids(1))
    for length in range(1, 150):
        cache.extend(blocks, ids(length))
        assert cache.manager.held["window"] <= 3
    assert cache.manager.evictions["window"] > 0
    cache.release(blocks)
    assert cache.cached(ids(149)) == 148
    assert cache.cached([*ids(140), 1]) == 140
    assert cache.cached([*ids(90), 1]) == 0


# ----------------------------------------------------------------------------------------- eviction


def test_the_least_recently_used_sequence_is_evicted_its_end_first():
    cache = Cache(pool=9)
    for first in (0, 100, 200):
        cache.release(cache.compute(ids(12, first)))
    assert cache.cached(ids(12, 0)) == 11  # used now
    cache.release(cache.compute(ids(8, 900)))
    assert [cache.cached(ids(12, first)) for first in (0, 100, 200)] == [11, 4, 11]
    assert cache.manager.evictions == {"full": 2}


def test_held_blocks_are_never_evicted():
    cache = Cache(pool=6)
    first = cache.compute(ids(12))
    second = cache.begin(ids(16, 500))
    assert not cache.manager.reserve(second, 0, 16)
    cache.extend(second, ids(12, 500))
    cache.content.read(first, 0, cache.content.numbers(ids(12), 0))
    assert cache.manager.free == {"full": 0}


def test_a_reservation_that_fails_changes_nothing():
    cache = Cache(pool=8, full=0, window=5)
    first = cache.compute(ids(20))
    cache.release(cache.compute(ids(6, 500)))
    second = cache.begin([*ids(5, 500), 1])
    assert second.cached == 5
    before = state(cache.manager)
    assert not cache.manager.reserve(second, 5, 30)
    assert state(cache.manager) == before
    assert not cache.manager.reserve(first, 20, 36)  # enough for its window only
    assert state(cache.manager) == before
    cache.release(second)
    assert cache.cached(ids(6, 500)) == 5


def test_the_blocks_that_a_window_drops_count_as_available():
    cache = Cache(pool=4, window=5)
    blocks = cache.compute(ids(16))
    assert cache.manager.free == {"window": 0}
    cache.extend(blocks, ids(25))
    assert not cache.manager.reserve(blocks, 25, 40)


def test_a_step_launched_ahead_keeps_the_window_of_the_one_before():
    cache = Cache(window=4)
    blocks = cache.compute(ids(10))
    assert cache.manager.reserve(blocks, 10, 12) and cache.manager.reserve(blocks, 11, 13)
    cache.extend(blocks, ids(11))  # the first step failed and runs again
    assert cache.manager.held == {"window": 3}
    assert cache.manager.reserve(blocks, 11, 13)
    assert cache.manager.held == {"window": 2}


def test_the_index_is_bounded():
    cache = Cache(pool=10, width=10, a=0, b=6)
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = [int(i) for i in rng.integers(0, 3, rng.integers(1, 30))]
        cache.release(cache.compute(tokens))
    for pool in cache.manager.pools.values():
        assert len(pool._index) <= 10 and len(pool._children) <= 10
    assert not cache.manager._computing and not cache.manager._live
    cache.manager.clear()
    assert cache.manager.free == {"a": 10, "b": 10}
    assert all(not p._index and not p._children for p in cache.manager.pools.values())


# --------------------------------------------------------------------------- bidirectional prefixes


def test_a_bidirectional_prefix_is_reused_whole_or_not_at_all():
    cache = Cache()
    cache.release(cache.compute([*ids(6), 1, 2, 3, 4, 5, 6], prefix=6))
    assert cache.cached([*ids(6), 1, 2, 3, 9], prefix=6) == 9
    assert cache.cached([*ids(6), 9], prefix=6) == 6
    assert cache.cached([*ids(5), 9, 9], prefix=6) == 0
    assert cache.cached([*ids(6), 1, 2, 3, 9], prefix=7) == 0  # all its keys differ
    assert cache.cached([*ids(6), 1, 2, 3, 9]) == 0


def test_a_prefix_that_is_only_partly_available_is_not_used():
    cache = Cache()
    held = cache.compute([*ids(6), 1], prefix=6)
    assert cache.cached([*ids(6), 2], prefix=6) == 0  # the second block is held
    cache.release(held)
    assert cache.cached([*ids(6), 2], prefix=6) == 6


def test_a_prefix_of_all_tokens_is_computed_whole():
    cache = Cache()
    cache.release(cache.compute(ids(8), prefix=8))
    assert cache.cached(ids(8), prefix=8) == 0
    assert cache.cached([*ids(8), 1], prefix=8) == 8


# -------------------------------------------------------------------------------------------- forks


def test_a_fork_shares_the_full_blocks():
    cache = Cache(full=0, window=40)
    first = cache.compute(ids(10))
    fork = cache.manager.fork(first, ids(10))
    cache.manager.check()
    assert fork.cached == 8
    cache.extend(fork, [*ids(10), 1])
    cache.extend(first, [*ids(10), 2])
    for group in ("full", "window"):
        assert (fork.tables[group][:2] == first.tables[group][:2]).all()
        assert fork.tables[group][2] != first.tables[group][2]
    cache.release(first, fork)


def test_a_fork_with_a_copy_has_all_tokens():
    cache = Cache(pool=5, full=0, window=6)
    first = cache.compute(ids(10))
    fork = cache.manager.fork(first, ids(10), copy=True)
    cache.manager.check()
    assert fork.cached == 10 and [group for group, _, _ in fork.copies] == ["full", "window"]
    for group, source, target in fork.copies:
        assert source == first.tables[group][2] and target == fork.tables[group][2] != source
    cache.content.copy(fork.copies)
    cache.extend(fork, [*ids(10), 1])
    cache.extend(first, [*ids(10), 2])
    third = cache.manager.fork(first, [*ids(10), 2], copy=True)
    assert third.cached == 11  # the last block
    none_left = cache.manager.fork(first, [*ids(10), 2], copy=True)
    assert none_left.cached == 8 and not none_left.copies
    assert not cache.manager.fork(first, ids(8), copy=True).copies


@pytest.mark.parametrize("length", [8, 10, 11, 12])
def test_a_fork_takes_over_the_blocks_of_another_sequence(length):
    """It has the content of its source, in every group, and shares its full blocks."""
    cache = Cache(full=0, window=6)
    first = cache.compute(ids(5))
    other = cache.manager.fork(first, ids(5), copy=True)
    cache.content.copy(other.copies)
    for blocks, token in ((first, 1), (other, 2)):
        for end in range(6, length + 1):
            cache.extend(blocks, [*ids(5), *[token] * (end - 5)])
    tokens = [*ids(5), *[1] * (length - 5)]
    assert cache.manager.refork(other, first, tokens)
    cache.manager.check()
    cache.content.copy(other.copies)
    assert len(other.copies) == (2 if length % BLOCK else 0)
    full = length // BLOCK
    for group, table in other.tables.items():
        assert (table[:full] == first.tables[group][:full]).all()
        assert (table[full] == first.tables[group][full]) == (table[full] < 0)
    cache.extend(first, [*tokens, 3])
    cache.extend(other, [*tokens, 4])
    cache.release(first, other)
    assert cache.cached([*tokens, 4, 9]) == length + 1


def test_sequences_that_differ_too_much_are_not_forked_in_place():
    cache = Cache()
    first, shorter, longer = (cache.compute(ids(count)) for count in (10, 9, 14))
    for blocks in (shorter, longer):
        before = state(cache.manager)
        assert not cache.manager.refork(blocks, first, ids(10)) and state(cache.manager) == before
    cache.release(first, shorter, longer)


def test_a_fork_shares_private_blocks():
    cache = Cache()
    first, second = cache.begin(ids(8)), cache.begin(ids(8))
    cache.extend(first, ids(8))
    cache.extend(second, ids(8))
    fork = cache.manager.fork(second, ids(8))
    assert (fork.tables["full"][:2] == second.tables["full"][:2]).all()
    cache.release(second, first)
    cache.extend(fork, ids(11))
    cache.release(fork)
    assert cache.cached(ids(11)) == 10


def test_a_fork_finds_blocks_that_its_window_dropped():
    cache = Cache(pool=30, window=5)
    blocks = cache.begin(ids(1))
    for length in range(1, 31):
        cache.extend(blocks, ids(length))
    fork = cache.manager.fork(blocks, ids(18))
    assert fork.cached == 16
    cache.extend(fork, ids(18))
    cache.release(fork, blocks)


def test_a_fork_is_shorter_if_a_window_is_gone():
    cache = Cache(pool=5, window=5)
    blocks = cache.begin(ids(1))
    for length in range(1, 31):
        cache.extend(blocks, ids(length))
    assert cache.manager.fork(blocks, ids(6)).cached == 0
    with pytest.raises(ValueError, match="31 tokens of 30"):
        cache.manager.fork(blocks, ids(31))


# ------------------------------------------------------------------------------ counters and misuse


def test_counters():
    cache = Cache(pool=10)
    first = cache.compute(ids(10))
    second = cache.compute([*ids(8), 1])
    manager = cache.manager
    assert (manager.hits, manager.queries) == (8, 19)
    assert manager.held == {"full": 4} and manager.free == {"full": 6}
    cache.release(first, second)
    assert manager.held == {"full": 0} and manager.cached == {"full": 4}
    cache.compute(ids(40, 900))
    assert manager.evictions == {"full": 4}


def test_a_block_that_another_sequence_will_compute_is_awaited():
    cache = Cache()
    tokens = ids(20)
    first = cache.begin(tokens)
    assert cache.manager.awaited(first) is None
    second = cache.begin([*ids(13), 1])
    key = cache.manager.awaited(second)
    assert key is not None and cache.manager.is_computing(key)
    cache.release(second)
    assert cache.manager.reserve(first, 0, 8)
    cache.manager.commit(first, tokens, 8)
    assert not cache.manager.is_computing(key)
    for length, awaits in ((12, False), (13, True), (8, False)):  # the last token is computed
        blocks = cache.begin(ids(length))
        assert (cache.manager.awaited(blocks) is not None) == awaits, length
        cache.release(blocks)
    cache.release(first)
    second = cache.begin([*ids(13), 1])
    assert second.cached == 8 and cache.manager.awaited(second) is None


def test_whether_sequences_fit():
    cache = Cache(pool=10, full=0, window=8)
    first = cache.begin(ids(20))
    manager = cache.manager
    assert manager.can_hold([(first, 40)], step=8, spare=0)
    assert not manager.can_hold([(first, 41)], step=8, spare=0)
    assert not manager.can_hold([(first, 40)], step=8, spare=1)
    cache.extend(first, ids(20))
    second = cache.begin(ids(20, 500))
    assert manager.can_hold([(first, 20), (second, 20)], step=8, spare=0)
    assert not manager.can_hold([(first, 24), (second, 20)], step=8, spare=0)
    windowed = Cache(pool=5, width=100, window=8)
    assert windowed.manager.can_hold([(windowed.begin([1]), 400)], step=8, spare=0)
    assert not windowed.manager.can_hold([(windowed.begin([1]), 400)], step=9, spare=0)


def test_misuse_is_an_error():
    cache = Cache()
    blocks = cache.compute(ids(6))
    with pytest.raises(ValueError, match="1 sequences hold blocks"):
        cache.manager.clear()
    with pytest.raises(ValueError, match="9 tokens, 8 reserved"):
        cache.manager.commit(blocks, ids(9))
    with pytest.raises(ValueError, match="5 tokens, 8 reserved"):
        cache.manager.commit(blocks, ids(5))
    with pytest.raises(ValueError, match="tokens 5 to 9 after 6"):
        cache.manager.reserve(blocks, 5, 9)
    cache.release(blocks)
    with pytest.raises(ValueError, match="not held"):
        cache.manager.release(blocks)
    for tokens, prefix in (([], 0), (ids(3), 4), (ids(65), 0)):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens with a prefix of {prefix}"):
            cache.manager.begin(tokens, prefix)
    other = cache.begin(ids(8, 500))
    assert cache.manager.reserve(other, 0, 8)
    with pytest.raises(ValueError, match="not those given"):
        cache.manager.commit(other, ids(8, 600))
    prefixed = cache.begin(ids(8, 700), 8)
    assert cache.manager.reserve(prefixed, 0, 4)
    with pytest.raises(ValueError, match="4 tokens of a prefix of 8"):
        cache.manager.commit(prefixed, ids(4, 700))
