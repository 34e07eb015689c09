"""The `anthropic` package as a client of ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chat_model import SCHEMA, check_schema
from running_server import KEY, MODEL
from scripted_answers import completion, frames, served

from graphllm.server.chat_text import chat_text, tool_use
from graphllm.server.messages import MessageAnswer

pytest.importorskip("llguidance")

TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": HELLO}
# The messages of a chat with a call, as Anthropic's API and as OpenAI's has them.
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "What is"},
                                 {"type": "text", "text": "2 + 3?"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I add.", "signature": ""},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 5}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True,
         "content": [{"type": "text", "text": "5"}]},
        {"type": "text", "text": "Go on."}]},
]  # fmt: skip
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": 5}}}
CHAT = [
    {"role": "system", "content": "Be brief.\nVery."},
    {"role": "user", "content": "What is\n2 + 3?"},
    {"role": "assistant", "content": "So:", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: 5"},
    {"role": "user", "content": "Go on."},
]
SYSTEM = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Very."}]


@pytest.fixture(scope="module")
def client(anthropic, server) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def test_messages(llm, client):
    """Whole and streamed answers are those of the same prompt; tokens are counted."""
    extra = {"extra_body": {"seed": 3}}
    done = llm.chat(HELLO, seed=3, max_tokens=8, temperature=1.0, top_p=1.0, top_k=0)
    ask = ASK | {"max_tokens": 8, **extra}
    ask |= {"thinking": {"type": "enabled", "budget_tokens": 1024}}  # which the model ignores
    found = client.messages.create(**ask)
    assert (found.type, found.role, found.model) == ("message", "assistant", MODEL)
    assert [block.text for block in found.content] == [done.text]
    usage = found.usage
    assert usage.output_tokens == len(done.ids)
    assert usage.input_tokens + usage.cache_read_input_tokens == len(done.prompt_ids)
    assert usage.cache_creation_input_tokens == 0
    assert found.stop_reason == "max_tokens" and found.stop_sequence is None
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert final.content[0].text == done.text and final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == len(done.ids)
    count = client.messages.count_tokens(model=MODEL, messages=HELLO)
    assert count.input_tokens == len(done.prompt_ids)
    stop = done.text[2:4]
    found = client.messages.create(**ask, stop_sequences=["nowhere", stop, stop + "?!"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == done.text.partition(stop)[0]


def test_a_chat_with_calls_becomes_the_same_prompt(llm, client):
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.",
                                               "parameters": SCHEMA}}]  # fmt: skip
    want = llm.encode_chat(CHAT, tools=tools)
    ask = {"model": MODEL, "messages": TALK, "tools": TOOLS, "system": SYSTEM}
    assert client.messages.count_tokens(**ask).input_tokens == len(want)
    found = client.messages.create(**ask, max_tokens=1).usage
    assert found.input_tokens + found.cache_read_input_tokens == len(want)


def test_tools_and_structured_output(client):
    ask = ASK | {"tools": TOOLS, "extra_body": {"seed": 4}}
    for choice in ({"type": "any", "disable_parallel_tool_use": True},
                   {"type": "tool", "name": "add"}):  # fmt: skip
        found = client.messages.create(**ask, tool_choice=choice)
        (call,) = found.content
        assert (call.type, call.name, found.stop_reason) == ("tool_use", "add", "tool_use")
        assert call.id.startswith("toolu_") and call.input["a"] <= 99
        with client.messages.stream(**ask, tool_choice=choice) as stream:
            (same,) = stream.get_final_message().content
        assert same.input == call.input
    config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    found = client.messages.create(**ASK, output_config=config)
    check_schema(found.content[0].text)


SCRIPT = '<think>So\n</think>\nWell. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks(anthropic, llm, size):
    """The client joins the events of a stream to the whole answer, cut off or not."""
    fields = {"tools": [{"function": {"name": "add", "parameters": {}}}]}
    template = "</think> <tool_call> tool"

    def answer() -> MessageAnswer:
        text = chat_text(template, "", tool_use(fields, template), False)
        return MessageAnswer(MODEL, llm.tokenizer, text, ())

    for text, finish, kinds, reason in (
        (SCRIPT, "stop", ["thinking", "text", "tool_use"], "tool_use"),
        (SCRIPT + "Done.", "stop", ["thinking", "text", "tool_use", "text"], "tool_use"),
        (SCRIPT[:-16], "length", ["thinking", "text", "tool_use"], "max_tokens"),
        (SCRIPT[:9], "length", ["thinking"], "max_tokens"),
        ("", "stop", [], "end_turn"),
    ):
        done = completion(llm.tokenizer, text, finish)
        whole = answer().whole([done])
        assert [block["type"] for block in whole["content"]] == kinds
        usage = whole["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (5, 4)
        if finish == "stop" and kinds:
            assert whole["content"][2]["input"] == {"a": 1}
            thought = text[: text.index("</think>")]
            size_of = len(completion(llm.tokenizer, thought).ids)
            assert usage["output_tokens_details"]["thinking_tokens"] == size_of
        data = frames(answer(), done, size)
        with (
            served(data) as url,
            anthropic.Anthropic(base_url=url, api_key="a") as api,
            api.messages.stream(**ASK) as stream,
        ):
            final = stream.get_final_message().to_dict()
        assert final["stop_reason"] == whole["stop_reason"] == reason
        assert final["usage"] == usage
        own = [{**block, "id": ""} for block in final["content"]]
        if reason == "max_tokens":  # the client parses partial arguments
            own = [block | ({"input": {}} if block["type"] == "tool_use" else {}) for block in own]
        assert own == [{**block, "id": ""} for block in whole["content"]]


@pytest.mark.parametrize("more, words", [
    ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "must end with a message of"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
    ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0] must be an object"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content must be"),
    ({"messages": [{"role": "user", "content": []}]}, "must end with a message of the user"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b",
      "input": []}]}, *HELLO]}, "messages[0].content[0].input must be a JSON object"),
    ({"system": [{"type": "text"}]}, "system[0].text must be a string"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": TOOLS * 2}, "two tools have the name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "b"}}, "no tool has the name 'b'"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": []}}, "tool_choice.type"),
    ({"thinking": {}}, "thinking.type"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"effort": "low"}}, "this model does not reason"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
     "json_schema"),
    ({"stop_sequences": ["a"] * 10_000}, "stop_sequences"),
    ({"extra_body": {"n": 2}}, "n is not supported"),
    ({"messages": [{"role": "user", "content": "a " * 5000}]}, "context"),
])  # fmt: skip
def test_bad_requests_are_explained(anthropic, client, more, words):
    with pytest.raises(anthropic.BadRequestError) as found:
        client.messages.create(**ASK | more)
    error = found.value.body["error"]
    assert error["type"] == "invalid_request_error" and words in error["message"]


def test_other_errors(anthropic, server, client):
    with pytest.raises(anthropic.NotFoundError) as found:
        client.messages.create(**ASK | {"model": "claude"})
    assert found.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as found:
        client.with_options(api_key="wrong").messages.create(**ASK)
    assert found.value.body["error"]["type"] == "authentication_error"
    status, answer = server.call("/v1/messages", {"model": MODEL, "messages": HELLO})
    assert status == 400 and answer["error"]["message"] == "max_tokens is missing"
    assert server.call("/v1/messages")[1]["type"] == "error"
