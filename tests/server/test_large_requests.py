"""Requests that are large, or that many clients give up: none of them holds up the others."""

from __future__ import annotations

from typing import Any

import pytest
from running_server import MODEL

import graphllm

pytest.importorskip("starlette")

from graphllm.api.prompts import parse_prompt
from graphllm.arguments import invalid_argument, token_ids
from graphllm.engine.generation import Generation
from graphllm.engine.request import Sampling
from graphllm.engine.sequence import ActiveSequence
from graphllm.server.errors import ApiError
from graphllm.server.prompt_parts import check_prompt_sizes

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
