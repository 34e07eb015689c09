"""Bills of requests: their rows against the wall time, the work alone, and the engine's state."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import idle_engine
import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.api.text_generator import TextGenerator
from graphllm.engine.batcher import Batcher
from graphllm.engine.bill import OpCost
from graphllm.engine.sequence import ActiveSequence, Chunk
from graphllm.errors import RequestError
from graphllm.profiler.bill import Meter
from graphllm.profiler.record import Run

SEQUENCES = 16
ASK = {"temperature": 0.9, "ignore_eos": True, "profile": True}


@pytest.fixture(scope="module", params=["llama", "gemma3"])  # the second one has windows
def llm(request, tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("bills") / "m.gguf", request.param)
    return graphllm.load(path, device="cpu", context=128, max_sequences=SEQUENCES)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    gc.collect()
    idle_engine.check(llm)
    assert llm.engine.batcher.meter is None


def prompt(index: int, length: int) -> list[int]:
    return [3 + (7 * index + 5 * at) % 90 for at in range(length)]


def own_ns(bill) -> float:
    """What the request is charged for steps."""
    return sum(op.ns for op in bill.ops.values()) + bill.gaps_ns + bill.host_ns


def test_rows_sum_to_the_wall_time_alone(llm):
    start = time.perf_counter_ns()
    done = llm.generate(prompt(0, 50), max_tokens=12, **ASK)
    around = time.perf_counter_ns() - start
    bill, rows = done.bill, list(done.bill.rows())
    assert sum(row["ns"] for row in rows) == pytest.approx(bill.wall_ns, abs=len(rows))
    assert 0.5 * around < bill.wall_ns <= around  # nothing is counted twice
    assert (bill.tokens, bill.steps) == (50 + 11, 12)
    assert bill.others_ns == pytest.approx(0, abs=1e-3) and bill.preemption_ns == bill.http_ns == 0
    assert all(value >= 0 for value in bill.times.values())
    assert done.as_dict()["bill"]["rows"] == rows and "wall" in bill.table()
    assert llm.generate(prompt(0, 50), max_tokens=2).bill is None


def test_bills_of_a_batch_share_the_time_of_its_steps(llm):
    """Each sums to its wall time, and all together to no more than the time of the batch."""
    llm.engine.clear_cache()
    lengths = [20 + index for index in range(SEQUENCES)]
    prompts = [prompt(index + 1, length) for index, length in enumerate(lengths)]
    start = time.perf_counter_ns()
    found = llm.generate(prompts, max_tokens=8, **ASK)
    around = time.perf_counter_ns() - start
    bills = [done.bill for done in found]
    for bill, length in zip(bills, lengths):
        assert sum(row["ns"] for row in bill.rows()) == pytest.approx(bill.wall_ns, rel=1e-3)
        assert bill.tokens == length + 7 and bill.wall_ns <= around
        assert bill.others_ns > 5 * own_ns(bill)  # 16 requests of about the same size
    assert sum(map(own_ns, bills)) < around
    assert sum(map(own_ns, bills)) > 0.5 * bills[-1].wall_ns
    llm.engine.clear_cache()
    alone = llm.generate(prompts[3], max_tokens=8, seed=1, **ASK).bill
    assert alone.ops.keys() == bills[3].ops.keys()
    for name, op in alone.ops.items():  # windows: the mean of several steps is charged
        assert bills[3].ops[name].flops == pytest.approx(op.flops, rel=0.02)


def test_time_before_and_after_the_steps_is_charged(llm, monkeypatch):
    """The tokenization of the prompt, and the charging of the last steps."""
    slow_s = 0.03

    def slowed(call):
        def run(*args):
            time.sleep(slow_s)
            return call(*args)

        return run

    monkeypatch.setattr(llm, "_sequence", slowed(llm._sequence))
    monkeypatch.setattr(llm._meter, "_charge", slowed(llm._meter._charge))
    bill = llm.generate(prompt(0, 20), max_tokens=2, **ASK).bill
    assert bill.prompt_ns >= 1e9 * slow_s
    assert bill.host_ns + bill.others_ns >= 1e9 * slow_s


def test_samples_and_beams_are_on_one_bill(llm):
    llm.engine.clear_cache()
    one = llm.generate(prompt(9, 30), max_tokens=6, n=3, **ASK)
    assert one.bill.tokens >= 30 + 3 * 5 and one.bill.others_ns == pytest.approx(0, abs=1e-3)
    assert [each.bill for each in one.alternatives] == [None, None]
    beams = llm.generate(prompt(8, 30), max_tokens=6, beams=3, profile=True)
    assert beams.bill.tokens >= 30 and own_ns(beams.bill) > 0


def test_preemption_and_queue_are_named(llm, tmp_path):
    """A pool that is too small for two sequences, and a third request, which waits for a place."""
    path = tiny.write_tiny(tmp_path / "m.gguf", "llama")
    one = 128 * tiny.LAYERS * 2 * tiny.KV * tiny.WIDTH * 2  # bytes of a whole sequence in f16
    small = graphllm.load(path, context=128, max_sequences=2, kv_memory=3 * one // 2, device="cpu")
    with small:
        handles = [small.submit(prompt(i, 60), max_tokens=60, **ASK) for i in range(3)]
        bills = [handle.result().bill for handle in handles]
        assert small.engine.scheduler.preempted
    assert bills[0].preemption_ns == 0
    assert bills[1].preemption_ns > 0
    assert bills[2].queue_ns > bills[0].queue_ns
    for bill in bills:
        assert bill.tokens - bill.recomputed_tokens == 60 + 59
        assert sum(row["ns"] for row in bill.rows()) == pytest.approx(bill.wall_ns, rel=1e-3)


def test_preemption_with_drafts(tmp_path):
    """Answers of few different tokens, with drafts, in a pool that is too small for both."""
    path = tiny.write_tiny(tmp_path / "m.gguf", "llama")
    one = 128 * tiny.LAYERS * 2 * tiny.KV * tiny.WIDTH * 2
    few = {"temperature": 0.9, "seed": 3, "max_tokens": 60, "allowed_ids": [7, 9, 11]}
    prompts = [prompt(i, 60) for i in range(2)]
    options = {"context": 128, "max_sequences": 2, "device": "cpu"}
    with graphllm.load(path, **options) as plain:
        want = [plain.generate(each, **few).ids for each in prompts]
    with graphllm.load(path, **options, kv_memory=3 * one // 2, speculate="3") as small:
        handles = [small.submit(each, **few, profile=True) for each in prompts]
        found = [handle.result() for handle in handles]
        assert small.engine.scheduler.preempted
        idle_engine.check(small)
    assert [done.ids for done in found] == want
    assert all(done.timings.drafted_tokens > done.timings.accepted_tokens > 0 for done in found)
    assert found[1].bill.preemption_ns > found[0].bill.preemption_ns == 0
    assert all(done.bill.draft_ns > 0 for done in found)
    for done in found:
        bill, timings = done.bill, done.timings
        rejected = timings.drafted_tokens - timings.accepted_tokens
        assert bill.tokens == 60 + 59 + rejected + bill.recomputed_tokens
        assert sum(row["ns"] for row in bill.rows()) == pytest.approx(bill.wall_ns, rel=1e-3)


def test_requests_without_bills_run_unrecorded(llm):
    """A bill ends with its request, also if that is refused, cancelled or forgotten."""
    with pytest.raises(RequestError, match="context"):
        llm.generate(prompt(0, 200), **ASK)
    assert llm.engine.batcher.meter is None
    handle = llm.submit(prompt(0, 20), max_tokens=90, **ASK)
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    assert handle.completion.bill.wall_ns > 0
    forgotten = llm.submit(prompt(1, 20), max_tokens=90, **ASK)
    del handle, forgotten
    gc.collect()
    assert llm.engine.batcher.meter is None


def test_bills_that_are_first_asked_for_at_the_same_time(llm, monkeypatch):
    """Threads that ask at once get one meter, as the engine has one."""
    vars(llm).pop("_meter", None)
    made, both = list[Meter](), threading.Barrier(2)

    class Slow(Meter):
        """A meter that another thread makes at the same time."""

        def __init__(self, batcher: Batcher) -> None:
            super().__init__(batcher)
            both.wait(60)
            made.append(self)

    monkeypatch.setattr("graphllm.profiler.bill.Meter", Slow)
    # Before Python 3.12 `cached_property` has a lock, but it is one for all models.
    own = vars(TextGenerator)["_meter"]
    monkeypatch.setattr(own, "lock", nullcontext(), raising=False)
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: llm._meter, range(2))
    assert len(made) == 2 and first is second is llm._meter


def test_intervals_are_charged_to_their_causes():
    """Runs at known times, worked out by hand."""
    own, other = (ActiveSequence([1, 2, 3], 3) for _ in range(2))
    account = Meter(Batcher(None, None)).open(1, 0)
    account._at, account._bill.prompt_ns = 0, 30

    def charge(number: int, called: int, ends: list[int], returned: int, ns: float,
               start: int, alone: bool = False, preemptions: int = 0) -> None:  # fmt: skip
        chunks = [Chunk(own, start, start + 1, True), Chunk(other, 0, 1, True)]
        run = Run(None, {}, called, returned, (np.array(ends),), (np.array(ends[:-1]),),
                  tuple(chunks[: 1 if alone else 2]))  # fmt: skip
        parts = np.array([[[ns], [99.0]], [[7.0], [0.0]], [[5.0], [0.0]]])
        account.charge([run], number, [0], ["op"], parts, preemptions, [0])

    charge(3, 100, [110, 160, 200], 210, 30, 0)  # 100 queue; gaps 10 + 10; 90 of ops
    charge(4, 250, [250, 300], 300, 50, 1, alone=True)  # 40 host; 50 of ops
    charge(6, 400, [400, 420], 420, 5, 2)  # 100 queue, since run 5 was another's; 20 of ops
    charge(7, 500, [500, 540], 540, 10, 1, preemptions=1)  # 80 preemption; 40 of ops
    account.finish(560)  # 20 host, half of it its own
    bill = account.bill()
    assert bill.ops == {"op": OpCost(95, 28, 20)}
    assert bill.times == {"gaps": 10, "host": 50, "other requests": 10 + 60 + 15 + 30 + 10,
                          "prompt": 30, "queue": 200, "preemption": 80, "http": 0,
                          "drafts": 0}  # fmt: skip
    assert bill.wall_ns == 30 + 560
    assert (bill.tokens, bill.recomputed_tokens, bill.steps) == (4, 1, 4)


def test_rejected_drafts_are_not_recomputed_tokens():
    """Of three rows with drafts, one draft is accepted; then the blocks are lost."""
    origin = ActiveSequence([1, 2, 3], 3)
    copy = replace(origin, tokens=[1, 2, 3, 4, 9], origin=origin)
    account = Meter(Batcher(None, None)).open(1, 0)
    origin.tokens += [4, 5, 6]

    def charge(number: int, chunks: list[Chunk], preemptions: int) -> None:
        run = Run(None, {}, 0, 1, (np.array([0, 1]),), (np.array([0]),), tuple(chunks))
        parts = np.ones((3, len(chunks), 1))
        indices = [*range(len(chunks))]
        account.charge([run], number, indices, ["op"], parts, preemptions, [0])

    charge(0, [Chunk(origin, 0, 2, True)], 0)
    charge(1, [Chunk(copy, at, at + 1, True) for at in (2, 3, 4)], 0)
    charge(2, [Chunk(origin, 0, 6, True)], 1)
    account.finish(0)
    bill = account.bill()
    assert (bill.tokens, bill.recomputed_tokens) == (2 + 3 + 6, 4)
    assert account._computed == {origin: 6}


def test_predictions_are_charged_to_the_rows_with_drafts():
    """Of 100 ns before a step, 60 predicted the drafts of 3 and 2 of its 6 rows."""
    own, other, plain = (ActiveSequence([1, 2, 3], 3) for _ in range(3))
    account = Meter(Batcher(None, None)).open(1, 0)
    account._at = account._bill.prompt_ns = 0
    for number, (called, predicting) in enumerate([(0, 0), (110, 60), (130, 60)]):
        drafted = [replace(each, origin=each) for each in [own] * 3 + [other] * 2]
        chunks = tuple(Chunk(each, 2, 3, True) for each in [*drafted, plain])
        ends = (np.array([called, called + 10]),)
        run = Run(None, {}, called, called + 10, ends, (np.array([10]),), chunks)
        parts = np.zeros((3, 6, 1))
        account.charge([run], number, [0, 1, 2], ["op"], parts, 0, [predicting])
    account.finish(140)
    bill = account.bill()  # no more than the 10 ns between the last two steps
    assert (bill.draft_ns, bill.host_ns) == (pytest.approx(0.6 * (60 + 10)), 0.5 * 40)
    assert bill.wall_ns == 140 and bill.others_ns == 140 - bill.draft_ns - bill.host_ns
