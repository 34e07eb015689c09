"""Log-probabilities of sampled tokens and of prompts, against float64 log-softmax of the logits."""

from __future__ import annotations

import lazy_device
import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from windowed_model import IDS

import graphllm
from graphllm.engine.request import Completion, Sampling
from graphllm.errors import RequestError

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
        generation, done = engine.submit(IDS[:20], settings, ()), Completion()
        for _ in engine.stream(generation, done):
            pass
        found.append(done.logprobs)
        if backend == "lazy":
            assert engine.executor.devices["lazy"].begun == 2 + 11
    assert found[0] == found[1]
    logits = windowed_model.logits(engine, [*IDS[:20], *done.ids])[19:-1]
    check(done.logprobs, done.ids, logits, 2)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("name, value, why", [
    ("logprobs", 21, r"logprobs = 21 must be in 0\.\.20"),
    ("logprobs", -1, r"logprobs = -1 must be in 0\.\.20"),
    ("logprobs", True, "logprobs = True must be an integer"),
])  # fmt: skip
def test_bad_arguments(llm, name, value, why):
    with pytest.raises(RequestError, match=f"^{why}$"):
        llm.generate("hello", **{name: value})
