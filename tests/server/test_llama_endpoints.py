"""The endpoints that llama.cpp's server has, too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import chat_model
import idle_engine
import pytest
from chat_model import SCHEMA, check_schema
from running_server import MODEL, Running

import graphllm

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
# Tokens of the tiny vocabulary in the place of those of a model that fills in text.
INFILL_NAMES = tuple(
    ((key,), ("<none>", name))
    for key, name in (("fim_pre", "<s>"), ("fim_suf", "</s>"), ("fim_mid", "<unk>"))
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> graphllm.LLM:
    return chat_model.load(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def server(llm) -> Iterator[Running]:
    running = Running(llm)
    yield running
    running.stop()
    idle_engine.check(llm)


def stream(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    status, text = server.call(path, {**body, "stream": True})
    assert status == 200 and text.endswith("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-1]]


def test_completion(llm, server):
    """The text and counts of the same request in Python, whole and streamed."""
    ask = {"n_predict": 9, "seed": 3, "repeat_last_n": 5, "repeat_penalty": 1.2, "top_k": 20}
    settings = {"max_tokens": 9, "seed": 3, "penalty_last_n": 5, "repeat_penalty": 1.2, "top_k": 20}
    done = llm.generate("hello", **settings)
    body = {"prompt": "hello", **ask, "return_tokens": True}
    _, found = server.call("/completion", body)
    assert (found["content"], found["tokens"]) == (done.text, done.ids)
    assert found["stop_type"] == "limit" and found["stop"] and not found["truncated"]
    counts = {"tokens_predicted": len(done.ids), "tokens_evaluated": len(done.prompt_ids)}
    assert {key: found[key] for key in counts} == counts
    timings = found["timings"]
    assert timings["predicted_n"] == len(done.ids) and timings["prompt_ms"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == len(done.prompt_ids)
    *events, last = stream(server, "/completion", **body)
    assert "".join(event["content"] for event in events) == done.text
    assert not any(event["stop"] for event in events)
    assert last["stop"] and last["content"] == "" and last["tokens"] == done.ids
    stop = done.text[2:4]
    _, found = server.call("/completion", {**body, "stop": [stop]})
    assert (found["stop_type"], found["stopping_word"]) == ("word", stop)
    assert found["content"] == done.text.partition(stop)[0]
    *events, last = stream(server, "/completion", **body, stop=[stop])
    tokens = [token for event in events for token in event["tokens"]]
    assert tokens == last["tokens"] == found["tokens"]  # those of the stop string, too
    assert "".join(event["content"] for event in events) == found["content"]
    _, found = server.call("/completion", {"prompt": "hello", "json_schema": SCHEMA, "seed": -1})
    check_schema(found["content"])
    assert found["stop_type"] == "eos"


def test_several_and_mixed_prompts(llm, server):
    """Answers of several prompts in their order; one prompt may have texts and token ids."""
    settings = {"max_tokens": 5, "seed": 4}
    ask = {"n_predict": 5, "seed": 4, "return_tokens": True}
    encode = llm.tokenizer.encode
    ids = encode("what")
    mixed = [*encode("hello", add_special=True), *ids, *encode("the")]
    prompts = ["hello", ids, ["hello", *ids, "the"], {"prompt_string": "what"}]
    want = [llm.generate(own, **settings).ids for own in ("hello", ids, mixed, "what")]
    _, found = server.call("/completion", {"prompt": prompts, **ask})
    assert [answer["tokens"] for answer in found] == want
    assert [answer["index"] for answer in found] == [0, 1, 2, 3]
    events = stream(server, "/completion", prompt=prompts, **ask)
    for index, tokens in enumerate(want):
        own = [event for event in events if event["index"] == index]
        assert own[-1]["stop"] and own[-1]["tokens"] == tokens
        assert [token for event in own[:-1] for token in event["tokens"]] == tokens
    _, found = server.call("/completion", {"prompt": [*ids, "hello"], **ask})
    assert found["tokens"] == llm.generate([*ids, *encode("hello")], **settings).ids


def test_probabilities_biases_and_chosen_fields(llm, server):
    settings = {"max_tokens": 4, "temperature": 0.0, "logprobs": 2}
    body = {"prompt": "hello", "n_predict": 4, "temperature": 0, "n_probs": 2}
    done = llm.generate("hello", **settings)
    _, found = server.call("/completion", body)
    whole = found["completion_probabilities"]
    assert [each["id"] for each in whole] == done.ids
    assert [each["logprob"] for each in whole] == [each.logprob for each in done.logprobs]
    for each, own in zip(whole, done.logprobs):
        assert [(top["id"], top["logprob"]) for top in each["top_logprobs"]] == [*own.top]
        assert bytes(each["bytes"]) == llm.tokenizer.piece(each["id"])
    events = stream(server, "/completion", **body)
    parts = [token for event in events[:-1] for token in event["completion_probabilities"]]
    assert parts == whole
    banned = done.ids[0]
    biases = {banned: -math.inf}
    want = llm.generate("hello", max_tokens=4, temperature=0.0, logit_bias=biases)
    piece = llm.tokenizer.piece(banned).decode()
    for given in ({str(banned): False}, [[banned, False]], [[piece, False]]):
        if llm.tokenizer.encode(piece) == [banned] or given != [[piece, False]]:
            ask = {**body, "logit_bias": given, "return_tokens": True}
            assert server.call("/completion", ask)[1]["tokens"] == want.ids
    paths = ["content", "generation_settings/temperature", "nothing/else"]
    _, found = server.call("/completion", {**body, "response_fields": paths})
    assert found == {"content": done.text, "generation_settings/temperature": 0.0}


def test_gbnf_grammars(server):
    """In the native endpoint and in chats; the answer is the one text that the grammar allows."""
    grammar = 'root ::= "ab" tail\ntail ::= [c]{2,2} | "never"\n'
    status, found = server.call("/completion", {"prompt": "hello", "grammar": grammar, "seed": 1})
    assert status == 200 and found["content"] in ("abcc", "abnever"), found
    ask = {"messages": MESSAGES, "grammar": 'root ::= "ab" "c"{3}'}
    _, found = server.call("/v1/chat/completions", ask)
    assert found["choices"][0]["message"]["content"] == "abccc"
    status, found = server.call("/v1/chat/completions", {**ask, "tools": TOOLS})
    assert (status, found["error"]["param"]) == (400, "grammar")


def test_prompts_of_chats_can_be_counted_and_shown(llm, server):
    shown = llm.template.render(MESSAGES)
    body = {"messages": MESSAGES, "max_tokens": 1}
    _, found = server.call("/v1/chat/completions/input_tokens", body)
    _, answer = server.call("/v1/chat/completions", {**body, "verbose": True})
    assert found["input_tokens"] == answer["usage"]["prompt_tokens"]
    assert answer["__verbose"]["prompt"].endswith(shown)
    assert "__verbose" not in server.call("/v1/chat/completions", body)[1]


def test_infill(llm, server, monkeypatch):
    """Prefix, suffix and middle in this order, after other files; so does ``suffix``."""
    status, found = server.call("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert status == 400 and "no prefix token" in found["error"]["message"]
    status, found = server.call("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (status, found["error"]["param"]) == (400, "suffix")
    monkeypatch.setattr("graphllm.server.infill.FIM_NAMES", INFILL_NAMES)
    encode = llm.tokenizer.encode
    before, after, middle = (encode(name, parse_special=True) for name in ("<s>", "</s>", "<unk>"))
    own = [*before, *encode("hello"), *after, *encode("what"), *middle]
    if llm.tokenizer.add_bos:
        own = [llm.tokenizer.bos_id, *own]
    done = llm.generate(own, max_tokens=5, seed=2)
    ask = {"input_prefix": "hello", "input_suffix": "what", "n_predict": 5, "seed": 2}
    _, found = server.call("/infill", ask)
    assert found["content"] == done.text and found["tokens_evaluated"] == len(own)
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    body = {"prompt": "hello", "suffix": "what", "max_tokens": 5, "seed": 2, **defaults}
    _, found = server.call("/v1/completions", body)
    assert found["choices"][0]["text"] == done.text
    ask_long = {"prompt": ["hello"] * 3, "suffix": "what " * llm.limits.context}
    status, found = server.call("/v1/completions", ask_long)
    assert (status, found["error"]["param"]) == (400, "suffix")
    files = [{"filename": "a.h", "text": "int a;"}]
    more = {"input_extra": files, "prompt": "the " * 40}
    _, found = server.call("/infill", {**ask, **more, "n_predict": 1})
    size = len(encode("\n\na.h\n")) + len(encode("int a;")) + len(encode("the " * 40))
    assert found["tokens_evaluated"] == len(own) + size


def test_properties_and_slots(llm, server):
    _, found = server.call("/props")
    assert found["default_generation_settings"]["n_ctx"] == llm.limits.context
    assert found["default_generation_settings"]["params"]["temperature"] == 0.8
    assert found["total_slots"] == 8 and found["model_alias"] == MODEL
    assert found["chat_template"] == chat_model.TEMPLATE and found["bos_token"] == "<s>"
    _, slots = server.call("/slots?fail_on_no_slot=1")
    assert [slot["id"] for slot in slots] == list(range(8))
    assert not any(slot["is_processing"] for slot in slots)


def test_defaults_of_requests_and_aliases(llm):
    """Requests override defaults field by field; each name is answered with the first one."""
    defaults = {"max_tokens": 3, "temperature": 0.0, "seed": 7}
    running = Running(llm, aliases=["other"], defaults=defaults)
    try:
        for path, ask in (
            ("/completion", {"prompt": "hello"}),
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/chat/completions", {"messages": MESSAGES}),
        ):
            _, found = running.call(path, {**ask, "model": "other"})
            counted = found.get("usage", {}).get("completion_tokens")
            assert found["model"] == MODEL and found.get("tokens_predicted", counted) == 3
        _, found = running.call("/completion", {"prompt": "hello", "n_predict": 2})
        assert found["content"] == llm.generate("hello", max_tokens=2, temperature=0.0).text
        assert {"temperature": 0.0, "seed": 7, "n_predict": 2}.items() <= found[
            "generation_settings"
        ].items()
        params = running.call("/props")[1]["default_generation_settings"]["params"]
        assert (params["n_predict"], params["temperature"], params["seed"]) == (3, 0.0, 7)
        _, found = running.call("/v1/models/other")
        assert (found["id"], found["aliases"]) == (MODEL, [MODEL, "other"])
        assert running.call("/completion", {"prompt": "a", "model": "third"})[0] == 404
    finally:
        running.stop()


def test_pieces_and_templates(llm, server):
    _, found = server.call("/tokenize", {"content": "hello ü🤗", "with_pieces": True})
    ids = [each["id"] for each in found["tokens"]]
    assert ids == llm.tokenizer.encode("hello ü🤗")
    for each in found["tokens"]:
        piece = each["piece"]
        data = piece.encode() if isinstance(piece, str) else bytes(piece)
        assert data == llm.tokenizer.piece(each["id"])
    _, found = server.call("/apply-template", {"messages": MESSAGES, "tools": TOOLS})
    assert found["prompt"] == llm.template.render(MESSAGES, tools=TOOLS)
    body = {"messages": MESSAGES, "add_generation_prompt": False}
    assert server.call("/apply-template", body)[0] == 200


@pytest.mark.parametrize("path, body, param", [
    ("/completion", {"prompt": []}, "prompt"),
    ("/completion", {"prompt": ["a", True]}, "prompt"),
    ("/completion", {"prompt": ["a", ["b", {}]]}, "prompt"),
    ("/completion", {"prompt": ["a"] * 129}, "prompt"),
    ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}, "prompt"),
    ("/completion", {"prompt": "a", "n_predict": -2}, "n_predict"),
    ("/completion", {"prompt": "a", "grammar": 'root ::= ("a"'}, "grammar"),
    ("/completion", {"prompt": "a", "grammar": "root ::= " + "(" * 3000}, "grammar"),
    ("/completion", {"prompt": "a", "grammar": "#" * 20_000}, "grammar"),
    ("/completion", {"prompt": "a", "n_probs": 21}, "n_probs"),
    ("/completion", {"prompt": "a", "n_probs": 1, "post_sampling_probs": True},
     "post_sampling_probs"),
    ("/completion", {"prompt": "a", "logit_bias": [[1, True]]}, "logit_bias"),
    ("/completion", {"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
    ("/completion", {"prompt": "a", "response_fields": [1]}, "response_fields"),
    ("/completion", {"prompt": "a", "mirostat": 0, "dry_multiplier": 0.5}, "dry_multiplier"),
    ("/completion", {"prompt": "a", "t_max_predict_ms": -1, "samplers": ["top_k"]}, "samplers"),
    ("/completion", {"prompt": "a", "seed": 2**40}, "seed"),
    ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": {}}, "input_extra"),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "a"}]},
     "input_extra"),
    ("/v1/completions", {"prompt": [1], "suffix": "b"}, "suffix"),
    ("/apply-template", {"messages": MESSAGES, "tools": [{}]}, "tools"),
])  # fmt: skip
def test_bad_requests_are_explained(server, path, body, param):
    status, found = server.call(path, body)
    assert (status, found["error"]["param"]) == (400, param)
