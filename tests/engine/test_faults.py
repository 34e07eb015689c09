"""Interrupts, errors and cancellations at awkward moments: answers stay, and nothing is left."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from predicted_answers import predict_answers, speculate
from request_runs import answer, ids_of, submit, take

import graphllm
from graphllm.engine import batcher
from graphllm.engine import generation as generations
from graphllm.engine.completion import Sampled
from graphllm.engine.generation import Delivery, Generation
from graphllm.engine.request import Sampling

PROMPT = [5, 9, 30, 31, 32, 33]
GREEDY = Sampling(temperature=0.0, max_tokens=60, seed=3)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return windowed_model.windowed(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def speculating(path, monkeypatch):
    """An engine that computes draft tokens, and the answer to ``PROMPT``."""
    engine = windowed_model.make_engine(path, threads=1, drafts=12)
    want = answer(engine, PROMPT, GREEDY)
    predict_answers(monkeypatch, [(PROMPT, GREEDY)], [want])
    speculate(engine, 3)
    engine.clear_cache()
    return engine, ids_of(want)


def fail_once(patch: pytest.MonkeyPatch, owner: object, name: str, after: bool = False) -> None:
    """Let the next call of ``owner.name`` be interrupted, before or after it has taken effect."""
    real = getattr(owner, name)

    def interrupted(*args, **options):
        patch.setattr(owner, name, real)
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    patch.setattr(owner, name, interrupted)


def finish(engine, generation) -> list[int]:
    """Run steps until a request has ended, and return its ids."""
    found = []
    while not generation.done:
        with suppress(KeyboardInterrupt):
            engine.step()
    take(generation, found)
    return ids_of(found)


def test_an_interrupt_while_launched_steps_are_finished(speculating, monkeypatch):
    """`Engine.clear_cache` and evaluations finish them first."""
    engine, want = speculating
    generation = engine.submit(PROMPT, GREEDY, ())
    while not (engine.batcher.runner.waiting and generation.count > 10):
        engine.step()
    fail_once(monkeypatch, engine.batcher.speculation, "accept", after=True)
    with pytest.raises(KeyboardInterrupt):
        engine.clear_cache()
    assert finish(engine, generation) == want


def test_the_mask_of_another_request_does_not_outlast_an_interrupt(path, monkeypatch):
    """One request has a grammar; the step after it is interrupted before its mask is written."""
    restricted = Sampling(temperature=0.0, max_tokens=6, seed=0, regex="[a-z]{2,4} [0-9]{200}")
    free = Sampling(temperature=0.0, max_tokens=40, seed=0, repeat_penalty=1.1)
    engine = windowed_model.make_engine(path, threads=1, sequences=2)
    want = ids_of(answer(engine, PROMPT, free))
    engine.clear_cache()
    first, second = submit(engine, [*PROMPT, 7], restricted), submit(engine, PROMPT, free)
    while not first.done:
        engine.step()
    fail_once(monkeypatch, engine.executor, "decode_loop")
    assert finish(engine, second) == want


def test_a_request_that_is_cancelled_while_a_step_begins_runs_no_step(path):
    engine = windowed_model.make_engine(path, threads=1)
    late = []

    class Submitted(deque):
        """Empty, when another thread submits a request and cancels it."""

        def __bool__(self) -> bool:
            if not len(self) and not late:
                late.append(engine.submit(PROMPT, GREEDY, ()))
                engine.cancel(late[0])
                return False
            return len(self) > 0

    engine.batcher._submitted = Submitted()
    for _ in range(3):
        engine.step()
    assert late[0].finish_reason == "cancelled" and engine.batcher.steps == 0
    assert not late[0].events and set(engine.manager.held.values()) == {0}


@pytest.mark.parametrize("moment", ["before", "within"])
def test_the_end_is_reported_once(path, moment, monkeypatch):
    """Also if another thread cancels a request whose step is running."""
    engine, ends = windowed_model.make_engine(path, threads=1), []
    delivery = Delivery(listener=lambda last: ends.append(last))
    generation = engine.submit(PROMPT, GREEDY, (), delivery=delivery)
    for _ in range(3):
        engine.step()
    owner, name = (engine.batcher, "_finish") if moment == "before" else (generation, "push")
    real = getattr(owner, name)

    def cancelled(*args):
        engine.cancel(generation)
        return real(*args)

    monkeypatch.setattr(owner, name, cancelled)
    engine.step()
    while engine.step():
        pass
    assert ends.count(True) == 1 and generation.finish_reason == "cancelled"


def test_results_that_come_while_their_consumer_finds_none_are_not_lost(path):
    """Another thread runs the last steps between two looks at the request."""
    engine = windowed_model.make_engine(path, threads=1)
    want = ids_of(answer(engine, PROMPT, GREEDY))
    generation = engine.submit(PROMPT, GREEDY, ())

    class Events(deque):
        """Empty, when another thread appends all results."""

        def __bool__(self) -> bool:
            if len(self) or generation.done:
                return len(self) > 0
            while engine.step():
                pass
            return False

    generation.events = Events()
    found = []
    while (event := engine.next_result(generation, locked=True)) is not None:
        if isinstance(event, Sampled):
            found.append(event.token)
    assert found == [*want, None]


@pytest.mark.parametrize(
    ("name", "after"),
    [("acquire", True), ("release", False), ("release", True), ("_wake_first", False)],
)
def test_an_interrupt_around_a_step_leaves_the_lock_free(path, name, after, monkeypatch):
    engine, found = windowed_model.make_engine(path, threads=1), []
    want = ids_of(answer(engine, PROMPT, GREEDY))
    generation = engine.submit(PROMPT, GREEDY, ())

    def consume() -> None:
        while (event := engine.next_result(generation)) is not None:
            if isinstance(event, Sampled):
                found.append(event.token)

    fail_once(monkeypatch, engine.lock, name, after)
    with pytest.raises(KeyboardInterrupt):
        consume()
    consume()
    assert found == [*want, None]


def test_pauses_between_calls_are_not_the_time_of_a_step(speculating, monkeypatch):
    """A step with drafts is launched before the caller gets the results of the last one."""
    engine, want = speculating
    clock, noted = [0.0], []

    def perf_counter() -> float:
        clock[0] += 1e-3
        return clock[0]

    monkeypatch.setattr(batcher, "time", SimpleNamespace(perf_counter=perf_counter))
    times = engine.batcher.speculation._times
    monkeypatch.setattr(times, "note", lambda rows, drafted, seconds: noted.append(seconds))
    generation, found = engine.submit(PROMPT, GREEDY, ()), []
    while not generation.done:
        engine.step()
        clock[0] += 100
    take(generation, found)
    assert ids_of(found) == want and len(noted) > 5 and min(noted) > 0 and max(noted) < 1


@pytest.mark.parametrize("prompts", [[5, 6, 7, 8], [[5, 6], [7, 8, 9]]])
def test_an_interrupted_profile_leaves_no_request(tmp_path, prompts, monkeypatch):
    llm = graphllm.load(tiny.write_tiny(tmp_path / "m.gguf", "llama"), device="cpu", threads=1)
    fail_once(monkeypatch, llm.engine.batcher, "_deliver")
    with pytest.raises(KeyboardInterrupt):
        llm.profile(prompts)
    assert not llm.engine.batcher.generations
    assert set(llm.engine.manager.held.values()) == {0}


def test_requests_go_on_without_a_draft_model_that_fails(tmp_path):
    """Its logits are not finite."""
    path = tiny.write_tiny(tmp_path / "m.gguf", "llama")
    weights = tiny.llama_weights(1)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 3e38)
    draft = tiny.write_llama(tmp_path / "draft.gguf", weights, "llama", "", 128)
    options = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}
    plain = graphllm.load(path, device="cpu", threads=1)
    llm = graphllm.load(path, draft=draft, speculate="3", device="cpu", threads=1, max_sequences=3)
    handles = [llm.submit([5, 6, 7 + i], **options) for i in range(3)]
    for index, handle in enumerate(handles):
        found = handle.result()
        assert found.ids == plain.generate([5, 6, 7 + index], **options).ids
        (note,) = found.notes
        assert "no more draft tokens" in note and "not finite" in note


def test_a_search_that_is_submitted_while_a_step_fails_begins_once(path, monkeypatch):
    engine = windowed_model.make_engine(path, threads=1)
    search = Sampling(beams=2, n=2, max_tokens=5, seed=0)
    want = answer(engine, PROMPT, search)

    class Submitted(deque):
        def append(self, each) -> None:
            engine.batcher._recover()  # another thread, whose step fails now
            super().append(each)
            engine.batcher._recover()

    engine.batcher._submitted = Submitted()
    engine.clear_cache()
    generation, found = engine.submit(PROMPT, search, ()), []
    while not generation.done:
        engine.step()
    take(generation, found)
    assert found == want


def test_an_interrupt_at_the_last_token_adds_none(path, monkeypatch):
    engine = windowed_model.make_engine(path, threads=1)
    settings = Sampling(temperature=0.0, max_tokens=12, seed=3)
    want = ids_of(answer(engine, PROMPT, settings))
    engine.clear_cache()
    generation = engine.submit(PROMPT, settings, ())
    fail_once(monkeypatch, Generation, "_finish")
    assert finish(engine, generation) == want and len(want) == 12


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize(
    ("name", "after"),
    [("text.push", False), ("text.push", True), ("matcher.push", True), ("module.Sampled", False),
     ("_notify", False), ("_notify", True)],
)  # fmt: skip
def test_an_interrupt_as_a_token_is_delivered_changes_no_answer(
    path, name, after, stop, monkeypatch
):
    """At each token in turn, the one that completes the stop string included."""
    engine = windowed_model.make_engine(path, threads=1)

    def begin(stop: tuple[str, ...] = ()) -> Generation:
        engine.clear_cache()
        settings = Sampling(temperature=0.0, max_tokens=6, seed=3, stop=stop)
        return engine.submit(PROMPT, settings, (), tokenizer=engine.tokenizer)

    def answered(generation: Generation) -> tuple[list[int], str, str]:
        while not generation.done:
            with suppress(KeyboardInterrupt):
                engine.step()
        events = [each for each in generation.events if isinstance(each, Sampled)]
        ids = [each.token for each in events if each.token is not None]
        return ids, "".join([each.text for each in events]), generation.finish_reason

    text = answered(begin())[1]
    stops = (text[len(text) // 2 :][:3],) if stop else ()
    want = answered(begin(stops))
    assert stop == (len(want[1]) < len(text))
    for at in range(len(want[0])):
        generation = begin(stops)
        while generation.count < at:
            engine.step()
        owners = {"text": generation._text, "matcher": generation._matcher, "module": generations}
        owner, _, attribute = name.rpartition(".")
        with monkeypatch.context() as patch:
            fail_once(patch, owners.get(owner, generation), attribute, after)
            assert answered(generation) == want, at
