"""The `openai` package as a client of ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chat_model import SCHEMA, check_schema
from running_server import KEY, MODEL
from scripted_answers import completion, frames, served

from graphllm.server.chat_text import chat_text, tool_use
from graphllm.server.responses import ResponseAnswer

pytest.importorskip("llguidance")

TOOLS = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 400}
# A chat with a call as items, and as messages.
ITEMS = [
    {"role": "developer", "content": "Very."},
    {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [],
     "content": [{"type": "reasoning_text", "text": "I add."}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "So:", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 5}'},
    {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 6}'},
    {"type": "function_call_output", "call_id": "c1", "output": "5"},
    {"type": "function_call_output", "call_id": "c2",
     "output": [{"type": "input_text", "text": "6"}]},
]  # fmt: skip
CALLS = [
    {"id": own, "type": "function", "function": {"name": "add", "arguments": {"a": value}}}
    for own, value in (("c1", 5), ("c2", 6))
]
CHAT = [
    {"role": "system", "content": "Be brief.\n\nVery."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "So:", "reasoning_content": "I add.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
    {"role": "tool", "tool_call_id": "c2", "content": "6"},
]


@pytest.fixture(scope="module")
def client(openai, server) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def test_responses(llm, client):
    """Whole and streamed answers are those of the same prompt; tokens are counted."""
    done = llm.chat(HELLO, seed=3, max_tokens=8, temperature=1.0, top_p=1.0, top_k=0)
    ask = ASK | {"max_output_tokens": 8, "extra_body": {"seed": 3}, "metadata": {"a": "b"}}
    found = client.responses.create(**ask)
    assert found.output_text == done.text and found.id.startswith("resp_")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.store, found.metadata, found.max_output_tokens) == (False, {"a": "b"}, 8)
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(done.prompt_ids), len(done.ids))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if "delta" in event.type) == done.text
    last = events[-1].response
    assert last.output_text == done.text and last.usage.output_tokens == len(done.ids)
    assert client.responses.create(**ask | {"input": HELLO}).output_text == done.text


def test_metadata_has_the_bounds_of_openai(server):
    """Every response of a stream repeats it."""
    most = {f"{index:64}": "x" * 512 for index in range(16)}
    ask = ASK | {"max_output_tokens": 1}
    status, found = server.call("/v1/responses", ask | {"metadata": most})
    assert (status, found["metadata"]) == (200, most)
    for refused in ({**most, "b": ""}, {"a" * 65: ""}, {"a": "x" * 513}, {"a": {"b": "c"}}):
        status, found = server.call("/v1/responses", ask | {"metadata": refused})
        assert (status, found["error"]["param"]) == (400, "metadata")


def test_items_become_the_same_prompt(llm, client):
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    want = llm.encode_chat(CHAT, tools=tools)
    found = client.responses.create(
        model=MODEL, input=ITEMS, tools=TOOLS, instructions="Be brief.", max_output_tokens=1,
        store=False,
    )  # fmt: skip
    assert found.usage.input_tokens == len(want) and found.instructions == "Be brief."


def test_tools_and_structured_output(client):
    import pydantic

    class Animal(pydantic.BaseModel):
        a: bool
        b: list[bool]

    ask = ASK | {"tools": TOOLS, "extra_body": {"seed": 4}, "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "name": "add"}):
        found = client.responses.create(**ask, tool_choice=choice)
        (call,) = found.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
        assert call.call_id.startswith("call_") and call.id.startswith("fc_")
        check_schema(call.arguments)
    with client.responses.stream(**ask, tool_choice="required") as stream:
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    parsed = client.responses.parse(**ASK, text_format=Animal, temperature=0.1)
    assert isinstance(parsed.output_parsed, Animal)


SCRIPT = '<think>So\n</think>\nWell. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NAMES = {"reasoning": "reasoning_text", "message": "output_text",
         "function_call": "function_call_arguments"}  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_items(openai, llm, size):
    """The client joins the events of a stream to the whole answer, cut off or not."""
    fields = {"tools": [{"function": {"name": "add", "parameters": {}}}]}
    template = "</think> <tool_call> tool"

    def answer() -> ResponseAnswer:
        text = chat_text(template, "", tool_use(fields, template), False)
        return ResponseAnswer(MODEL, llm.tokenizer, text, {"tools": TOOLS})

    kinds = list(NAMES)
    for text, finish, types, status in (
        (SCRIPT, "stop", kinds, "completed"),
        (SCRIPT + "Done.", "stop", [*kinds, "message"], "completed"),
        (SCRIPT[:-16], "length", kinds, "incomplete"),
        ("", "stop", [], "completed"),
    ):
        done = completion(llm.tokenizer, text, finish)
        whole = answer().whole([done])
        assert [item["type"] for item in whole["output"]] == types
        assert whole["status"] == status
        reasoning = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert reasoning == len(completion(llm.tokenizer, text[:9] + "\n" * bool(text)).ids)
        data = frames(answer(), done, size)
        with (
            served(data) as url,
            openai.OpenAI(base_url=url, api_key="a") as api,
            api.responses.create(model=MODEL, input="a", stream=True) as stream,
        ):
            events = [event.to_dict() for event in stream]
        last = events[-1]["response"]
        assert events[-1]["type"] == f"response.{status}"
        for key in ("usage", "status", "incomplete_details"):
            assert last[key] == whole[key]
        for index, item in enumerate(last["output"]):
            want = whole["output"][index]
            changing = {"id": item["id"], "call_id": item.get("call_id")}
            assert item | changing == want | changing
            own = [e for e in events if e.get("output_index") == index]
            kind = NAMES[item["type"]]
            deltas = [e["delta"] for e in own if e["type"] == f"response.{kind}.delta"]
            (end,) = (e for e in own if e["type"] == f"response.{kind}.done")
            text_of = item.get("arguments") or item["content"][0]["text"]
            assert "".join(deltas) == text_of == end.get("text", end.get("arguments"))
            ids = {e.get("item_id") or e["item"]["id"] for e in own}
            assert ids == {item["id"]}


@pytest.mark.parametrize("more, param", [
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "["}]},
     "input"),
    ({"input": "a " * 5000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": TOOLS * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "strin"}}}},
     "text"),
    ({"tools": TOOLS, "text": {"format": {"type": "json_object"}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"extra_body": {"stop": [""]}}, "stop"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
])  # fmt: skip
def test_bad_requests_are_explained(openai, client, more, param):
    with pytest.raises(openai.BadRequestError) as found:
        client.responses.create(**ASK | more)
    assert found.value.param == param and found.value.type == "invalid_request_error"
    assert len(found.value.message) < 1000
