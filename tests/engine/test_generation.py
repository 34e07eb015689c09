"""Generation: penalties, stop conditions, several prompts, prefix reuse."""

from __future__ import annotations

import functools
from collections import Counter

import gguf
import numpy as np
import pytest
import tiny_models as tiny

import graphllm
from graphllm.engine.completion import Completion
from graphllm.engine.request import Sampling
from graphllm.engine.stop_conditions import StopStringMatcher
from graphllm.errors import RequestError
from graphllm.profiler.record import Recorder

PROMPT = "hello there, how are you"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("generation") / "tiny.gguf"
    return graphllm.load(tiny.write_llama(path, tiny.llama_weights()), kv_type="f32", strict=True)


def set_eos_ids(llm, monkeypatch, *ids):
    """Make these the model's EOS ids."""
    monkeypatch.setattr(llm.tokenizer, "eog_ids", frozenset(ids))


# --------------------------------------------------------------------------------------- penalties


def greedy_by_hand(llm, ids, count, repeat=1.0, presence=0.0, frequency=0.0, banned=(), least=0):
    """Return greedy tokens computed from plain logits with the formula of the penalties."""
    ids, sampled = list(ids), []
    for step in range(count):
        logits = llm.logits(ids, last=True).astype(np.float64)
        for token, times in Counter(ids[-64:]).items():
            logits[token] *= 1 / repeat if logits[token] > 0 else repeat
            logits[token] -= presence + times * frequency
        if step < least:
            logits[list(banned)] = -np.inf
        sampled.append(int(logits.argmax()))
        ids.append(sampled[-1])
    return sampled


@pytest.mark.parametrize(
    "penalties",
    [{"repeat": 1.3}, {"presence": 0.7}, {"frequency": 0.4}, {"repeat": 0.8, "frequency": -0.2}],
)
def test_penalties_follow_their_formula(llm, penalties):
    """Prompt and answer are longer than the 64 tokens that penalties apply to."""
    prompt = "and so on " * 8 + PROMPT
    ids = llm.encode(prompt)
    assert 45 < len(ids) < 64
    want = greedy_by_hand(llm, ids, 30, **penalties, banned=llm.tokenizer.eog_ids, least=30)
    named = {f"{name}_penalty": value for name, value in penalties.items()}
    assert llm.generate(prompt, max_tokens=30, **GREEDY, **named).ids == want
    assert llm.generate(prompt, max_tokens=30, **GREEDY).ids != want


def test_neutral_penalties_change_nothing(llm):
    """The plan with penalties samples the same tokens as the plan without, if all are off."""
    ask = {"max_tokens": 20, "temperature": 0.9, "seed": 5}
    plain = Completion()
    for _ in llm.complete(PROMPT, Sampling(**ask), plain, eos_ids=()):
        pass
    least = Completion()
    for _ in llm.complete(PROMPT, Sampling(**ask, min_tokens=1), least, eos_ids=()):
        pass
    assert plain.ids == least.ids


def test_a_seed_repeats_with_penalties(llm):
    ask = {"max_tokens": 20, "repeat_penalty": 1.2, "frequency_penalty": 0.1}
    a, b, c = (llm.generate(PROMPT, seed=seed, **ask).ids for seed in (3, 3, 4))
    assert a == b != c


def test_reference_and_cpu_sample_the_same(llm):
    ask = {"max_tokens": 12, "temperature": 0.7, "seed": 11, "presence_penalty": 0.5}
    other = graphllm.load(llm.file.path, device="reference")
    assert other.generate(PROMPT, **ask).ids == llm.generate(PROMPT, **ask).ids


# -------------------------------------------------------------------------------------------- ends


def test_min_tokens_and_ignore_eos_forbid_eos(llm, monkeypatch):
    ids = llm.encode(PROMPT)
    first = greedy_by_hand(llm, ids, 1)[0]
    set_eos_ids(llm, monkeypatch, first)
    assert llm.generate(PROMPT, temperature=0).ids == []
    assert llm.generate(PROMPT, temperature=0).finish_reason == "stop"
    done = llm.generate(PROMPT, temperature=0, max_tokens=5, min_tokens=3)
    want = greedy_by_hand(llm, ids, 5, banned=[first], least=3)
    assert done.ids == (want[: want.index(first)] if first in want else want)
    assert len(done.ids) >= 3
    never = llm.generate(PROMPT, max_tokens=40, ignore_eos=True, temperature=2.0, top_k=0, top_p=1)
    assert len(never.ids) == 40 and first not in never.ids


def test_stop_ids_end_an_answer_after_min_tokens(llm):
    free = llm.generate(PROMPT, max_tokens=8, **GREEDY).ids
    at = free.index(free[4])
    done = llm.generate(PROMPT, max_tokens=8, **GREEDY, stop_ids=[free[4]])
    assert done.ids == free[:at] and done.finish_reason == "stop"
    done = llm.generate(PROMPT, max_tokens=8, **GREEDY, stop_ids=[free[4]], min_tokens=8)
    assert done.ids == free and done.finish_reason == "length"


def test_a_full_context_ends_an_answer(llm):
    small = graphllm.load(llm.file.path, context=24)
    done = small.generate(PROMPT, max_tokens=64, **GREEDY)
    assert done.finish_reason == "length"
    assert done.notes == ["the context of 24 tokens is full: the answer is cut off"]
    assert small.generate(PROMPT, max_tokens=1, **GREEDY).notes == []
    assert len(done.prompt_ids) + len(done.ids) == 25  # the last token is not in the cache
    with pytest.raises(RequestError, match="tokens, the context holds 24"):
        small.generate(PROMPT * 3)


# ------------------------------------------------------------------------------------- stop texts


def match(stops, pieces):
    """Return the emitted text, and whether a stop string matched."""
    texts, out = StopStringMatcher(stops), ""
    for piece in pieces:
        out += texts.push(piece)
        if texts.matched:
            return out, True
    return out + texts.finish(), False


@pytest.mark.parametrize(
    ("stops", "text", "want"),
    [
        (["END"], "so it ENDs here", "so it "),
        (["END"], "so it EN", None),
        (["aab"], "aaaab", "aa"),
        (["\n\n", "x"], "one\ntwo\n\nx", "one\ntwo"),
        (["abcd", "c"], "zabcd", "zab"),  # "c" ends first, however the text is split
        (["bc", "abc"], "zabcd", "z"),
        (["ß…"], "straß…e", "stra"),
        ([], "all of it", None),
    ],
)
def test_stop_strings_at_every_split(stops, text, want):
    expected = (text, False) if want is None else (want, True)
    for first in range(len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            assert match(stops, pieces) == expected, pieces
    assert match(stops, text) == expected


def test_a_possible_stop_string_is_held_back():
    texts = StopStringMatcher(["<end>"])
    assert [texts.push(c) for c in "a<e<en"] == ["a", "", "", "<e", "", ""]
    assert texts.finish() == "<en"


def test_a_stop_string_across_tokens(llm):
    free = llm.generate(PROMPT, max_tokens=24, **GREEDY)
    parts = [llm.tokenizer.decode([i], continuation=True) for i in free.ids]
    at = next(i for i in range(2, 20) if len(parts[i]) > 1 and len(parts[i + 1]) > 1)
    stop = parts[at][1:] + parts[at + 1][:1]
    done = llm.generate(PROMPT, max_tokens=24, **GREEDY, stop=[stop, "never there"])
    assert done.text == free.text[: free.text.index(stop)] and done.finish_reason == "stop"
    assert len(done.ids) <= at + 2
    streamed = "".join(llm.stream(PROMPT, max_tokens=24, **GREEDY, stop=stop))
    assert streamed == done.text
    late = llm.generate(PROMPT, max_tokens=24, **GREEDY, stop=stop, min_tokens=24)
    assert late.text == free.text


# ---------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"repeat_penalty": 0.0}, "repeat_penalty = 0.0 must be in [0.01, 100]"),
        ({"presence_penalty": float("nan")}, "presence_penalty = nan must be a finite number"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty = inf must be a finite number"),
        ({"min_tokens": -1}, "min_tokens = -1 must be in"),
        ({"stop": [""]}, "must be non-empty strings"),
        ({"stop_ids": [-3]}, "must be token ids"),
        ({"stop_ids": [10**6]}, "token id 1000000 is not in 0.."),
        ({"max_tokens": -1}, "max_tokens = -1 must be at least 0"),
    ],
)
def test_invalid_requests(llm, bad, message):
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, **bad)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_split_gguf_file(llm, tmp_path, monkeypatch):
    """A model split by the `gguf` package gives the same tokens as one file."""
    split = functools.partial(gguf.GGUFWriter, split_max_tensors=12)
    monkeypatch.setattr(gguf, "GGUFWriter", split)
    tiny.write_llama(tmp_path / "m.gguf", tiny.llama_weights())
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    whole = graphllm.load(parts[0], kv_type="f32")
    assert whole.generate(PROMPT, max_tokens=8, **GREEDY).ids == (
        llm.generate(PROMPT, max_tokens=8, **GREEDY).ids
    )


def test_several_prompts_one_after_another(llm):
    texts = ["hello", "what is", "hello"]
    together = llm.generate(texts, max_tokens=6, **GREEDY)
    assert [d.text for d in together] == [
        llm.generate(t, max_tokens=6, **GREEDY).text for t in texts
    ]


def test_only_new_tokens_are_computed_and_counted(llm):
    """Timings and profile rows agree on the number of computed tokens."""
    ids = llm.encode(PROMPT)
    llm.engine.clear_cache()
    ask = Sampling(max_tokens=2, temperature=0.0)
    first, again = Completion(), Completion()
    for _ in llm.complete(ids, ask, first, eos_ids=()):
        pass
    assert first.timings.prefill_tokens == len(ids) and first.cached_tokens == 0
    phases = Recorder(), Recorder()
    longer = [*ids, 7, 8, 9]
    for _ in llm.complete(longer, ask, again, profile=phases, eos_ids=()):
        pass
    assert again.timings.prefill_tokens == 3 and again.cached_tokens == len(ids)
    shapes = {row.shape for row in phases[0].rows if row.scope.endswith("gate_proj")}
    assert shapes == {f"f32[3,{tiny.HIDDEN}]"}
    llm.engine.clear_cache()
    fresh = Completion()
    for _ in llm.complete(longer, ask, fresh, eos_ids=()):
        pass
    assert fresh.ids == again.ids


@pytest.mark.parametrize("bad", [{"top_k": 2**31}, {"temperature": 1e300}, {"max_tokens": 1.5},
                                 {"temperature": "1"}, {"repeat_penalty": 1e39}])  # fmt: skip
def test_values_out_of_range_of_the_kernels(llm, bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        llm.generate("hello", **bad)
