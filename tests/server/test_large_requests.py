"""Requests that are large, or that many clients give up: none of them holds up the others."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from loop_turns import LoopTurns
from running_server import MODEL

import graphllm

pytest.importorskip("starlette")

from graphllm.api.async_llm import AsyncLLM
from graphllm.api.prompts import parse_prompt
from graphllm.arguments import invalid_argument, token_ids
from graphllm.engine.completion import Completion
from graphllm.engine.generation import Generation
from graphllm.engine.request import Sampling
from graphllm.engine.sequence import ActiveSequence
from graphllm.engine.step_result import TokenLogprobs
from graphllm.server.answer_events import _split
from graphllm.server.answers import Answer, ChatAnswer
from graphllm.server.chat_text import chat_text
from graphllm.server.errors import ApiError
from graphllm.server.json_data import PART, LazyArray, encode_json, json_bytes, json_parts
from graphllm.server.llama_fields import MAX_TEXT
from graphllm.server.native_answer import NativeAnswer
from graphllm.server.prompt_parts import check_prompt_sizes
from graphllm.server.tokenizer_endpoints import TokenizerEndpoints

MESSAGES = [{"role": "user", "content": "hello"}]


class CountedList(list[Any]):
    """A list that counts the elements that are read; its length is a call of C."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.read += 1
            yield item


class CountedRepr:
    """An element of a list whose representations are counted."""

    count = 0

    def __repr__(self) -> str:
        CountedRepr.count += 1
        return "0"


@pytest.mark.parametrize("several", [False, True])
def test_too_many_token_ids_are_not_read(several):
    """The length of a list of token ids decides, before any rule looks at each of them."""
    ids = CountedList([1] * 5000)
    with pytest.raises(ApiError) as error:
        check_prompt_sizes({"prompt": [ids] if several else ids}, 1024)
    assert ids.read <= 2
    body = error.value.body["error"]
    assert (error.value.status, body["code"]) == (400, "context_length_exceeded")
    assert (body["param"], body["n_prompt_tokens"], body["n_ctx"]) == ("prompt", 5000, 1024)
    assert "5000 tokens" in body["message"]


@pytest.mark.parametrize("value", [
    None, [], 3, "a", [1] * 1024, [[1] * 1024, []], ["a"] * 2000, {"prompt_string": "a"}
])  # fmt: skip
def test_prompts_that_their_rule_checks(value):
    check_prompt_sizes({"prompt": value}, 1024)
    check_prompt_sizes(value, 1024)


def test_prompt_endpoints_check_sizes(llm, server):
    """Also ids that no vocabulary has, since they are not read."""
    for path in ("/v1/completions", "/completion"):
        for prompt in ([-1] * 5000, [[-1] * 5000], ["a", *[1] * 5000]):
            status, found = server.call(path, {"prompt": prompt, "max_tokens": 1})
            assert (status, found["error"]["code"]) == (400, "context_length_exceeded"), path


def test_token_ids_are_checked_at_once(monkeypatch):
    """Lists of int are checked without a call for each element."""
    monkeypatch.setattr("graphllm.arguments.as_int", None)
    monkeypatch.setattr("graphllm.api.prompts.as_int", None)
    ids = [3, 1, 2]
    assert token_ids("tokens", ids) == (3, 1, 2)
    found = parse_prompt(ids, "llm.submit")
    assert found == ids and found is not ids


@pytest.mark.parametrize("ids", [[True], [1, -1], [1.0], [1, "a"]])
def test_invalid_token_ids(ids):
    with pytest.raises(graphllm.RequestError, match=r"tokens = .* must be token ids"):
        token_ids("tokens", ids)


def test_long_values_are_not_formatted():
    """An error shows 80 characters, and formats little more."""
    error = invalid_argument("stop", [[CountedRepr()] * 100_000] * 2, "short")
    assert str(error) == "stop = [[" + "0, " * 25 + "... must be short"
    assert CountedRepr.count < 500
    long = invalid_argument("stop", "a  b" * 10**6, "short")
    assert str(long).startswith("stop = 'a ba ba b") and str(long).endswith("... must be short")


PROMPTS = {
    "/v1/completions": {"prompt": "a"},
    "/completion": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "model": MODEL, "max_tokens": 2},
}


@pytest.mark.parametrize("path", PROMPTS)
def test_stop_token_ids_are_bounded(server, path):
    body = {"max_tokens": 2, **PROMPTS[path]}
    assert server.call(path, {**body, "stop_token_ids": [5] * 1024})[0] == 200
    status, found = server.call(path, {**body, "stop_token_ids": [5] * 1025})
    assert status == 400 and "stop_token_ids" in found["error"]["message"]


def test_stop_token_ids_are_looked_up():
    """They are a set for the thread that runs the steps of all requests."""

    class Ids(tuple[int, ...]):
        def __contains__(self, token: object) -> bool:
            raise AssertionError("a search of all ids")

    sampling = Sampling(max_tokens=9, stop_ids=Ids((7, 8)), seed=1)
    generation = Generation(ActiveSequence([1], 1), sampling, {}, (), None, context=99)
    assert not generation.may_end([5]) and generation.may_end([5, 8])
    assert not generation.push(5) and generation.push(8)
    assert generation.finish_reason == "stop"


def plain(value: Any) -> Any:
    """A value whose lazy arrays are lists."""
    if isinstance(value, LazyArray):
        return [plain(item) for item in value.items]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def nested_value() -> dict[str, Any]:
    rows = (LazyArray([f'"{row}é\ud800', column] for column in range(3)) for row in range(2))
    return {"a": LazyArray([]), "b": LazyArray({"c": row} for row in rows), "d": [1, None]}


def test_json_of_lazy_arrays():
    text = b"".join(json_parts(nested_value()))
    assert text == json_bytes(plain(nested_value()))
    assert list(json_parts({"a": 1})) == [b'{"a":1}']
    with pytest.raises(TypeError, match="JSON has no object"):
        list(json_parts({"a": object()}))


def test_json_parts_are_made_one_by_one():
    """No element is made before the parts in front of it were taken."""
    made = []
    items = LazyArray((made.append(index) or "x" * 1000) for index in range(1000))
    sizes = []
    for part in json_parts({"items": items}):
        sizes.append(len(part))
        assert len(made) * 1003 <= sum(sizes) + 1003
    assert len(sizes) > 20 and max(sizes) < PART + 2000


def test_the_loop_runs_while_json_is_encoded():
    async def run() -> tuple[bytes, set[int]]:
        turns, seen = LoopTurns(), set[int]()
        items = ((seen.add(turns.count) or "x" * 1000) for _ in range(1000))
        return await encode_json(LazyArray(items)), seen

    text, seen = asyncio.run(run())
    assert len(json.loads(text)) == 1000 and len(seen) > 20


def completion_with_logprobs(count: int) -> Completion:
    tops = tuple((token, -float(token)) for token in range(10, 30))
    tokens = [TokenLogprobs(10 + index % 100, -0.5, tops) for index in range(count)]
    ids = [each.id for each in tokens]
    return Completion([1], ids, "text", "length", logprobs=tokens)


@pytest.mark.parametrize("kind", ["completion", "chat", "native"])
def test_answers_with_logprobs_are_divided(llm, kind):
    """Whole answers and the events of a stream come in parts, with all log-probabilities."""
    count = 2000
    done = completion_with_logprobs(count)
    values: dict[str, Any] = {}
    answer = {
        "completion": lambda: Answer(MODEL, llm.tokenizer),
        "chat": lambda: ChatAnswer(MODEL, llm.tokenizer, chat_text("", "", None, False)),
        "native": lambda: NativeAnswer(MODEL, llm.tokenizer, {"max_tokens": count}, values, 9999),
    }[kind]()
    parts = list(json_parts(answer.whole([done])))
    whole = json.loads(b"".join(parts))
    if kind == "native":
        listed = whole["completion_probabilities"]
    else:
        listed = whole["choices"][0]["logprobs"]["content" if kind == "chat" else "top_logprobs"]
    assert len(listed) == count and len(listed[-1].get("top_logprobs", listed[-1])) >= 20
    assert len(parts) > 10 and max(map(len, parts)) < PART + 5000
    list(answer.begin([done], 1))
    events = list(answer.encoded([(0, "text", done.logprobs)]))
    assert max(map(len, events)) < PART + 5000
    assert b"".join(events).count(b'"top_logprobs"') >= (1 if kind == "completion" else count)


def test_events_of_a_slow_stream_have_a_bounded_number_of_tokens(llm):
    """What waits for a slow reader is not one event; the text comes with the last tokens."""
    done = completion_with_logprobs(100)
    pieces = list(_split((3, "text", done.logprobs)))
    assert [len(tokens) for *_, tokens in pieces] == [32, 32, 32, 4]
    assert [text for _, text, _ in pieces] == ["", "", "", "text"]
    assert [each for *_, tokens in pieces for each in tokens] == done.logprobs
    assert list(_split((3, "text", []))) == [(3, "text", [])]


class CountedTokenizer:
    """A tokenizer with one token per character, which counts the calls of `piece`."""

    pieces = 0

    def encode(self, text: str, **options: bool) -> list[int]:
        return [ord(char) for char in text]

    def piece(self, token: int) -> bytes:
        self.pieces += 1
        return chr(token).encode("latin-1")


def test_pieces_are_made_once_for_each_token():
    tokenizer: Any = CountedTokenizer()
    endpoints = TokenizerEndpoints(tokenizer, 0)
    values = {"content": 'a"\xff' * 1000, "with_pieces": True}
    found = json.loads(endpoints._tokens(values))["tokens"]
    pieces = [{"id": 97, "piece": "a"}, {"id": 34, "piece": '"'}, {"id": 255, "piece": [255]}]
    assert found == pieces * 1000 and tokenizer.pieces == 3
    values["with_pieces"] = False
    assert json.loads(endpoints._tokens(values)) == {"tokens": [97, 34, 255] * 1000}
    assert json.loads(endpoints._tokens({"content": ""})) == {"tokens": []}


def test_tokenizer_endpoints_have_a_thread_of_their_own(llm, server, monkeypatch):
    threads, own = list[str](), llm.tokenizer
    encode, decode = own.encode, own.decode

    def noted(call: Any) -> Any:
        def run(*given: Any, **options: Any) -> Any:
            threads.append(threading.current_thread().name)
            return call(*given, **options)

        return run

    monkeypatch.setattr(own, "encode", noted(encode))
    monkeypatch.setattr(own, "decode", noted(decode))
    ids = server.call("/tokenize", {"content": "hello"})[1]["tokens"]
    assert server.call("/detokenize", {"tokens": ids})[1]["content"].strip() == "hello"
    assert {name.partition("_")[0] for name in threads} == {"tokenizer"}


def test_tokenizer_endpoints_have_bounds(server):
    status, found = server.call("/tokenize", {"content": "a" * (MAX_TEXT + 1)})
    assert (status, found["error"]["param"]) == (400, "content")
    assert "at most 1,000,000 characters" in found["error"]["message"]
    status, found = server.call("/detokenize", {"tokens": [5] * (MAX_TEXT + 1)})
    assert (status, found["error"]["param"]) == (400, "tokens")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_fields_of_large_bodies_are_checked_in_a_thread(llm, server, path, monkeypatch):
    """Between whose steps the event loop runs; small bodies take less than a thread."""
    from graphllm.server import completions

    threads, check = list[bool](), completions.check_fields

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread() is server.thread)
        return check(*given)

    monkeypatch.setattr(completions, "check_fields", noted)
    field = "input" if path == "/v1/responses" else "messages"
    for count in (1, 5000):
        body = {field: MESSAGES * count, "model": MODEL, "max_tokens": 1, "max_output_tokens": 16}
        status, found = server.call(path, body)
        assert status == (200 if count == 1 else 400), found
    assert threads == [True, False]


def test_the_loop_runs_between_the_prompts_of_a_request(server, monkeypatch):
    """Checking the settings of each takes a while: 128 prompts with large ones, half a second."""
    before, ended = list[int](), list[None]()
    submit = AsyncLLM.submit

    async def noted(*given: Any, **options: Any) -> Any:
        before.append(len(ended))
        asyncio.get_running_loop().call_soon(ended.append, None)
        return await submit(*given, **options)

    monkeypatch.setattr(AsyncLLM, "submit", noted)
    body = {"prompt": ["a"] * 4, "max_tokens": 1, "logit_bias": {str(i): 1 for i in range(200)}}
    for stream in (False, True):
        assert server.call("/v1/completions", {**body, "stream": stream})[0] == 200
    assert before == list(range(8))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_messages_are_prepared_in_a_thread(server, path, monkeypatch):
    """Arguments of calls are parsed and calls become text there: 30,000 took 0.2 s."""
    from graphllm.server import completions

    threads, prepare = list[bool](), completions.chat_messages

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread() is server.thread)
        return prepare(*given)

    monkeypatch.setattr(completions, "chat_messages", noted)
    assert server.call(path, {"max_tokens": 2, **PROMPTS[path]})[0] == 200
    assert threads == [False]
