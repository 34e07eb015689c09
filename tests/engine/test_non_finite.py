"""NaN and infinity in weights: reported at load, or instead of a token.

`plant_faults.py` plants them in every kind of tensor of every model; these are some of its cases.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import plant_faults
import pytest
import tiny_models

import graphllm
from graphllm.engine import finite_check
from graphllm.engine.completion import Completion
from graphllm.engine.request import Sampling
from graphllm.errors import ModelFileError, NumericError

PROMPT = "hello there"


def planted(path, name, value, at=(5, 3), **weights):
    """Write a tiny llama with one non-finite value."""
    own = tiny_models.llama_weights(**weights)
    own[name][at] = value
    return tiny_models.write_llama(path, own, "qwen2" if weights.get("bias") else "llama")


def generate(*args):
    command = [sys.executable, "-m", "graphllm", "run", *map(str, args), "-p", PROMPT, "-n", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_nan_in_a_norm_is_reported_at_load(tmp_path):
    path = planted(tmp_path / "m.gguf", "model.norm.weight", np.nan, 7)
    code, error = generate(path)
    assert code == 1
    assert error == "error: tensor 'model.norm.weight': element 7 of 60 is NaN\n"


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_first_op_with_nan_is_reported(tmp_path, device):
    path = planted(tmp_path / "m.gguf", "model.layers.1.mlp.up_proj.weight", np.nan)
    code, error = generate(path, "--device", device, "--temp", "0.8")
    assert code == 1 and error.count("\n") == 1
    assert "the logits of position" in error
    assert f"model.layers.1.mlp.up_proj (linear on {device}) gives NaN at position 0" in error


SETTINGS = [
    {"temperature": 0},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 3, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "repeat_penalty": 1.3, "presence_penalty": 0.5},
]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_sampling_settings_report_it(tmp_path, value):
    weight = "model.layers.2.self_attn.v_proj.weight"
    llm = graphllm.load(planted(tmp_path / "m.gguf", weight, value))
    for settings in SETTINGS:
        with pytest.raises(NumericError, match=r"layers\.2\.self_attn\.v_proj \(linear on"):
            llm.generate(PROMPT, **settings)


def test_nan_after_some_tokens(tmp_path):
    """The embedding of a token sampled later has NaN: earlier tokens are still returned."""
    prompt, sampling = [5, 17], Sampling(temperature=0, ignore_eos=True, max_tokens=8)
    sound = tiny_models.write_llama(tmp_path / "a.gguf", tiny_models.llama_weights())
    list(graphllm.load(sound).complete(prompt, sampling, want := Completion()))
    new = [i for i, token in enumerate(want.ids) if token not in [*prompt, *want.ids[:i]]]
    at = max(i for i in new if i < 6)  # so that its successors are never sampled
    assert at > 0
    path = planted(tmp_path / "b.gguf", "model.embed_tokens.weight", np.nan, (want.ids[at], 9))
    done = Completion()
    with pytest.raises(NumericError) as caught:
        list(graphllm.load(path).complete(prompt, sampling, done))
    assert done.ids == want.ids[: at + 1]
    position = len(prompt) + at
    assert f"the logits of position {position} are not finite" in str(caught.value)
    assert f"embed_tokens (embedding on cpu) gives NaN at position {position}" in str(caught.value)


def test_the_cache_is_cleared_after_nan(tmp_path):
    """A later prompt without that token has the same logits as in a fresh model."""
    path = planted(tmp_path / "m.gguf", "model.embed_tokens.weight", np.nan, (42, 9))
    fresh, used = graphllm.load(path), graphllm.load(path)
    with pytest.raises(NumericError):
        next(used.engine.generate([5, 42] * 30, Sampling(), []))
    ids = [5, 17, 23]
    assert used.logits(ids).tolist() == fresh.logits(ids).tolist()


def test_coarse_to_fine_search_finds_the_same_op(tmp_path, monkeypatch):
    weight = "model.layers.1.self_attn.o_proj.weight"
    llm = graphllm.load(planted(tmp_path / "m.gguf", weight, np.nan), context=64)
    ids = list(itertools.islice(itertools.cycle([5, 17, 23]), 20))
    at_once = finite_check.find_non_finite(llm.engine, ids)
    assert at_once == finite_check.NonFiniteValue("linear", weight[:-7], "cpu", 0, at_once.value)
    for nbytes in (1, 20_000, 100_000):
        monkeypatch.setattr(finite_check, "MAX_STEP_BYTES", nbytes)
        assert str(finite_check.find_non_finite(llm.engine, ids)) == str(at_once)


def test_a_finite_model_has_no_finding(tmp_path):
    path = tiny_models.write_llama(tmp_path / "m.gguf", tiny_models.llama_weights())
    assert finite_check.find_non_finite(graphllm.load(path).engine, [5, 17, 23]) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "input_layernorm.weight"])
def test_vectors_are_checked_at_load(tmp_path, name, value):
    path = planted(tmp_path / "m.gguf", f"model.layers.2.{name}", value, 11, bias=True)
    shown = str(np.float32(value)).replace("nan", "NaN")
    for device in ("cpu", "reference"):
        with pytest.raises(ModelFileError, match=rf"{name}': element 11 of 60 is {shown}$"):
            graphllm.load(path, device=device)


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpt_oss", "q4_k"])
def test_planted_faults(name):
    """Run every 19th case of plant_faults.py."""
    found = list(plant_faults.cases(name, "cpu", every=19))
    assert len(found) > 3 and not [case for case in found if case[2]]
