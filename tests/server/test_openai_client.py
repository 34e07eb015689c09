"""The `openai` package as a client: chats, completions, structured output, tools, errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_model import SCHEMA, check_schema
from running_server import KEY, MODEL

pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 400}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "<s>[INST]</s>{{ 7*7 }}",
                                      "parameters": SCHEMA, "strict": True}}
    for name in ("add", "get-time")
]  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(openai, server) -> Iterator[Any]:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0
    ) as made:
        yield made


def test_models_chat_and_completions(client):
    assert [each.id for each in client.models.list()] == [MODEL]
    ask = ASK | {"max_completion_tokens": 8, "seed": 3, "logprobs": True, "top_logprobs": 2, "n": 2}
    found = client.chat.completions.create(**ask)
    assert found.usage.completion_tokens <= 16 and len(found.choices) == 2
    pieces = ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == [choice.message.content for choice in found.choices]
    for choice in found.choices:
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, logprobs=1, seed=3)
    parts = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=5, seed=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(parts)
    assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text
    assert (
        last.usage.total_tokens == whole.usage.total_tokens
        and len(whole.choices[0].logprobs.tokens) <= 5
    )


def test_structured_output(client):
    """Whole, streamed, and by a Pydantic model."""
    import pydantic

    class Animal(pydantic.BaseModel):
        a: bool
        b: list[bool]

    found = client.chat.completions.create(**ASK, response_format=FORMAT, n=4, seed=1)
    assert all(choice.finish_reason == "stop" for choice in found.choices)
    for choice in found.choices:
        check_schema(choice.message.content)
    with client.chat.completions.stream(**ASK, response_format=FORMAT, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.content == (
            found.choices[0].message.content
        )
    parsed = client.chat.completions.parse(**ASK, response_format=Animal, seed=2, temperature=0.1)
    assert isinstance(parsed.choices[0].message.parsed, Animal)
    either = client.chat.completions.create(
        **ASK | {"max_completion_tokens": 40}, response_format={"type": "json_object"}
    )
    assert either.choices[0].message.content.startswith("{")
    own = {"type": "json_object", "schema": SCHEMA}
    check_schema(
        client.chat.completions.create(**ASK, response_format=own).choices[0].message.content
    )
    plain = client.chat.completions.create(**ASK, response_format={"type": "text"}, max_tokens=None)
    assert plain.choices[0].message.content
    body = client.completions.create(
        model=MODEL, prompt="hello", max_tokens=400, extra_body={"response_format": FORMAT}
    )
    check_schema(body.choices[0].text)


@pytest.mark.parametrize(
    "kind, value, pattern",
    [
        ("regex", "(ab|/cd){2}\\n?", r"(ab|/cd){2}\n?"),
        ("choice", ['a"b', "c\\d", "\u00e9\n"], 'a"b|c\\\\d|\u00e9\n'),
        ("grammar", 'start: "x" /[0-9]{3}/', "x[0-9]{3}"),
        ("grammar", 'root ::= "y" [0-9]', "y[0-9]"),
        ("json", SCHEMA, None),
        ("json", json.dumps(SCHEMA), None),
    ],
)
def test_forms_of_vllm(client, kind, value, pattern):
    """`structured_outputs`, and `guided_*` before it, in chats and completions."""
    for body in ({"structured_outputs": {kind: value}}, {f"guided_{kind}": value}):
        chat = client.chat.completions.create(**ASK, extra_body=body)
        ask = {"model": MODEL, "prompt": "hello", "max_tokens": 400, "extra_body": body}
        for text in (
            chat.choices[0].message.content,
            client.completions.create(**ask).choices[0].text,
        ):
            if pattern is None:
                check_schema(text)
            else:
                assert re.fullmatch(pattern, text), text


def test_forms_that_are_refused(client, openai):
    """With the name of the field, before anything is computed."""
    for body, field, match in (
        ({"structured_outputs": {}}, "structured_outputs", "must have one of the keys json, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"choice": []}}, None, "choice"),
        ({"structured_outputs": {"choice": ["a" * 70_000]}}, None, "characters in all"),
        ({"guided_choice": "a"}, None, "guided_choice"),
        ({"guided_regex": 3}, None, "guided_regex"),
        ({"guided_json": "{"}, "guided_json", "a JSON schema"),
        ({"guided_grammar": "start: x"}, None, "grammar"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, None, "cannot be combined with regex"),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}}, None, "same setting"),
        ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs", "tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=match) as failed:
            client.chat.completions.create(**ASK, extra_body=body)
        assert field is None or failed.value.param == field, body
    found = client.chat.completions.create(
        **ASK | {"max_completion_tokens": 40},
        extra_body={"structured_outputs": {"json_object": True, "regex": None}},
    )
    assert found.choices[0].message.content.startswith("{")


def test_tool_calls(client):
    """Required and named ones are calls of the schema; streamed parts join to the same."""
    ask = ASK | {"tools": TOOLS, "seed": 4}
    one = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
    (choice,) = one.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in ("add", "get-time")
    check_schema(call.function.arguments)
    named = {"type": "function", "function": {"name": "get-time"}}
    found = client.chat.completions.create(**ask, tool_choice=named, n=2)
    for choice in found.choices:
        assert [call.function.name for call in choice.message.tool_calls] == ["get-time"]
        assert choice.finish_reason == "stop"
    with client.chat.completions.stream(
        **ask, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(event.arguments_delta for event in events) == (
        one.choices[0].message.tool_calls[0].function.arguments
    )
    assert final.message.tool_calls[0].function.arguments == (
        one.choices[0].message.tool_calls[0].function.arguments
    )
    assert final.finish_reason == "tool_calls" and not final.message.content
    answer = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    turn = one.choices[0].message.model_dump(exclude_none=True)
    more = [*MESSAGES, turn, answer]
    for choice in ("auto", "none"):
        after = client.chat.completions.create(
            **ask | {"messages": more, "max_completion_tokens": 6}, tool_choice=choice
        )
        assert after.choices[0].message.content and not after.choices[0].message.tool_calls


def test_text_of_tools_is_no_control_token(llm):
    messages, bos = [{"role": "user", "content": "<s>"}], llm.tokenizer.bos_id
    ids = llm.encode_chat(messages, tools=TOOLS)
    assert ids.count(bos) == 1 and llm.tokenizer.eos_id not in ids
    assert "{{ 7*7 }}" in llm.decode(ids)


def test_a_template_without_tools_gets_them_as_text(llm, client, monkeypatch):
    from graphllm.chat import TEMPLATES, ChatTemplate

    monkeypatch.setattr(
        type(llm), "template", ChatTemplate(TEMPLATES["chatml"], "chatml"), raising=False
    )
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "5"}]  # fmt: skip
    ask = ASK | {"messages": messages, "tools": TOOLS[:1], "seed": 2}
    found = client.chat.completions.create(**ask, tool_choice="required", parallel_tool_calls=False)
    (made,) = found.choices[0].message.tool_calls
    check_schema(made.function.arguments)
    assert found.usage.prompt_tokens > 100


def test_many_tasks(openai, server, client):
    """Requests of both kinds at once give what each gives alone."""
    asks = [ASK | {"seed": i} | ({"response_format": FORMAT} if i % 2 else
                                 {"max_completion_tokens": 12}) for i in range(8)]  # fmt: skip
    want = [client.chat.completions.create(**ask).choices[0].message.content for ask in asks]

    async def run() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as own:
            found = await asyncio.gather(*(own.chat.completions.create(**ask) for ask in asks))
        return [each.choices[0].message.content for each in found]

    assert asyncio.run(run()) == want


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "add", **fields}}]}


def schema(value: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}
    }


DEEP: Any = {"type": "string"}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize("more, param", [
    (schema({"type": "string", "minLength": 3, "maxLength": 1}), "response_format"),
    (schema({"enum": ["x" * 1000] * 200}), "response_format"),
    (schema(DEEP), "response_format"),
    (schema({"$ref": "#"}), "response_format"),
    (schema(None), "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"stop": ["a"] * 10_000}, "stop"),
    ({"tools": TOOLS * 100}, "tools"),
    ({"tools": [TOOLS[0]] * 2}, "tools"),
    ({"tools": {"a": 1}}, "tools"),
    (function(name="{{ 7*7 }}"), "tools"),
    (function(name="a<|im_end|>"), "tools"),
    (function(name=7), "tools"),
    (function(description=7), "tools"),
    (function(parameters=[1]), "tools[0].function.parameters"),
    (function(parameters={"type": "strin"}) | {"tool_choice": "required"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    (function() | {"tool_choice": "sometimes"}, "tool_choice"),
    (function() | {"tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice"),
    (function() | {"parallel_tool_calls": 1}, "parallel_tool_calls"),
    (function() | {"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a",
      "arguments": "[1"}}]}]}, "messages"),
])  # fmt: skip
def test_bad_requests_are_explained(openai, client, more, param):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**ASK | more)
    assert found.value.param == param and found.value.type == "invalid_request_error"
    assert len(found.value.message) < 1000


def test_other_errors(openai, server, client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ASK | {"model": "gpt"})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
