"""Concurrent requests on one model: several threads, interruptions, abandoned streams, callbacks.

Every answer is compared with the answer that the request gets alone. `request_campaign.py` makes
thousands of such requests; this file runs a few hundred of them.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time

import chatglm_cases
import chatglm_models
import numpy as np
import pytest
import request_campaign
import tiny_models as tiny
import windowed_model

import graphllm
from graphllm.engine import request_lock
from graphllm.engine.request import Sampling
from graphllm.engine.request_lock import Claim, RequestLock
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


def test_an_active_stream_is_not_interrupted(llm):
    """A request of another thread waits until the stream has ended; no token is computed twice."""
    stream = llm.stream("hello", max_tokens=60, **GREEDY)
    next(stream)
    answers, pieces_after = [], 0
    other = in_thread(lambda: answers.append(llm.generate("what is", max_tokens=4, **GREEDY)))
    turn = llm.engine._request_number
    for _ in stream:
        pieces_after += bool(answers)
        time.sleep(0.002)
    joined(other)
    # The stream has released the model when it yields its last piece.
    assert pieces_after == 0 and llm.engine._request_number == turn + 1
    timings = answers[0].timings
    assert timings.queue_s > 0.05 and timings.ttft_s > timings.queue_s
    assert timings.prefill_s < timings.queue_s


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
    start = time.monotonic()
    joined(in_thread(lambda: llm.generate("what is", max_tokens=4)))
    if end != "left":
        assert llm.engine.lock._owner.waited_s == 0
    else:
        assert time.monotonic() - start >= request_lock.IDLE_TIMEOUT_S / 2


def test_requests_are_served_in_order():
    lock, order = RequestLock(), []
    first = Claim("first")
    lock.acquire(first)

    def serve(index: int) -> None:
        with lock.hold(f"request {index}"):
            order.append(index)

    threads = []
    for index in range(5):
        threads.append(in_thread(lambda index=index: serve(index)))
        while len(lock._waiting) <= index:
            time.sleep(0.001)
    lock.release(first)
    joined(*threads)
    assert order == [0, 1, 2, 3, 4]


def test_an_interrupted_wait_does_not_block_others():
    """After an interrupt such as Ctrl-C, the next request in line is served."""
    lock, first = RequestLock(), Claim("first")
    lock.acquire(first)
    second, served = Claim("second"), []

    def waiting() -> None:
        class Interrupted:
            def get(self, timeout):
                raise KeyboardInterrupt

            def put(self, item):
                pass

        second.wakeups = Interrupted()
        try:
            lock.acquire(second)
        except KeyboardInterrupt:
            lock.release(second)

    def behind() -> None:
        with lock.hold("third"):
            served.append(3)

    joined(in_thread(waiting))
    thread = in_thread(behind)
    time.sleep(0.02)
    lock.release(first)
    joined(thread)
    assert served == [3]


def test_a_failed_request_releases_the_model(llm):
    with pytest.raises(RequestError, match="context holds 128"):
        llm.generate(list(range(3, 203)))

    def fail(done, total):
        raise LookupError("my own")

    with pytest.raises(LookupError, match="my own"):
        llm.generate("hello", fail)
    start = time.monotonic()
    joined(in_thread(lambda: llm.generate("hello", max_tokens=1)))
    assert llm.engine.lock._owner.waited_s == 0 and time.monotonic() - start < 30


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
def test_a_callback_cannot_begin_a_request(llm, call):
    """From `seen`, a patch and the progress of a profile: one error; the answer is unchanged."""
    want, said = llm.generate("hello there", max_tokens=8, **SAMPLED), []
    values = llm.trace("hello", "lm_head")["lm_head"]

    def back(*seen):
        with pytest.raises(RequestError, match="callback cannot begin another request") as caught:
            call(llm)
        said.append(str(caught.value))
        return seen[0]

    have = llm.generate("hello there", back, max_tokens=8, **SAMPLED)
    assert (have.ids, have.text) == (want.ids, want.text) and said[0].startswith("a generation of")
    patched = llm.trace("hello", "lm_head", {"model.layers.0.mlp": back})["lm_head"]
    np.testing.assert_array_equal(patched, values)
    assert said[-1].startswith("llm.trace of")
    llm.profile("hello", decode=1, repeat=1, show=back)
    assert said[-1].startswith("llm.profile of") and not any("\n" in line for line in said)
