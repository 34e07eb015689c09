"""Scheduler: order, budget, chunk borders, admission, preemption."""

from __future__ import annotations

import pytest
from kv_content import groups

from graphllm.engine.block_manager import BlockManager
from graphllm.engine.scheduler import Scheduler
from graphllm.engine.sequence import ActiveSequence, Chunk

BLOCK = 4


def make(
    pool: int = 100, tokens: int = 32, sequences: int = 8, context: int = 64, chunk: int = 8,
    **windows: int,
) -> Scheduler:  # fmt: skip
    specs = groups(**(windows or {"full": 0}))
    manager = BlockManager(specs, {s.name: pool for s in specs}, BLOCK, -(-context // BLOCK))
    return Scheduler(manager, tokens, sequences, context, chunk)


def sequence(length: int, first: int = 0, **fields: int) -> ActiveSequence:
    """A sequence whose tokens differ from those with another ``first``."""
    tokens = [1000 * first + i for i in range(length)]
    return ActiveSequence(tokens, length, **fields)


def added(scheduler: Scheduler, *sequences: ActiveSequence) -> None:
    for each in sequences:
        scheduler.add(each)


def finish(scheduler: Scheduler, chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    """Complete a step and sample; return (number of the sequence, start, stop) of each chunk."""
    scheduler.complete(chunks)
    for chunk in chunks:
        assert chunk.samples == (chunk.stop == len(chunk.sequence.tokens))
    for chunk in chunks:
        if chunk.samples:
            chunk.sequence.tokens.append(7)
    scheduler._manager.check()
    return [(c.sequence.number, c.start, c.stop) for c in chunks]


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    chunks = scheduler.schedule()
    assert sum(c.stop - c.start for c in chunks) <= scheduler.tokens
    return finish(scheduler, chunks)


# ------------------------------------------------------------------------------- budget and borders


def test_a_prompt_is_computed_in_chunks_and_then_decoded():
    scheduler = make(tokens=20)
    added(scheduler, sequence(45))
    assert [step(scheduler) for _ in range(5)] == [
        [(0, 0, 16)], [(0, 16, 32)], [(0, 32, 45)], [(0, 45, 46)], [(0, 46, 47)],
    ]  # fmt: skip


def test_borders_are_those_of_the_sequence_wherever_it_starts():
    scheduler = make(tokens=20)
    first, second = sequence(11), sequence(45)
    scheduler.add(first)
    step(scheduler)
    scheduler.remove(first)
    scheduler.add(second)
    assert step(scheduler) == [(1, 11, 24)]
    assert step(scheduler) == [(1, 24, 40)]


def test_decoding_goes_first_then_prompts_then_admission():
    scheduler = make(tokens=32)
    added(scheduler, sequence(5, 1), sequence(40, 2), sequence(6, 3))
    assert step(scheduler) == [(0, 0, 5), (1, 0, 24)]  # 3 tokens are left, too few for the third
    assert step(scheduler) == [(0, 5, 6), (1, 24, 40), (2, 0, 6)]
    assert step(scheduler) == [(0, 6, 7), (1, 40, 41), (2, 6, 7)]


def test_the_chunks_that_sample_come_first_in_a_stable_order():
    scheduler = make(tokens=16, chunk=4)
    added(scheduler, *(sequence(3, i) for i in range(3)), sequence(30, 3))
    assert step(scheduler) == [(0, 0, 3), (1, 0, 3), (2, 0, 3), (3, 0, 4)]
    added(scheduler, sequence(2, 4))
    scheduler.remove(scheduler._running[1])
    rows = [[number for number, _, _ in step(scheduler)] for _ in range(5)]
    assert rows == [[0, 2, 4, 3], [0, 2, 4, 3], *[[0, 2, 3, 4]] * 3]  # it samples from the third


def test_at_most_so_many_sequences_run():
    scheduler = make(sequences=2)
    added(scheduler, *(sequence(4, i) for i in range(4)))
    assert [n for n, _, _ in step(scheduler)] == [0, 1]
    assert (scheduler.running, scheduler.waiting) == (2, 2)
    scheduler.remove(scheduler._running[0])
    assert [n for n, _, _ in step(scheduler)] == [1, 2]
    assert make(tokens=8, sequences=20).sequences == 8  # each decodes in every step


def test_a_prompt_that_decoding_leaves_too_little_for_alternates_with_it():
    scheduler = make(tokens=8, chunk=8)
    added(scheduler, sequence(3, 1), sequence(20, 2))
    step(scheduler)
    assert [step(scheduler) for _ in range(7)] == [
        [(0, 3, 4)], [(1, 0, 8)], [(0, 4, 5)], [(1, 8, 16)], [(0, 5, 6), (1, 16, 20)],
        [(0, 6, 7), (1, 20, 21)], [(0, 7, 8), (1, 21, 22)],
    ]  # fmt: skip


def test_a_bidirectional_prefix_is_one_chunk():
    scheduler = make(tokens=64, chunk=4)
    added(scheduler, sequence(3, 1), sequence(40, 2, prefix=30))
    assert step(scheduler) == [(0, 0, 3), (1, 0, 40)]
    scheduler = make(tokens=64, chunk=4)
    added(scheduler, sequence(2, 1), sequence(60, 2), sequence(63, 3, prefix=30))
    assert step(scheduler) == [(0, 0, 2), (1, 0, 60)]  # 2 tokens are left
    assert step(scheduler) == [(0, 2, 3), (1, 60, 61), (2, 0, 60)]
    assert step(scheduler) == [(0, 3, 4), (1, 61, 62), (2, 60, 63)]


def test_a_prefix_as_long_as_a_step_begins_the_next_one():
    scheduler = make(tokens=64, chunk=4, context=80)
    added(scheduler, sequence(3, 1), sequence(64, 2, prefix=64))
    assert [step(scheduler) for _ in range(4)] == [
        [(0, 0, 3)], [(0, 3, 4)], [(1, 0, 64)], [(0, 4, 5), (1, 64, 65)],
    ]  # fmt: skip


def test_the_last_token_of_the_context():
    scheduler = make(pool=4, tokens=8, context=16)
    added(scheduler, sequence(14))
    assert [step(scheduler) for _ in range(4)] == [[(0, 0, 8)], [(0, 8, 14)], [(0, 14, 15)],
                                                   [(0, 15, 16)]]  # fmt: skip
    with pytest.raises(ValueError, match="longer than the context of 16"):
        scheduler.schedule()


def test_a_sequence_without_a_token_to_compute_has_no_chunk():
    scheduler = make()
    scheduler.add(sequence(4))
    scheduler.complete(scheduler.schedule())
    assert scheduler.schedule() == [] and scheduler.running == 1


# ---------------------------------------------------------------------------------------- admission


def test_lower_priorities_go_first_then_arrivals_then_the_order_of_add():
    scheduler = make(sequences=1)
    fields = [(1, 0), (0, 5), (0, 4), (0, 5), (-1, 9)]
    added(scheduler, *(sequence(4, i, priority=p, arrival=a) for i, (p, a) in enumerate(fields)))
    order = []
    while scheduler.waiting:
        order += [n for n, _, _ in step(scheduler)]
        scheduler.remove(scheduler._running[0])
    assert order == [4, 2, 1, 3, 0]


def test_prompts_of_a_higher_priority_go_first():
    scheduler = make(tokens=20, chunk=16)
    cached = sequence(14)
    scheduler.add(cached)
    step(scheduler)
    scheduler.remove(cached)
    added(scheduler, sequence(60, 2, priority=1))
    scheduler.add(sequence(40, priority=1, arrival=1))
    assert step(scheduler) == [(1, 0, 16), (2, 14, 16)]
    scheduler._running[1].priority = 0
    assert step(scheduler) == [(2, 16, 32)]
    assert step(scheduler) == [(2, 32, 40)]
    assert step(scheduler) == [(2, 40, 41), (1, 16, 32)]


def test_none_is_admitted_before_the_first_one():
    scheduler = make(pool=16, tokens=32)
    added(scheduler, sequence(28, 1), sequence(40, 2), sequence(2, 3))
    for _ in range(3):
        assert [n for n, _, _ in step(scheduler)] == [0]
    scheduler.remove(scheduler._running[0])
    assert [n for n, _, _ in step(scheduler)] == [1]


def test_a_sequence_is_admitted_when_its_whole_prompt_fits():
    scheduler = make(pool=20, tokens=8)
    added(scheduler, sequence(48, 1), sequence(40, 2))  # 13 and 11 blocks
    for _ in range(6):
        assert [n for n, _, _ in step(scheduler)] == [0]
    assert scheduler.preempted == 0
    assert scheduler._manager.held["full"] == 13


@pytest.mark.parametrize("window", [0, 40])
def test_a_common_prefix_is_computed_once(window):
    """16 requests at the same time, a prefix of 250 blocks."""
    scheduler = make(pool=400, tokens=160, sequences=16, context=1100, chunk=32, group=window)
    common = list(range(1000))
    sequences = [ActiveSequence([*common, 5000 + i, 6000 + i], 1002) for i in range(16)]
    added(scheduler, *sequences)
    computed, steps = 0, 0
    while any(len(s.tokens) == 1002 for s in sequences):
        computed += sum(stop - start for _, start, stop in step(scheduler))
        steps += 1
    assert computed <= 1000 + 16 * 3 + 16 and steps == 8
    assert scheduler._manager.hits == 15 * 1000


def test_a_bidirectional_prefix_is_computed_once():
    """Two samples of each of two prompts: those that wait do not hold up the others."""
    scheduler = make(tokens=64)
    sequences = [sequence(15, first, prefix=14) for first in (1, 1, 2, 2)]
    added(scheduler, *sequences)
    assert step(scheduler) == [(0, 0, 15), (2, 0, 15)] and not scheduler.take_copies()
    chunks = scheduler.schedule()
    tables = [s.blocks.tables["full"] for s in sequences]
    for a, b in (tables[:2], tables[2:]):  # three shared blocks, and a copy of the fourth
        assert (a[:3] == b[:3]).all() and a[3] != b[3]
    assert [(copy.source, copy.target) for copy in scheduler.take_copies()] == [
        (a[3], b[3]) for a, b in (tables[:2], tables[2:])
    ]  # fmt: skip
    assert not any(s.blocks.private for s in sequences)
    assert finish(scheduler, chunks) == [(0, 15, 16), (2, 15, 16), (1, 14, 15), (3, 14, 15)]


def test_a_sequence_whose_logits_are_all_needed_uses_no_cached_prefix():
    scheduler = make()
    first = sequence(12)
    scheduler.add(first)
    step(scheduler)
    added(scheduler, sequence(12, reuse=False), sequence(12))
    assert step(scheduler) == [(0, 12, 13), (1, 0, 12), (2, 8, 12)]
    scheduler.remove(first)
    step(scheduler)


def test_a_sequence_does_not_wait_for_a_prefix_that_nobody_computes_any_more():
    scheduler = make(tokens=8)
    first, second = sequence(30), sequence(30)
    added(scheduler, first, second)
    assert step(scheduler) == [(0, 0, 8)]
    assert step(scheduler) == [(0, 8, 16)]
    assert scheduler.waiting == 1
    scheduler.remove(first)
    assert step(scheduler) == [(1, 16, 24)]


# --------------------------------------------------------------------------------------- preemption


def test_the_sequence_with_the_least_computed_tokens_is_preempted():
    scheduler = make(pool=16, tokens=32)
    added(scheduler, sequence(8, 1), sequence(20, 2), sequence(12, 3))
    step(scheduler)
    seen = []
    while not scheduler.preempted:
        seen.append(step(scheduler))
    assert [n for n, _, _ in seen[-2]] == [0, 1, 2]
    assert [n for n, _, _ in seen[-1]] == [0, 1]  # not the first, which has fewer
    third = scheduler._waiting[0]
    assert third.number == 2 and third.preemptions == 1 and third.computed == 0
    assert third.blocks is None and len(third.tokens) > 12  # its sampled tokens are kept
    scheduler.remove(scheduler._running[1])
    chunks = scheduler.schedule()
    again = next(c for c in chunks if c.sequence is third)
    assert again.start > 0 and again.samples  # part of it was still cached


def test_the_lowest_priority_is_preempted_before_the_least_computed():
    scheduler = make(pool=16, tokens=32)
    added(scheduler, sequence(8, 1), sequence(8, 2), sequence(28, 3, priority=5))
    step(scheduler)
    step(scheduler)
    while not scheduler.preempted:
        step(scheduler)
    assert [s.number for s in scheduler._waiting] == [2]


def test_a_sequence_preempts_itself_if_it_has_computed_least():
    scheduler = make(pool=16, tokens=64)
    added(scheduler, sequence(40, 1), sequence(11, 2))
    step(scheduler)
    while not scheduler.preempted:
        step(scheduler)
    assert [s.number for s in scheduler._waiting] == [1]


def test_the_first_sequence_runs_to_its_end_and_then_the_others():
    scheduler = make(pool=16, tokens=32)
    sequences = [sequence(20, i) for i in range(5)]
    added(scheduler, *sequences)
    ended = []
    for _ in range(1000):
        chunks = scheduler.schedule()
        finish(scheduler, chunks)
        for each in sequences:
            if len(each.tokens) == 64 and each.number not in ended:
                scheduler.remove(each)
                ended.append(each.number)
        if len(ended) == 5:
            break
    assert ended == [0, 1, 2, 3, 4] and scheduler.preempted > 0
    assert scheduler._manager.held == {"full": 0}


def test_nothing_is_admitted_in_a_step_that_preempts():
    scheduler = make(pool=16, tokens=32)
    added(scheduler, *(sequence(12, i) for i in range(4)))
    for _ in range(200):
        before = scheduler.preempted
        running = {n for n, _, _ in step(scheduler)}
        if scheduler.preempted > before:
            assert all(s.number not in running for s in scheduler._waiting)
            break
    assert scheduler.preempted


# ----------------------------------------------------------------------------- failures and removal


def test_a_step_that_failed_is_scheduled_again():
    scheduler = make(tokens=8)
    added(scheduler, sequence(12, 1))
    for _ in range(4):
        chunks = scheduler.schedule()
        assert scheduler.schedule() == chunks
        finish(scheduler, chunks)


def test_removal_in_any_state():
    scheduler = make(sequences=1)
    running, waiting, unknown = sequence(9, 1), sequence(9, 2), sequence(9, 3)
    added(scheduler, running, waiting)
    chunks = scheduler.schedule()
    assert scheduler.remove(waiting) and scheduler.waiting == 0
    assert scheduler.remove(running) and scheduler.running == 0
    assert not any(map(scheduler.remove, (running, waiting, unknown)))
    scheduler.complete(chunks)  # ignored
    assert running.computed == 0 and scheduler._manager.held == {"full": 0}
    assert scheduler._manager.cached == {"full": 0}
    assert scheduler.schedule() == []


def test_misuse_is_an_error():
    scheduler = make(tokens=8, context=64)
    first = sequence(4)
    scheduler.add(first)
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(first)
    for length, prefix in ((0, 0), (65, 0), (4, 5)):
        with pytest.raises(ValueError, match=f"{length} tokens with a prefix of {prefix}"):
            scheduler.add(sequence(length, prefix=prefix))
    with pytest.raises(ValueError, match="a prefix of 9 tokens for steps of 8"):
        scheduler.add(sequence(20, prefix=9))
    chunks = scheduler.schedule()
    scheduler.complete(chunks)
    with pytest.raises(ValueError, match="tokens 0 to 4 after 4"):
        scheduler.complete(chunks)
    with pytest.raises(ValueError, match="chunk=16"):
        make(tokens=8, chunk=16)
    with pytest.raises(ValueError, match="the pool of full needs 1 more blocks"):
        make(pool=15)
    with pytest.raises(ValueError, match="the pool of window needs 3 more blocks"):
        make(pool=8, window=6)
    assert make(pool=10, window=1, tokens=32).context == 64


# ----------------------------------------------------------------------------- steps launched ahead


def test_steps_that_follow_are_launched_before_their_tokens_are_known():
    scheduler = make(pool=40, full=0, window=6)
    added(scheduler, sequence(5, 1), sequence(6, 2))
    chunks = scheduler.schedule()
    for _ in range(30):
        following = scheduler.following(chunks)
        assert following is not None
        starts = [(c.sequence.number, c.start) for c in following]
        assert starts == [(0, chunks[0].stop), (1, chunks[1].stop)]
        finish(scheduler, chunks)
        chunks = following
    finish(scheduler, chunks)
    assert step(scheduler) == [(0, 35, 36), (1, 36, 37)]


def test_no_step_follows_if_the_next_one_may_differ():
    scheduler = make(pool=16, sequences=2)
    added(scheduler, sequence(40, 1))
    assert scheduler.following(scheduler.schedule()) is None  # a prompt
    step(scheduler)
    chunks = scheduler.schedule()
    assert scheduler.following(chunks) is not None
    scheduler.add(sequence(4, 2))
    assert scheduler.following(chunks) is None  # one may be admitted
    finish(scheduler, chunks)
    chunks = scheduler.schedule()
    assert len(chunks) == 2 and scheduler.following(chunks) is not None
    scheduler.add(sequence(4, 3))  # more than may run
    assert scheduler.following(chunks) is not None
    scheduler.remove(chunks[1].sequence)
    assert scheduler.following(chunks) is None
    scheduler.complete(chunks)
    scheduler.remove(chunks[0].sequence)
    assert scheduler.following([]) is None


def test_no_step_follows_while_a_prompt_is_left_out():
    scheduler = make(tokens=8, chunk=8)
    added(scheduler, sequence(3, 1), sequence(20, 2))
    for _ in range(3):
        step(scheduler)
    chunks = scheduler.schedule()
    assert [(c.sequence.number, c.start) for c in chunks] == [(0, 4)] and scheduler.running == 2
    assert scheduler.following(chunks) is None


def test_no_step_follows_the_end_of_the_context_or_without_blocks():
    scheduler = make(pool=17, tokens=64)
    added(scheduler, sequence(63, 1))
    step(scheduler)
    chunks = scheduler.schedule()
    assert [(c.start, c.stop) for c in chunks] == [(63, 64)]
    assert scheduler.following(chunks) is None
    scheduler = make(pool=16, tokens=64)
    added(scheduler, sequence(30, 1), sequence(27, 2))
    chunks = scheduler.schedule()
    for _ in range(10):
        following = scheduler.following(chunks)
        if following is None:
            break
        finish(scheduler, chunks)
        chunks = following
    assert following is None and scheduler.preempted == 0
    finish(scheduler, chunks)
    step(scheduler)
    assert scheduler.preempted == 1


# ------------------------------------------------------------------------------------ forks, pauses


def test_a_fork_runs_at_once_in_shared_blocks_and_takes_the_same_place():
    scheduler = make()
    first, later = sequence(10), sequence(3, 5)
    added(scheduler, first, later)
    scheduler.complete(scheduler.schedule())
    scheduler.remove(later)
    fork = ActiveSequence([*first.tokens, 8], 10)
    copies = scheduler.fork(first, fork)
    tables = [each.blocks.tables["full"] for each in (first, fork)]
    assert copies == [("full", tables[0][2], tables[1][2])] and fork.blocks.private
    assert list(tables[0][:2]) == list(tables[1][:2]) and tables[0][2] != tables[1][2]
    assert fork.number == first.number and fork.computed == 10
    first.tokens.append(7)
    assert finish(scheduler, scheduler.schedule()) == [(0, 10, 11), (0, 10, 11)]


def test_a_fork_waits_if_no_further_sequence_may_run():
    """The idle sequence gives up its blocks for it, and waits itself once its token is known."""
    scheduler = make(sequences=1)
    first = sequence(10)
    scheduler.add(first)
    scheduler.complete(scheduler.schedule())
    fork = ActiveSequence([*first.tokens, 8], 10)
    assert scheduler.fork(first, fork) == () and scheduler.waiting == 1
    chunks = scheduler.schedule()
    assert first.paused and [c.sequence for c in chunks] == [fork] and chunks[0].start == 10
    scheduler.complete(chunks)
    assert scheduler.schedule() == [] and not fork.paused  # nobody waits
    first.tokens.append(7)
    scheduler.resume(first)
    scheduler.resume(fork)
    chunks = scheduler.schedule()
    assert fork.paused and [(c.sequence, c.start) for c in chunks] == [(first, 10)]
    assert scheduler.remove(fork) and not scheduler.remove(fork) and scheduler.remove(first)
    assert scheduler.running == scheduler.waiting == 0
    scheduler._manager.check()


def test_sequences_of_the_same_place_are_removed_one_by_one():
    scheduler = make(sequences=1)
    first = sequence(4)
    scheduler.add(first)
    scheduler.complete(scheduler.schedule())
    forks = [ActiveSequence([*first.tokens, i], 4) for i in range(3)]
    for fork in forks:
        scheduler.fork(first, fork)
    assert scheduler.remove(forks[1]) and not scheduler.remove(forks[1])
    assert scheduler._waiting == [forks[0], forks[2]]


def test_an_idle_sequence_is_preempted_before_the_others():
    scheduler = make(pool=4, context=16, tokens=32, sequences=2)
    first, second = sequence(7), sequence(7, 1)
    added(scheduler, first, second)
    scheduler.complete(scheduler.schedule())
    for token in range(3):  # the first one stays idle
        second.tokens.append(token)
        chunks = scheduler.schedule()
        scheduler.complete(chunks)
        assert [c.sequence for c in chunks] == [second]
    assert first.paused and first.blocks is None and second.preemptions == 0


def test_pools_for_all_sequences_at_full_length_admit_all():
    """No block is left free for a sequence that has the blocks of the whole context."""
    scheduler = make(pool=3 * 16, tokens=192, sequences=3, context=64)
    added(scheduler, *(sequence(64, first) for first in range(3)))
    assert [chunk.stop for chunk in scheduler.schedule()] == [64, 64, 64]
    short = make(pool=3 * 16, tokens=192, sequences=4, context=64)
    added(short, sequence(60), sequence(60, 1), sequence(64, 2))
    assert [chunk.stop for chunk in short.schedule()] == [60, 60, 64]
    few = make(pool=3 * 16 - 1, tokens=192, sequences=3, context=64)
    added(few, *(sequence(64, first) for first in range(3)))
    assert [chunk.stop for chunk in few.schedule()] == [64, 64]
