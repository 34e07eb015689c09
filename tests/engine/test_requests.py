"""Concurrent requests on one model: several threads, interruptions, abandoned streams, callbacks.

Every answer is compared with the answer that the request gets alone. `request_campaign.py` makes
thousands of such requests; this file runs a few hundred of them.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue

import chatglm_cases
import chatglm_models
import numpy as np
import pytest
import request_campaign
import tiny_models as tiny
import windowed_model

import graphllm
from graphllm.engine.request import Sampling
from graphllm.engine.step_lock import StepLock
from graphllm.errors import RequestError

GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "seed": 4, "repeat_penalty": 1.3, "min_tokens": 12}
SEVERAL = 160


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("requests") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=2, **request_campaign.CHAT)


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("most", [1, 5])
def test_intermediates_of_every_request_fit_the_memory_reserved_at_load(tmp_path, most):
    path = tiny.write_tiny(tmp_path / "tiny.gguf", "llama")
    llm = graphllm.load(path, device="cpu", threads=1, max_sequences=most)
    reserved = dict(llm.executor.arenas)
    prompts = [[7, 8, 9, *range(3, 3 + i)] for i in range(most)]
    everything = {"typical_p": 0.9, "repeat_penalty": 1.2, "logprobs": 3, "min_tokens": 3}
    unchanged = {"processors": [lambda ids, logits: logits], "logprobs": 1}
    for own in ({"ignore_eos": True}, everything, {**everything, "prompt_logprobs": 2}, unchanged):
        llm.generate(prompts, max_tokens=4, temperature=0.7, seed=1, **own)
    if most > 1:
        llm.generate(prompts[0], max_tokens=4, beams=most)
    assert llm.executor.arenas.keys() == reserved.keys()
    assert all(llm.executor.arenas[memory] is reserved[memory] for memory in reserved)


def joined(*threads) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a request waits for ever"


# ---------------------------------------------------------------------------------------- all kinds


def test_concurrent_answers_equal_single_ones(llm):
    made, wrong = request_campaign.run(llm, SEVERAL)
    assert not wrong, wrong[:5]
    assert sum(made.values()) == SEVERAL and len(made) > 10


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("between", ["generate", "logits", "trace", "profile", "forget"])
def test_a_stream_continues_after_any_other_request(llm, sampling, between):
    want = llm.generate("hello there", max_tokens=40, **sampling).text
    others = {
        "generate": lambda: llm.generate("hello", max_tokens=3),
        "logits": lambda: llm.logits("hello"),
        "trace": lambda: llm.trace("hello", "lm_head"),
        "profile": lambda: llm.profile("hello", decode=2, repeat=1),
        "forget": llm.engine.clear_cache,
    }
    stream = llm.stream("hello there", max_tokens=40, **sampling)
    text = next(stream)
    others[between]()
    text += next(stream) + next(stream)
    others[between]()
    assert text + "".join(stream) == want


def test_two_interleaved_streams_in_one_thread(llm):
    asks = [("hello", SAMPLED), ("what is", GREEDY), ("hello there", SAMPLED)]
    want = [llm.generate(text, max_tokens=30, **s).text for text, s in asks]
    streams = [llm.stream(text, max_tokens=30, **s) for text, s in asks]
    pieces = zip(*itertools.zip_longest(*streams, fillvalue=""))
    assert ["".join(each) for each in pieces] == want


def interrupted(engine, prompt, sampling, every: int) -> list[int]:
    """Return all ids of a generation from which another request repeatedly takes the cache."""
    found, other = [], [5, 6, 7, *prompt[:3]]
    for token in engine.generate(prompt, sampling, (2,)):
        found.append(token)
        if len(found) % every == 0:
            next(engine.generate(other, sampling, ()))
    return found


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("ask", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_sliding_windows_up_to_the_end_of_the_context(tmp_path_factory, ask, every):
    """Layers with a window drop blocks, and steps are shorter than the recomputed part."""
    folder = tmp_path_factory.mktemp("windows")
    engine, sampling = windowed_model.make_engine(windowed_model.windowed(folder)), Sampling(**ask)
    prompt = windowed_model.IDS[:37]
    want = list(engine.generate(prompt, sampling, (2,)))
    assert len(want) == windowed_model.CONTEXT - 37 + 1
    assert interrupted(engine, prompt, sampling, every) == want


def test_a_bidirectional_prefix(tmp_path):
    """Sampled ids do not extend the prefix, even if they are the ids that end a prefix."""
    chatglm_models.write(tmp_path, chatglm_cases.CONFIG)
    engine = graphllm.load(tmp_path, device="reference", kv_type="f32").engine
    sampling = Sampling(temperature=3.0, seed=2, top_k=0, top_p=1.0)
    prompt = chatglm_cases.random_ids(12, 11)
    want = [token for token, _ in zip(engine.generate(prompt, sampling, (2,)), range(40))]
    have, found = engine.generate(prompt, sampling, (2,)), []
    for index in range(40):
        found.append(next(have))
        if index % 5 == 4:
            next(engine.generate(chatglm_cases.random_ids(9, 5), sampling, ()))
    assert found == want


# ------------------------------------------------------------------------------------------ waiting


def held_blocks(llm) -> int:
    """Return the number of cache blocks that requests hold after cancellations."""
    with llm.engine.lock.hold("a test"):
        llm.engine.settle()
        llm.engine.manager.check()
        return sum(llm.engine.manager.held.values())


def test_a_request_joins_the_batch_of_a_stream(llm):
    """It does not wait until the stream has ended, even if the stream's consumer is slow."""
    stream = llm.stream("hello", max_tokens=60, **GREEDY)
    next(stream)
    order = []
    other = in_thread(lambda: order.append(llm.generate("what is", max_tokens=4, **GREEDY)))
    joined(other)
    rest = "".join(stream)
    assert rest and order[0].text == llm.generate("what is", max_tokens=4, **GREEDY).text
    assert held_blocks(llm) == 0


@pytest.mark.parametrize("end", ["left", "closed", "collected", "raised"])
def test_an_idle_stream_does_not_block_others(llm, end):
    stream = llm.stream("hello", max_tokens=60, **GREEDY)
    next(stream)
    if end == "closed":
        stream.close()
    elif end == "collected":
        held = [stream]
        held.append(held)
        del stream, held
        gc.collect()
    elif end == "raised":
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)
    joined(in_thread(lambda: llm.generate("what is", max_tokens=4)))
    assert (held_blocks(llm) > 0) == (end == "left")


def test_threads_are_served_in_order():
    lock, order = StepLock(), []
    assert lock.acquire("first", lambda: False, SimpleQueue())

    def serve(index: int) -> None:
        with lock.hold(f"request {index}"):
            order.append(index)

    threads = []
    for index in range(5):
        threads.append(in_thread(lambda index=index: serve(index)))
        while len(lock._waiting) <= index:
            time.sleep(0.001)
    lock.release()
    joined(*threads)
    assert order == [0, 1, 2, 3, 4]


def test_a_served_thread_leaves_the_queue():
    """A waiting thread whose result arrives does not take the lock."""
    lock, wakeups, served = StepLock(), SimpleQueue(), threading.Event()
    lock.acquire("first", lambda: False, SimpleQueue())
    found = []
    thread = in_thread(lambda: found.append(lock.acquire("second", served.is_set, wakeups)))
    while not lock._waiting:
        time.sleep(0.001)
    wakeups.put(None)  # spurious
    time.sleep(0.01)
    assert not found
    served.set()
    wakeups.put(None)
    joined(thread)
    assert found == [False] and not lock._waiting
    lock.release()


def test_an_interrupted_wait_does_not_block_others():
    """After an interrupt such as Ctrl-C, the next thread in line is served."""
    lock, served = StepLock(), []
    lock.acquire("first", lambda: False, SimpleQueue())

    class Interrupted:
        def empty(self):
            return True

        def get(self):
            raise KeyboardInterrupt

        def put(self, item):
            pass

    def waiting() -> None:
        with suppress(KeyboardInterrupt):
            lock.acquire("second", lambda: False, Interrupted())

    def behind() -> None:
        with lock.hold("third"):
            served.append(3)

    joined(in_thread(waiting))
    thread = in_thread(behind)
    time.sleep(0.02)
    lock.release()
    joined(thread)
    assert served == [3]


@pytest.mark.parametrize("how", ["run", "hold"])
@pytest.mark.parametrize("name", ["release", "_wake_first"])
def test_an_interrupt_as_a_thread_gives_up_the_lock_does_not_block_others(name, how, monkeypatch):
    lock, served = StepLock(), []
    real = getattr(lock, name)

    def interrupted(*arguments) -> None:
        monkeypatch.setattr(lock, name, real)
        raise KeyboardInterrupt

    def behind() -> None:
        with lock.hold("second"):
            served.append(2)

    def step() -> None:
        served.append(in_thread(behind))
        while not lock._waiting:
            time.sleep(0.001)
        monkeypatch.setattr(lock, name, interrupted)

    with pytest.raises(KeyboardInterrupt):
        if how == "run":
            lock.run("first", step, lambda: False, SimpleQueue())
        else:
            with lock.hold("first"):
                step()
    joined(served[0])
    assert served[1:] == [2]


def test_an_interrupt_as_a_thread_gets_the_lock_does_not_block_others(monkeypatch):
    lock, real = StepLock(), StepLock.acquire

    def interrupted(*arguments) -> None:
        real(lock, *arguments)
        monkeypatch.setattr(lock, "acquire", real.__get__(lock))
        raise KeyboardInterrupt

    def hold() -> None:
        with lock.hold("a request"):
            pass

    monkeypatch.setattr(lock, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hold()
    joined(in_thread(hold))


def test_an_interrupt_as_a_thread_begins_to_wait_does_not_block_others():
    lock = StepLock()
    assert lock.acquire("first", lambda: False, SimpleQueue())

    class Queue(deque):
        def append(self, item) -> None:
            super().append(item)
            raise KeyboardInterrupt

    def waiting() -> None:
        with suppress(KeyboardInterrupt):
            lock.acquire("second", lambda: False, SimpleQueue())

    lock._waiting = Queue()
    joined(in_thread(waiting))
    lock.release()
    joined(in_thread(lambda: lock.acquire("third", lambda: False, SimpleQueue())))


def test_a_failed_request_releases_the_model(llm):
    with pytest.raises(RequestError, match="context holds 128"):
        llm.generate(list(range(3, 203)))

    def fail(done, total):
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        llm.generate("hello", fail)
    joined(in_thread(lambda: llm.generate("hello", max_tokens=1)))
    assert held_blocks(llm) == 0


# ---------------------------------------------------------------------------------------- callbacks


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("x"),
        lambda llm: next(llm.stream("x")),
        lambda llm: llm.logits([3, 4]),
        lambda llm: llm.trace("x", "lm_head"),
        lambda llm: llm.profile("x", decode=1, repeat=1),
        lambda llm: next(llm.conversation().ask("x")),
        lambda llm: llm.close(),
    ],
    ids=["generate", "stream", "logits", "trace", "profile", "conversation", "close"],
)
def test_a_callback_within_a_step_cannot_begin_a_request(llm, call):
    """From a patch and from the progress of a profile: one error; the answer is unchanged."""
    values, said = llm.trace("hello", "lm_head")["lm_head"], []

    def back(*seen):
        with pytest.raises(RequestError, match="callback cannot begin another request") as caught:
            call(llm)
        said.append(str(caught.value))
        return seen[0]

    patched = llm.trace("hello", "lm_head", {"model.layers.0.mlp": back})["lm_head"]
    np.testing.assert_array_equal(patched, values)
    assert said[-1].startswith("llm.trace of")
    llm.profile("hello", decode=1, repeat=1, show=back)
    assert said[-1].startswith("llm.profile of") and not any("\n" in line for line in said)


def test_a_prefill_callback_can_begin_a_request(llm):
    """`seen` is called between steps."""
    want, inner = llm.generate("hello there", max_tokens=8, **SAMPLED), []
    short = llm.generate("x", max_tokens=3, **GREEDY).ids

    def seen(done, total):
        inner.append(llm.generate("x", max_tokens=3, **GREEDY).ids)

    have = llm.generate("hello there", seen, max_tokens=8, **SAMPLED)
    assert (have.ids, have.text) == (want.ids, want.text) and inner == [short]
