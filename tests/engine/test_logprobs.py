"""Log-probabilities of sampled tokens and of prompts, against float64 log-softmax of the logits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import lazy_device
import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from windowed_model import IDS

import graphllm
from graphllm.engine.completion import Completion, Sampled
from graphllm.engine.request import Sampling
from graphllm.engine.step_result import TokenLogprobs
from graphllm.errors import RequestError
from graphllm.model import batch

SETTINGS = {"temperature": 0.9, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny.write_tiny(tmp_path_factory.mktemp("logprobs") / "tiny.gguf", "llama")
    return graphllm.load(path, device="cpu", threads=1, max_sequences=4)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(found, ids, logits, count) -> None:
    """Compare log-probabilities of ``ids`` with the logits [len(ids), vocab] before them."""
    want = log_softmax(logits)
    assert [each.id for each in found] == list(ids)
    for each, row in zip(found, want, strict=True):
        assert each.logprob == pytest.approx(row[each.id], abs=1e-4)
        top = np.argsort(-row, kind="stable")[:count]
        assert [i for i, _ in each.top] == top.tolist()
        np.testing.assert_allclose([x for _, x in each.top], row[top], atol=1e-4)


def complete(engine, ids, settings) -> Completion:
    """Run a request to its end."""
    generation, done = engine.submit(ids, settings, ()), Completion(ids)
    while (event := engine.next_result(generation)) is not None:
        if isinstance(event, Sampled):
            generation.record([event], done)
    return done


# ----------------------------------------------------------------------------------- sampled tokens


@pytest.mark.parametrize("penalties", [{}, {"repeat_penalty": 1.5, "logit_bias": {7: 4.0}}])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_sampled_tokens(llm, count, penalties):
    """They are those of the model, whatever settings sample the tokens."""
    prompt = IDS[:9]
    done = llm.generate(prompt, max_tokens=6, logprobs=count, **SETTINGS, **penalties)
    assert done.ids == llm.generate(prompt, max_tokens=6, **SETTINGS, **penalties).ids
    logits = llm.logits([*prompt, *done.ids])[len(prompt) - 1 : -1]
    check(done.logprobs, done.ids, logits, count)
    assert done.as_dict()["logprobs"][2]["id"] == done.ids[2]
    assert "logprobs" not in llm.generate(prompt, max_tokens=1).as_dict()


def test_a_device_that_runs_ahead(tmp_path, monkeypatch):
    """The outputs of a step are those of that step, although the next one was launched."""
    lazy_device.install(monkeypatch)
    path = windowed_model.windowed(tmp_path)
    settings = Sampling(temperature=0.8, seed=2, max_tokens=12, logprobs=2)
    found = []
    for backend in ("lazy", "reference"):
        engine = windowed_model.make_engine(path, backends=(backend,))
        done = complete(engine, IDS[:20], settings)
        found.append(done.logprobs)
        if backend == "lazy":
            assert engine.executor.devices["lazy"].begun == 2 + 11
    assert found[0] == found[1]
    logits = windowed_model.logits(engine, [*IDS[:20], *done.ids])[19:-1]
    check(done.logprobs, done.ids, logits, 2)


def test_json_has_no_infinity():
    entry = TokenLogprobs(5, -np.inf, ((7, -0.5), (8, np.nan)))
    top = [{"id": 7, "logprob": -0.5}, {"id": 8, "logprob": None}]
    assert entry.as_dict() == {"id": 5, "logprob": None, "top": top}


# ----------------------------------------------------------------------------- tokens of the prompt


@pytest.mark.parametrize("rows", [64 << 20, 7 * 4 * 400], ids=["one plan", "seven rows"])
def test_tokens_of_a_prompt(tmp_path, monkeypatch, rows):
    """Each one after the first, in several chunks and rows of logits, although it is cached."""
    monkeypatch.setattr(batch, "MAX_LOGITS_BYTES", rows)
    engine = windowed_model.make_engine(windowed_model.windowed(tmp_path))
    settings = Sampling(temperature=0.0, seed=0, max_tokens=4, prompt_logprobs=3)
    want = windowed_model.logits(engine, IDS[:45])[:-1]
    plain = windowed_model.generate_ids(engine, IDS[:45], 4)
    for length, more in ((45, {}), (45, {"logprobs": 1}), (1, {}), (2, {"max_tokens": 0})):
        done = complete(engine, IDS[:length], replace(settings, **more))
        check(done.prompt_logprobs, IDS[1:length], want[: length - 1], 3)
        assert done.cached_tokens == 0 and len(done.ids) == more.get("max_tokens", 4)
        assert length < 45 or done.ids == plain
        assert len(done.logprobs) == (4 if more.get("logprobs") else 0)


def test_a_prompt_is_only_evaluated(llm):
    """``max_tokens`` = 0, as a benchmark that ranks answers asks for."""
    done = llm.generate([5, 6, 7, 8], max_tokens=0, prompt_logprobs=0)
    assert [each.id for each in done.prompt_logprobs] == [6, 7, 8] and not done.ids
    assert done.finish_reason == "length" and len(done.as_dict()["prompt_logprobs"]) == 3
    check(done.prompt_logprobs, [6, 7, 8], llm.logits([5, 6, 7, 8])[:-1], 0)


# ---------------------------------------------------------------------------- samples of one prompt


def test_several_samples(llm):
    """The first is that of n = 1; the others have noise of their own, and share its blocks."""
    prompt = IDS[:100]
    one = llm.generate(prompt, max_tokens=8, **SETTINGS)
    llm.engine.clear_cache()
    done = llm.generate(prompt, max_tokens=8, n=6, logprobs=1, prompt_logprobs=0, **SETTINGS)
    assert done.ids == one.ids and len(done.choices) == 6 and done.choices[0] is done
    assert len({tuple(each.ids) for each in done.choices}) > 3
    assert {each.seed for each in done.choices} == {SETTINGS["seed"]}
    cached = [each.cached_tokens for each in done.choices]
    assert cached[0] == 0 and min(cached[1:]) == 64  # a full block
    assert [len(each.prompt_logprobs) for each in done.choices] == [99, 0, 0, 0, 0, 0]
    assert all(len(each.logprobs) == 8 for each in done.choices)
    again = llm.submit(prompt, max_tokens=8, n=6, **SETTINGS).result()
    assert [each.ids for each in again.choices] == [each.ids for each in done.choices]
    assert len(again.as_dict()["alternatives"]) == 5
    awaited = asyncio.run(graphllm.AsyncLLM(llm).generate(prompt, max_tokens=8, n=6, **SETTINGS))
    assert [each.ids for each in awaited.choices] == [each.ids for each in done.choices]
    two = llm.generate([prompt, "hello"], max_tokens=8, n=2, **SETTINGS)
    assert [each.ids for each in two[0].choices] == [each.ids for each in done.choices[:2]]


def test_the_samples_of_a_prompt_follow_the_distribution(llm):
    """First tokens of 400 samples, against the probabilities: chi-squared below its 0.1 % point."""
    prompt, n = IDS[:5], 400
    settings = {"temperature": 1.0, "top_k": 4, "top_p": 1.0, "seed": 11, "ignore_eos": True}
    done = llm.generate(prompt, max_tokens=1, n=n, **settings)
    row = log_softmax(llm.logits(prompt, last=True))
    top = np.argsort(-row)[:4]
    want = n * np.exp(row[top]) / np.exp(row[top]).sum()
    have = [sum(each.ids == [i] for each in done.choices) for i in top]
    assert sum(have) == n
    assert np.sum((have - want) ** 2 / want) < 16.3  # 3 degrees of freedom


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name, value, why", [
    ("logprobs", 21, r"logprobs = 21 must be in 0\.\.20"),
    ("logprobs", -1, r"logprobs = -1 must be in 0\.\.20"),
    ("logprobs", True, "logprobs = True must be an integer"),
    ("prompt_logprobs", 21, r"prompt_logprobs = 21 must be in 0\.\.20"),
    ("n", 0, r"n = 0 must be in 1\.\.1024"),
    ("n", 1025, r"n = 1025 must be in 1\.\.1024"),
    ("n", 1.5, r"n = 1\.5 must be an integer"),
])  # fmt: skip
def test_bad_arguments(llm, name, value, why):
    with pytest.raises(RequestError, match=f"^{why}$"):
        llm.generate("hello", **{name: value})


def test_streams_have_one_sample(llm):
    calls = {
        "stream": lambda: llm.stream("hello", n=2),
        "stream ": lambda: graphllm.AsyncLLM(llm).stream("hello", n=2),
        "complete": lambda: llm.complete("hello", Sampling(n=2), Completion()),
    }
    for name, call in calls.items():
        with pytest.raises(
            RequestError, match=f"^llm.{name.strip()} yields the text of one sample, not"
        ):
            call()
