"""Fields of ``/v1/responses``, and the chat that its input describes."""

from __future__ import annotations

from typing import Any

from ..arguments import Integer, OneOf, Real, flag, invalid_argument, mapping
from .chat_parts import (
    Message,
    add_call,
    arguments,
    as_list,
    as_object,
    assistant,
    joined_text,
    malformed,
    string,
    unsupported_type,
)
from .errors import ApiError
from .fields import (
    BEYOND,
    COMMON,
    COUNT,
    SEED,
    TEMPLATE,
    TOP_K,
    Field,
    Unsupported,
    any_text,
    top_p_field,
)
from .json_shapes import OBJECT, STRING, accepts, array, fields, one_of
from .reasoning import EFFORTS
from .tools import MAX_TOOLS, Tool, checked_tools, function_tool, named_choice, text_format

_TEXTS = ("input_text", "output_text", "text")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # entries, characters
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


@accepts(one_of(STRING, array(OBJECT)))
def input_field(name: str, value: Any) -> list[Message]:
    """The messages of a chat: a string is one of the user; a list has messages and other items."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[Message] = []
    for index, each in enumerate(as_list(name, value, "items")):
        _add_item(messages, f"{name}[{index}]", as_object(f"{name}[{index}]", each))
    return messages


def _add_item(messages: list[Message], where: str, item: Any) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise malformed(f"{where}.role", f"one of {', '.join(_ROLES)}")
        content = joined_text(f"{where}.content", item.get("content"), _TEXTS)
        if role == "assistant":
            assistant(messages, ("content", "tool_calls"))["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = joined_text(f"{where}.content", parts, ("reasoning_text", "summary_text"))
        message = assistant(messages, ("content", "tool_calls", "reasoning_content"))
        message["reasoning_content"] = text
    elif kind == "function_call":
        own, name = (string(f"{where}.{key}", item.get(key)) for key in ("call_id", "name"))
        given = arguments(f"{where}.arguments", item.get("arguments"))
        add_call(assistant(messages, ()), own, name, given)
    elif kind == "function_call_output":
        own = string(f"{where}.call_id", item.get("call_id"))
        text = joined_text(f"{where}.output", item.get("output"), _TEXTS)
        messages.append({"role": "tool", "tool_call_id": own, "content": text})
    else:
        raise unsupported_type(where, item, _ITEMS)


@accepts(array(fields("type", "name", type={"const": "function"}, name=STRING), 0, MAX_TOOLS))
def _tools(name: str, value: Any) -> list[Tool]:
    """A list of tools of type ``function``, whose fields are those of the tool."""

    def read(where: str, tool: Any) -> Tool:
        if as_object(where, tool).get("type") != "function":
            raise unsupported_type(where, tool, ("function",))
        return function_tool(where, tool)

    return checked_tools(name, value, read)


@accepts(OBJECT)
def _text(name: str, value: Any) -> Any:
    """The JSON schema that ``text.format`` asks for; None for text."""
    given = mapping(name, value)
    if (verbosity := given.get("verbosity")) is not None:
        Unsupported(("medium",))(f"{name}.verbosity", verbosity)
    form = given.get("format")
    return None if form is None else text_format(f"{name}.format", form)


@accepts(OBJECT)
def _reasoning(name: str, value: Any) -> str | None:
    """The effort that an object asks for, if any."""
    effort = mapping(name, value).get("effort")
    return None if effort is None else OneOf(EFFORTS)(f"{name}.effort", effort)


@accepts(array(STRING, 0))
def _include(name: str, value: Any) -> list[str]:
    """A list of outputs to include; those of tools that are not supported never occur."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise malformed(name, "a list of strings")
    if "message.output_text.logprobs" in value:
        text = f"{name}: message.output_text.logprobs is not supported by this server"
        raise ApiError(400, text, name, "unsupported_value")
    return value


@accepts({"type": "object", "maxProperties": MAX_METADATA,
          "propertyNames": {"maxLength": MAX_METADATA_KEY},
          "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE}})  # fmt: skip
def _metadata(name: str, value: Any) -> dict[str, str]:
    """An object of strings, which every response repeats; its bounds are OpenAI's."""
    found = mapping(name, value)
    text = (
        f"an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_VALUE} characters, "
        f"with keys of at most {MAX_METADATA_KEY}"
    )
    if len(found) > MAX_METADATA:
        raise invalid_argument(name, value, text)
    for key, own in found.items():
        fits = isinstance(own, str) and len(own) <= MAX_METADATA_VALUE
        if not fits or len(key) > MAX_METADATA_KEY:
            raise invalid_argument(name, value, text)
    return found


# Not in this API, with the names of `/v1/chat/completions`.
_OF_CHATS = ("stop", "presence_penalty", "frequency_penalty", "logit_bias")

RESPONSES = BEYOND | TEMPLATE | {name: COMMON[name] for name in _OF_CHATS} | {
    "model": Field(any_text),
    "input": Field(input_field),
    "instructions": Field(any_text),
    "stream": Field(flag),
    "max_output_tokens": Field(Integer(1, COUNT), "max_tokens"),
    "temperature": Field(Real(0, 2), "temperature"),
    "top_p": Field(top_p_field, "top_p"),
    "seed": SEED,
    "top_k": TOP_K,
    "text": Field(_text, "json_schema"),
    "tools": Field(_tools),
    "tool_choice": Field(named_choice),
    "parallel_tool_calls": Field(flag),
    "reasoning": Field(_reasoning),
    "include": Field(_include),
    "metadata": Field(_metadata),
    "store": Field(flag),
    # What would change the answer.
    "previous_response_id": Field(Unsupported()),
    "conversation": Field(Unsupported()),
    "prompt": Field(Unsupported()),
    "background": Field(Unsupported((False,))),
    "truncation": Field(Unsupported(("disabled",))),
    "top_logprobs": Field(Unsupported((0,))),
    "n": Field(Unsupported((1,))),
}  # fmt: skip
