"""Structured output: answers match their grammar, and nothing else about a request changes."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiny_models as tiny
import windowed_model
from request_runs import collect, submit

import graphllm
from graphllm.engine import grammar
from graphllm.engine.request import Sampling
from graphllm.errors import RequestError

pytest.importorskip("llguidance")

SETTINGS = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "max_tokens": 400}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    path = tiny.write_tiny(tmp_path_factory.mktemp("grammar") / "tiny.gguf", "llama", context=512)
    return graphllm.load(path, device="cpu", threads=1, max_sequences=4)


# ------------------------------------------------------------------------------------------ results


def test_answers_match(llm):
    """Each kind of grammar, samples of one prompt, and other settings that change logits."""
    done = llm.generate("hello", json_schema=PERSON, n=6, seed=3, **SETTINGS)
    for each in done.choices:
        found = json.loads(each.text)
        assert each.finish_reason == "stop" and found.keys() == PERSON["properties"].keys()
        assert len(found["name"]) <= 9 and 0 <= found["age"] <= 150 and found["kind"] in "fox dog"
        assert llm.tokenizer.eos_id not in each.ids
    assert len({each.text for each in done.choices}) == 6
    first = llm.generate("hello", json_schema=json.dumps(PERSON), seed=3, **SETTINGS)
    assert first.ids == done.ids
    more = {"repeat_penalty": 1.3, "typical_p": 0.9, "processors": [lambda ids, logits: logits],
            "logprobs": 2, "logit_bias": {368: 3.0}}  # fmt: skip
    for given in ({}, *({name: value} for name, value in more.items()), more):
        done = llm.generate("hello", regex="[a-f]{2,}[0-9]", seed=4, **SETTINGS | given)
        assert re.fullmatch("[a-f]{2,}[0-9]", done.text) and done.finish_reason == "stop"
    done = llm.generate("hello", grammar='start: "a" (" and " "b")~2', **SETTINGS)
    assert done.text == "a and b and b"
    cut = llm.generate("hello", regex="[a-f]{20}", seed=4, stop="b", **SETTINGS | {"max_tokens": 9})
    assert set(cut.text) <= set("acdef") and cut.finish_reason in ("stop", "length")


@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1, "top_k": 50},
                                  {"temperature": 0.0}, {"repeat_penalty": 2.0},
                                  {"typical_p": 0.7}])  # fmt: skip
def test_masks_equal_those_of_all_texts(llm, more):
    """A finite language, each of whose texts is known: a processor excludes every other token."""
    texts = {"".join(each) for n in (1, 2, 3) for each in itertools.product("abde ", repeat=n)}
    beginnings = {text[:n] for text in texts for n in range(4)}
    tokenizer, prompt = llm.tokenizer, llm.encode("hello")
    pieces = [tokenizer.decode([token], continuation=True) for token in range(400)]

    def only_texts(ids, logits):
        text = tokenizer.decode(ids[len(prompt) :], continuation=True)
        for token, piece in enumerate(pieces):
            ends = token == tokenizer.eos_id and text in texts
            if not ends and not (piece and text + piece in beginnings):
                logits[token] = -np.inf
        return logits

    for seed in range(6):
        own = SETTINGS | more | {"seed": seed}
        want = llm.generate(prompt, processors=[only_texts], **own).text
        assert llm.generate(prompt, regex="[abde ]{1,3}", **own).text == want[:3]


def test_streams_run_beside_others(llm):
    """Requests with and without a grammar, whose pieces of text come as they are sampled."""
    asks = [{"seed": i, **SETTINGS, **({"json_schema": PERSON} if i % 2 else {"max_tokens": 30})}
            for i in range(8)]  # fmt: skip
    want = [llm.generate("hello", **ask).text for ask in asks]
    pieces = [list[str]() for _ in asks]
    for index, text in llm.stream(["hello"] * 8, sampling=asks):
        pieces[index].append(text)
    assert ["".join(each) for each in pieces] == want
    assert all(len(each) > 9 for each in pieces)


def test_an_interrupted_step_loses_no_token(tmp_path, monkeypatch):
    """Neither before nor after the grammar has consumed the token."""
    follow, raising = grammar.GrammarState.follow, list[str]()

    def interrupted(state, sequence):
        delivers = sequence.prompt_tokens + state._consumed < len(sequence.tokens)
        if delivers and raising == ["before"]:
            raise KeyboardInterrupt(raising.pop())
        found = follow(state, sequence)
        if delivers and raising == ["after"]:
            raise KeyboardInterrupt(raising.pop())
        return found

    monkeypatch.setattr(grammar.GrammarState, "follow", interrupted)
    engine = windowed_model.make_engine(windowed_model.windowed(tmp_path))
    settings = Sampling(temperature=1.2, top_k=0, seed=3, regex="([a-c][d-f]){5}")
    want = collect(engine, {0: submit(engine, [5, 6], settings)})[0]
    generation = submit(engine, [5, 6], settings)
    for when in ("before", "after", "before", "after"):
        raising.append(when)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.step()
    assert collect(engine, {0: generation})[0] == want


# ----------------------------------------------------------------------------------------- failures

DEEP = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
WIDE = {"allOf": [{"anyOf": [{"properties": {f"{a}{i}": {"type": kind}}} for a, kind in
                             (("p", "integer"), ("q", "string"))]} for i in range(20)]}  # fmt: skip


@pytest.mark.parametrize("given, why", [
    ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 3}},
     "is greater than maxLength"),
    ({"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable schema"),
    ({"json_schema": {"$ref": "#"}}, "no text matches it"),
    ({"json_schema": {"type": "strin"}}, "Invalid type"),
    ({"json_schema": {"$ref": "http://example.com/a.json"}}, "not present in a registry"),
    ({"json_schema": {"uniqueItems": True, "type": "array"}}, "Unimplemented keys"),
    ({"json_schema": WIDE}, "schema too large"),
    ({"json_schema": DEEP}, "recursion limit exceeded"),
    ({"json_schema": {"enum": ["a" * 1000] * 200}}, "json_schema has .* characters, more than"),
    ({"json_schema": "{"}, "must be a JSON schema: a mapping, or its JSON text"),
    ({"json_schema": [1]}, "must be a JSON schema"),
    ({"json_schema": {"a": float("nan")}}, "must be a JSON schema"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"[^\s\S]"}, "no text matches it"),
    ({"regex": 3}, "regex = 3 must be a non-empty string"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"grammar": 'start: "a"', "regex": "a"}, "regex cannot be combined with grammar"),
    ({"regex": "a", "forced_ids": [5]}, "regex cannot be combined with forced_ids"),
    ({"regex": "a+", "beams": 2, "top_k": 0}, "regex = .* beam search .* has no use for it"),
    ({"regex": "(a{1000}){1000}"}, "cannot go on: lexer error"),  # within a second
    ({"regex": "3+", "banned_ids": [275, 322, 378, *range(51, 61)]}, "no token is left: the gramm"),
    ({"regex": "ab", "processors": [lambda ids, x: np.eye(400)[370] * 99]}, "cannot go on"),
])  # fmt: skip
def test_bad_grammars_end_their_request_alone(llm, given, why):
    ask = {"seed": 1, "max_tokens": 20}
    want = llm.generate("hello", **ask).ids
    other = llm.submit("hello", **ask)
    with pytest.raises(RequestError, match=why) as found:
        llm.generate("hello", **given)
    assert "\n" not in str(found.value) and len(str(found.value)) < 600
    assert other.result().ids == want
    assert set(llm.engine.manager.held.values()) == {0} and not llm.engine.batcher.generations


def test_requests_share_the_compilation_of_a_grammar(llm, monkeypatch):
    """Also those that come while it is compiled."""
    vocabulary, compiled = grammar.prepare(llm.tokenizer), []
    compiling, waiting, may_end = threading.Lock(), threading.Event(), threading.Event()

    class Compiling:
        """The lock of compilations, for which the second request waits."""

        def __enter__(self) -> None:
            if not compiling.acquire(blocking=False):
                waiting.set()
                compiling.acquire()

        def __exit__(self, *error: object) -> None:
            compiling.release()

    def compile_grammar(wanted: grammar.Grammar) -> str:
        compiled.append(wanted)
        assert may_end.wait(60)
        return real(wanted)

    real = vocabulary._compile
    monkeypatch.setattr(vocabulary, "_compile", compile_grammar)
    monkeypatch.setattr(vocabulary, "_compiling", Compiling())
    with ThreadPoolExecutor() as pool:
        states = [pool.submit(vocabulary.start, ("regex", "[a-c]{7}")) for _ in range(2)]
        assert waiting.wait(60)
        may_end.set()
        assert not any(each.result().is_error() for each in states)
    assert len(compiled) == 1


def test_a_missing_package_is_named(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, grammar.__name__)
    monkeypatch.delattr("graphllm.engine.grammar")
    with pytest.raises(RequestError, match=r"need the package llguidance: pip install 'graphllm\["):
        llm.generate("hello", regex="a")


def test_a_tokenizer_is_freed(tmp_path):
    """Its vocabulary is kept for it, and goes with it."""
    path = tiny.write_tiny(tmp_path / "tiny.gguf", "llama")
    with graphllm.load(path, device="cpu", threads=1) as own:
        assert own.generate("hello", regex="ab").text == "ab"
        tokenizer = weakref.ref(own.tokenizer)
        assert tokenizer() in grammar._VOCABULARIES
    gc.collect()
    assert tokenizer() is None
