"""The endpoints that llama.cpp's server has, too."""

from __future__ import annotations

import json
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
    _, found = server.call("/completion", {"prompt": "hello", "json_schema": SCHEMA, "seed": -1})
    check_schema(found["content"])
    assert found["stop_type"] == "eos"


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
    ("/completion", {"prompt": ["a", "b"]}, "prompt"),
    ("/completion", {"prompt": "a", "n_predict": -2}, "n_predict"),
    ("/completion", {"prompt": "a", "grammar": 'root ::= "a"'}, "grammar"),
    ("/completion", {"prompt": "a", "n_probs": 3}, "n_probs"),
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
