"""Many requests at once: lists of prompts, handles of requests in the background, progress."""

from __future__ import annotations

import gc
import sys
import threading
import time

import idle_engine
import numpy as np
import pytest
import tiny_models as tiny
from pseudo_terminal import at_terminal

import graphllm
from graphllm import RequestError, Sampling, progress
from graphllm.errors import NumericError

SAMPLED = {"temperature": 0.9, "seed": 4, "ignore_eos": True}
TEXTS = ["hello", "what is", "hello there", "and so on and so on", "a", "the quick brown fox"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_tiny(tmp_path_factory.mktemp("many") / "tiny.gguf", "llama")


@pytest.fixture(scope="module")
def llm(path):
    return graphllm.load(path, device="cpu", threads=1, max_sequences=4)


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    """After each test no request holds memory, and no thread runs."""
    yield
    idle_engine.check(llm)


def joined(*works) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a request waits for ever"


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --------------------------------------------------------------------------------- lists of prompts


def test_each_prompt_has_its_own_settings(llm):
    each = [
        Sampling(temperature=0.0, max_tokens=5),
        {"temp": 1.1, "seed": 3, "max_new_tokens": 9},
        {"seed": 8, "stop": ["e"]},
    ]
    have = llm.generate(TEXTS[:3], sampling=each, ignore_eos=True)
    for text, own, done in zip(TEXTS, each, have):
        want = llm.generate(text, sampling=own, ignore_eos=True)
        assert (done.ids, done.text, done.finish_reason) == (
            want.ids,
            want.text,
            want.finish_reason,
        )
    assert llm.generate([], sampling=[]) == []
    pieces = ["", "", ""]
    for index, piece in llm.stream(TEXTS[:3], sampling=iter(each), ignore_eos=True):
        pieces[index] += piece
    assert pieces == [done.text for done in have]


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize(
    ("prompts", "each", "message"),
    [
        (["a", "b"], [{}], "sampling has 1 elements for 2 prompts: give one for all prompts, or"),
        (["a"], [{}, {}], "sampling has 2 elements for 1 prompts"),
        ([], [{}], "sampling has 1 elements for 0 prompts"),
        ("a", [{}], "sampling = [{}] must be a graphllm.Sampling or a mapping"),
        (["a"], "x", "sampling = 'x' must be a graphllm.Sampling or a mapping"),
        (["a", "b"], [{}, {"temp": -1}], "sampling[1]: temperature = -1 must be at least 0"),
        (["a"], [{"temprature": 1}], "sampling[0]: llm.CALL has no argument 'temprature'"),
        (["a"], [5], "sampling[0]: sampling = 5 must be a graphllm.Sampling or a mapping"),
    ],
)
def test_settings_that_do_not_match_the_prompts(llm, call, prompts, each, message):
    with pytest.raises(RequestError) as caught:
        getattr(llm, call)(prompts, sampling=each)
    assert message.replace("CALL", call) in str(caught.value)


def test_a_stream_of_several_prompts(llm):
    """Pieces come as they are computed, those of different prompts in between."""
    lengths = [12, 3, 20, 0, 7, 16]
    each = [{"max_tokens": n} for n in lengths]
    want = [done.text for done in llm.generate(TEXTS, sampling=each, **SAMPLED)]
    pieces = list(llm.stream(TEXTS, sampling=each, **SAMPLED))
    for index, text in enumerate(want):
        assert "".join(piece for i, piece in pieces if i == index) == text
    order = [index for index, _ in pieces]
    assert order != sorted(order) and 3 not in order
    assert list(llm.stream([], **SAMPLED)) == []


def test_a_stream_of_several_prompts_that_is_closed(llm):
    stream = llm.stream(TEXTS, max_tokens=30, **SAMPLED)
    next(stream)
    assert llm.engine.batcher.generations
    stream.close()
    with pytest.raises(RequestError, match="context holds"):
        list(llm.stream(["hello", [5] * 1000]))


# ------------------------------------------------------------------------------------------ handles


def test_a_handle_has_text_result_and_progress(llm):
    want = llm.generate("hello there", max_tokens=20, **SAMPLED)
    handle = llm.submit("hello there", max_tokens=20, **SAMPLED)
    pieces = list(handle)
    assert len(pieces) > 5 and "".join(pieces) == want.text
    done = handle.result()
    assert done is handle.completion and handle.result() is done and handle.done
    assert (done.ids, done.seed, done.finish_reason) == (want.ids, 4, "length")
    assert "".join(handle) == want.text, "an iteration begins with the first piece"
    prompt = len(want.prompt_ids)
    assert handle.progress == (prompt, prompt, 20)
    assert done.timings.ttft_s > 0 and done.timings.decode_tokens == want.timings.decode_tokens


def test_a_request_in_the_background_needs_no_waiting_thread(llm):
    handles = [llm.submit(text, max_tokens=20, **SAMPLED) for text in TEXTS]
    assert handles[-1].progress.prompt_tokens == len(llm.encode(TEXTS[-1]))
    until(lambda: all(handle.done for handle in handles))
    assert [handle.progress.tokens for handle in handles] == [20] * len(TEXTS)
    want = llm.generate(TEXTS, max_tokens=20, **SAMPLED)
    assert [handle.result().text for handle in handles] == [done.text for done in want]


def test_64_handles_of_four_threads(llm):
    """Each thread reads the text of some handles and waits for others that it did not submit."""
    texts = [f"hello {'x' * (i % 5)}" for i in range(64)]
    asks = [{"max_tokens": 4 + i % 9, **SAMPLED, "seed": i} for i in range(64)]
    want = [llm.generate(text, **ask).text for text, ask in zip(texts, asks)]
    handles: dict[int, graphllm.RequestHandle] = {}
    read: dict[int, str] = {}
    results: dict[int, str] = {}
    submitted = threading.Barrier(4)

    def work(first: int) -> None:
        for index in range(first, 64, 4):
            handles[index] = llm.submit(texts[index], **asks[index])
        submitted.wait(60)
        for index in range(first, 64, 4):
            read[index] = "".join(handles[index])
        for index in range((first + 1) % 4, 64, 4):
            results[index] = handles[index].result().text

    joined(*(lambda n=n: work(n) for n in range(4)))
    for found in (read, results):
        assert [found[index] for index in range(64)] == want


def test_two_threads_read_one_handle(llm):
    want = llm.generate("hello", max_tokens=60, **SAMPLED).text
    handle, found = llm.submit("hello", max_tokens=60, **SAMPLED), []
    joined(*[lambda: found.append("".join(handle))] * 3, lambda: found.append(handle.result().text))
    assert found == [want] * 4


def test_threads_read_the_samples_of_one_prompt(llm):
    want = llm.generate("hello", n=4, max_tokens=60, **SAMPLED)
    handle, found = llm.submit("hello", n=4, max_tokens=60, **SAMPLED), {}

    def read(index: int, each) -> None:
        found[index] = "".join(each)

    samples = [handle, *handle.alternatives]
    joined(*(lambda i=i, each=each: read(i, each) for i, each in enumerate(samples)))
    assert [found[i] for i in range(4)] == [done.text for done in want.choices]
    assert [done.ids for done in handle.result().choices] == [done.ids for done in want.choices]


def test_a_slow_reader_does_not_stall_the_others(llm):
    slow = llm.submit("hello", max_tokens=60, **SAMPLED)
    first = next(iter(slow))
    others = [llm.submit(text, max_tokens=30, **SAMPLED) for text in TEXTS]
    stream = llm.stream("what", max_tokens=5, **SAMPLED)
    next(stream)
    assert all(len(handle.result().ids) == 30 for handle in others)
    text = "".join(slow)
    assert text == llm.generate("hello", max_tokens=60, **SAMPLED).text
    assert text.startswith(first)
    stream.close()


@pytest.mark.parametrize("how", ["cancel", "collected", "thread"])
def test_a_cancelled_request_leaves_the_batch(llm, how, monkeypatch):
    """The steps are slow, so that the request has not ended before."""
    run = llm.engine.batcher.runner.decode
    monkeypatch.setattr(
        llm.engine.batcher.runner, "decode", lambda *a: (time.sleep(0.005), run(*a))
    )
    want = llm.generate("hello", max_tokens=100, **SAMPLED)
    handle = llm.submit("hello", max_tokens=100, **SAMPLED)
    other = llm.submit("what is", max_tokens=10, **SAMPLED)
    next(iter(handle))
    if how == "collected":
        generation = handle._generation
        held = [handle]
        held.append(held)
        del handle, held
        gc.collect()
        until(lambda: generation.done)
        assert generation.count < 100
    else:
        if how == "cancel":
            handle.cancel()
        else:  # wakes a thread that waits
            timer = threading.Timer(0.03, handle.cancel)
            timer.start()
        done = handle.result()
        handle.cancel()
        assert handle.done and done.finish_reason == "cancelled"
        assert 0 < len(done.ids) < 100 and want.text.startswith(done.text)
        assert "".join(handle) == done.text
    assert len(other.result().ids) == 10
    assert other.result().finish_reason == "length"


def test_a_request_that_waits_can_be_cancelled(llm):
    """More requests than the batch takes: the last ones have not begun."""
    handles = [llm.submit("hello", max_tokens=100, **{**SAMPLED, "seed": n}) for n in range(12)]
    handles[-1].cancel()
    done = handles[-1].result()
    assert (done.ids, done.text, done.finish_reason) == ([], "", "cancelled")
    for handle in handles[4:]:
        handle.cancel()
    assert all(len(handle.result().ids) == 100 for handle in handles[:4])


def test_errors_reach_the_handle(llm, path, tmp_path):
    for call, message in (
        (lambda: llm.submit(["a", "b"]), "llm.submit takes one prompt"),
        (lambda: llm.submit("a", temperature=-1), "temperature = -1"),
        (lambda: llm.submit([5] * 1000), "the context holds"),
        (lambda: llm.submit([]), "the prompt is empty"),
        (lambda: llm.submit([10**6]), "token id 1000000 is not in"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    weights = tiny.llama_weights()
    weights["model.embed_tokens.weight"][42, 9] = np.nan
    bad = graphllm.load(tiny.write_llama(tmp_path / "nan.gguf", weights), device="cpu", threads=1)
    wrong, right = bad.submit([5, 42, 7]), bad.submit([5, 6, 7], max_tokens=9, allowed_ids=[8])
    for _ in range(2):
        with pytest.raises(NumericError, match="embed_tokens"):
            wrong.result()
    assert wrong.done and right.result().ids == [8] * 9
    bad.close()


def test_a_failed_step_ends_the_requests_in_the_background(llm, monkeypatch):
    llm.engine.clear_cache()  # a cached prompt is continued by a decode step, which does not fail
    want = llm.generate("hello", max_tokens=8, **SAMPLED).text
    stream = llm.stream("hello", max_tokens=8, **SAMPLED)
    text = next(stream)

    def fail(*call):
        raise LookupError("my own")

    monkeypatch.setattr(llm.engine.batcher.runner, "run", fail)
    handles = [llm.submit("what is", **SAMPLED) for _ in range(3)]
    for handle in handles:
        with pytest.raises(LookupError, match="my own"):
            handle.result()
    monkeypatch.undo()
    assert text + "".join(stream) == want
    assert llm.submit("hello", max_tokens=8, **SAMPLED).result().text == want


def test_a_callback_cannot_wait_for_a_handle(llm):
    """It runs within a step, and the handle would wait for that step."""
    handle, said = llm.submit("hello", max_tokens=4, **SAMPLED), []

    def back(value):
        for wait in (handle.result, lambda: list(handle)):
            with pytest.raises(RequestError, match="callback cannot begin another") as caught:
                wait()
            said.append(caught.value)
        return value

    llm.trace("hello", "lm_head", {"model.layers.0.mlp": back})
    assert said and len(handle.result().ids) == 4


def test_closing_ends_the_requests_in_the_background(path):
    llm = graphllm.load(path, device="cpu", threads=1)
    handles = [llm.submit("hello", max_tokens=120, **SAMPLED) for _ in range(30)]
    found = []

    def wait() -> None:
        with pytest.raises(RequestError, match=r"^the model is closed$"):
            handles[-1].result()
        found.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    llm.close()
    waiting.join(60)
    assert found == [True] and all(handle.done for handle in handles)
    assert not [t for t in threading.enumerate() if t.name == "graphllm-worker"]
    with pytest.raises(RequestError, match=r"^the model is closed$"):
        llm.submit("x")


# ----------------------------------------------------------------------------------------- progress


def test_progress_of_requests_without_a_terminal(llm, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.05)
    assert len(llm.generate(TEXTS, max_tokens=3, **SAMPLED)) == 6
    with progress.request_progress(6, lambda: (2, 30)) as update:
        update()
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    with progress.request_progress(6, lambda: (2, 30), True) as update:
        update()
        time.sleep(0.1)
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith("generating: 2 of 6, ") and line.endswith(" tok/s")
    llm.generate(TEXTS, max_tokens=3, progress=True, **SAMPLED)
    with pytest.raises(RequestError, match="progress = 'yes' must be True or False"):
        llm.generate(TEXTS, progress="yes")


@pytest.mark.parametrize(("wanted", "total"), [("None", 6), ("True", 1), ("False", 6), ("None", 1)])
def test_progress_of_requests_at_a_terminal(wanted, total):
    code = (
        "import time; from graphllm.progress import request_progress\n"
        f"with request_progress({total}, lambda: (1, 30), {wanted}) as update:\n"
        "    update(); time.sleep(0.2)"
    )
    done, shown, _ = at_terminal(sys.executable, "-c", code, errors=True)
    assert done == 0 and (f"1 of {total}, ".encode() in shown) == (
        wanted == "True" or (total > 1 and wanted == "None")
    )
