"""Custom logits processors: their place among the samplers, and their failures."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from request_runs import collect
from windowed_model import IDS

import graphllm
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError
from graphllm.model import batch

SETTINGS = {"temperature": 0.9, "seed": 4, "ignore_eos": True, "max_tokens": 6}
PROMPT = IDS[:9]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("processors") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=1, max_sequences=5)


def favour_7(ids, logits):
    logits[7] += np.float32(4)
    return logits


def fail(ids, logits):
    raise ValueError("no\nmore")


# ------------------------------------------------------------------------------------------ results


def test_a_processor_equals_the_bias_that_it_adds(llm):
    """With every filter on, and log-probabilities, which are those before any change."""
    more = {"top_k": 30, "typical_p": 0.98, "logprobs": 2, **SETTINGS}
    want = llm.generate(PROMPT, logit_bias={7: 4.0}, **more)
    have = llm.generate(PROMPT, processors=[favour_7], **more)
    assert have.ids == want.ids and 7 in have.ids
    assert have.logprobs == want.logprobs
    same = llm.generate(PROMPT, processors=[lambda ids, logits: logits.astype(np.float64)], **more)
    assert same.ids == llm.generate(PROMPT, **more).ids


def test_logits_after_biases_and_penalties(llm):
    """A processor gets all ids so far, and the logits before the filters; the next one its own."""
    calls = []

    def look(ids, logits):
        calls.append((ids, logits.copy()))
        return favour_7(ids, logits)

    def look_again(ids, logits):
        calls.append((ids, logits))
        ids.clear()  # a copy
        return logits

    done = llm.generate(
        PROMPT, processors=[look, look_again], logit_bias={9: 1.5}, repeat_penalty=1.5, top_k=2,
        **SETTINGS,
    )  # fmt: skip
    raw = llm.logits([*PROMPT, *done.ids])[len(PROMPT) - 1 :]
    assert len(calls) == 2 * len(done.ids)
    for count, ((ids, have), (_, after)) in enumerate(zip(calls[::2], calls[1::2])):
        assert ids == [*PROMPT, *done.ids[:count]]
        want = raw[count].copy()
        want[9] += 1.5
        want[2] = -np.inf  # EOS
        seen = sorted(set(ids))
        want[seen] = np.where(want[seen] > 0, want[seen] / 1.5, want[seen] * 1.5)
        np.testing.assert_allclose(have, want, atol=1e-4)
        np.testing.assert_array_equal(after[7], have[7] + np.float32(4))


def test_other_requests_of_the_batch_are_not_changed(tmp_path, monkeypatch):
    """Rows with and without processors, more of them than one plan samples."""
    monkeypatch.setattr(batch, "MAX_LOGITS_BYTES", 4 * 400 * 2)  # two rows
    path = windowed_model.windowed(tmp_path)
    settings = [
        Sampling(temperature=0.9, seed=i, max_tokens=6, logprobs=1 if i == 3 else None,
                 processors=[favour_7] if i % 2 else (), repeat_penalty=1.2 if i > 3 else 1.0)
        for i in range(6)
    ]  # fmt: skip
    engine = windowed_model.make_engine(path)
    want = [collect(engine, {0: engine.submit(PROMPT, each, ())})[0] for each in settings]
    engine = windowed_model.make_engine(path, sequences=5)
    live = {i: engine.submit(PROMPT, each, ()) for i, each in enumerate(settings)}
    assert list(collect(engine, live).values()) == want


def test_forced_ids(llm):
    """The answer begins with them, and goes on as after a prompt that ends with them."""
    forced, greedy = [60, 11, 60], {**SETTINGS, "temperature": 0.0}
    have = llm.generate(
        PROMPT, forced_ids=forced, banned_ids=[60], logprobs=0, repeat_penalty=1.2, **greedy
    )
    rest = llm.generate(
        [*PROMPT, *forced], banned_ids=[60], repeat_penalty=1.2, **{**greedy, "max_tokens": 3}
    )
    assert have.ids == [*forced, *rest.ids]
    logits = llm.logits([*PROMPT, *forced])[len(PROMPT) - 1 : -1].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    found = [each.logprob for each in have.logprobs[:3]]
    np.testing.assert_allclose(found, want[range(3), forced], atol=1e-4)
    done = llm.generate(PROMPT, forced_ids=[60, 2, 60], processors=[favour_7], **SETTINGS)
    assert done.ids == [60] and done.finish_reason == "stop"  # 2 is EOS
    assert llm.generate(PROMPT, forced_ids=[60, 61], **{**SETTINGS, "max_tokens": 1}).ids == [60]
    with pytest.raises(RequestError, match="token id 400"):
        llm.generate(PROMPT, forced_ids=[400])


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("processor, why", [
    (fail, "fail raised ValueError: no more"),
    (lambda ids, logits: None, "<lambda> returned None, not an array of numbers"),
    (lambda ids, logits: logits > 0, r"<lambda> returned \[.*, not an array of numbers"),
    (lambda ids, logits: logits[:3], r"<lambda> returned the shape \(3,\), not \(400,\)"),
    (lambda ids, logits: logits * np.nan, "<lambda> returned NaN, from which no token can be .*"),
    (lambda ids, logits: np.full(400, np.inf), "<lambda> returned inf, from which no token .*"),
    (lambda ids, logits: logits - np.inf, "<lambda> returned -inf for all ids, from which no .*"),
    (np.linalg.norm, "norm raised ValueError: The truth value .*"),
])  # fmt: skip
def test_a_processor_that_fails_ends_its_request_alone(llm, processor, why):
    want = llm.generate(PROMPT, **SETTINGS).ids
    other = llm.submit(PROMPT, **SETTINGS)
    with pytest.raises(RequestError, match=f"^the logits processor {why}$"):
        llm.generate(PROMPT, processors=[favour_7, processor], **SETTINGS)
    assert other.result().ids == want
    assert set(llm.engine.manager.held.values()) == {0} and not llm.engine.batcher.generations


def test_a_processor_cannot_begin_a_request(llm):
    with pytest.raises(RequestError, match="cannot begin another request on the same model"):
        llm.generate(PROMPT, processors=[lambda ids, x: llm.generate("a")], **SETTINGS)


def test_an_interrupt_reaches_the_caller(tmp_path):
    """The request, and the others, go on with what they had."""
    engine = windowed_model.make_engine(windowed_model.windowed(tmp_path), sequences=2)
    raising = []

    def interrupted(ids, logits):
        if raising:
            raise raising.pop()
        return favour_7(ids, logits)

    plain = Sampling(temperature=0.9, seed=1, max_tokens=6)
    settings = Sampling(temperature=0.9, seed=4, max_tokens=6, processors=[interrupted])
    first = collect(engine, {0: engine.submit(PROMPT, settings, ())})[0]
    second = collect(engine, {0: engine.submit(PROMPT, plain, ())})[0]
    live = {0: engine.submit(PROMPT, settings, ()), 1: engine.submit(PROMPT, plain, ())}
    for _ in range(3):
        engine.step()
        raising.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert list(collect(engine, live).values()) == [first, second]


@pytest.mark.parametrize("value", [favour_7, [favour_7, 3], "favour_7"])
def test_bad_arguments(llm, value):
    with pytest.raises(RequestError, match=r"^processors = .* must be a list of functions$"):
        llm.generate(PROMPT, processors=value)
