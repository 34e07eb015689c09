"""Tools of chat requests: their fields, and messages with tools, calls and results."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..arguments import flag, invalid_argument, mapping
from ..chat.messages import normalize_messages
from .errors import ApiError
from .json_shapes import OBJECT, accepts, array, fields, one_of

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

_FUNCTION = fields("type", "function", type={"const": "function"}, function=OBJECT)
SHORT_IDS = "length != 9"  # in templates that refuse ids of other lengths
_CALLS_APART = (
    "and message['content'] is none"  # in templates that show no calls of messages with content
)
_NO_SYSTEM = "System role not supported"  # in templates such as Gemma 2's
# In templates to which arguments are JSON text, and not objects: they are joined to other text.
_JOINS_ARGUMENTS = re.compile(r"\['arguments'\]\s*\+")
CHOICE = one_of({"enum": ["none", "auto", "required"]}, OBJECT)
_FORMATS_OF_TEXT = {"enum": ["text", "json_object", "json_schema"]}

Tool = dict[str, Any]
Messages = list[dict[str, Any]]


# -- fields
@accepts(
    array(fields("type", "function", type={"const": "function"}, function=OBJECT), 0, MAX_TOOLS)
)
def tools_field(name: str, value: Any) -> list[Tool]:
    """A list of tools of type ``function``, as OpenAI's API has them."""
    return checked_tools(name, value, _tool)


def checked_tools(name: str, value: Any, read: Callable[[str, Any], Tool]) -> list[Tool]:
    """Return a list of tools with different names. RequestError, ApiError: one is malformed.

    Args:
        name: name of the field.
        value: its value.
        read: returns the tool that a value of the list describes, whose place it gets, too.
    """
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid_argument(name, value, f"a list of at most {MAX_TOOLS} tools")
    found = [read(f"{name}[{index}]", tool) for index, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in found]
    for index, each in enumerate(names):
        if each in names[:index]:
            raise ApiError(400, f"{name}: two tools have the name {each!r}", name)
    return found


def _tool(where: str, value: Any) -> Tool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "function":
        raise ApiError(400, f'{where}.type must be "function"', "tools")
    return function_tool(f"{where}.function", value.get("function"))


def function_tool(where: str, value: Any, schema: str = "parameters") -> Tool:
    """Return the tool for a function.

    Args:
        where: place of the function in the request.
        value: object with its name, its description and the JSON schema of its arguments.
        schema: key of the schema.

    Raises:
        RequestError, ApiError: the object is malformed.
    """
    given = mapping(where, value)
    own = given.get("name")
    if not isinstance(own, str) or not _NAME.fullmatch(own):
        text = f"{where}.name must have 1 to 64 letters, digits, underscores or hyphens"
        raise ApiError(400, text, "tools")
    made: Tool = {"name": own}
    if given.get("description") is not None:
        if not isinstance(given["description"], str):
            raise ApiError(400, f"{where}.description must be a string", "tools")
        made["description"] = given["description"]
    if given.get("strict") is not None:
        flag(f"{where}.strict", given["strict"])
    parameters = given.get(schema)
    checked = _NO_ARGUMENTS if parameters is None else parameters
    made["parameters"] = mapping(f"{where}.{schema}", checked)
    return {"type": "function", "function": made}


@accepts(CHOICE)
def tool_choice_field(name: str, value: Any) -> str | Tool:
    """``none``, ``auto``, ``required``, or an object that names a function."""
    function = value.get("function") if isinstance(value, Mapping) else None
    return named_choice(name, function if isinstance(function, Mapping) else value)


@accepts(CHOICE)
def named_choice(name: str, value: Any) -> str | Tool:
    """``none``, ``auto``, ``required``, or an object with the ``name`` of a function."""
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return {"name": value["name"]}
    text = f'{name} must be "none", "auto", "required" or an object that names a function'
    raise ApiError(400, text, name)


@accepts(fields("type", type=_FORMATS_OF_TEXT))
def response_format_field(name: str, value: Any) -> Any:
    """The JSON schema that ``response_format`` asks for; None for text."""
    given = mapping(name, value)
    if given.get("type") != "json_schema":
        return text_format(name, given)
    own = mapping(f"{name}.json_schema", given.get("json_schema"))
    return text_format(f"{name}.json_schema", {**own, "type": "json_schema"})


def text_format(name: str, value: Any) -> Any:
    """The JSON schema that an object with ``type`` and ``schema`` asks for; None for text."""
    given = mapping(name, value)
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # with a schema in llama.cpp's server
        schema = given.get("schema")
        return {"type": "object"} if schema is None else mapping(f"{name}.schema", schema)
    if kind != "json_schema":
        raise ApiError(400, f"{name}.type must be text, json_object or json_schema", name)
    if given.get("strict") is not None:
        flag(f"{name}.strict", given["strict"])
    return mapping(f"{name}.schema", given.get("schema"))


# -- messages
def described_tools(tools: Sequence[Tool], template: str) -> list[Tool]:
    """Return the tools with a description, if an empty one, where their template reads it."""
    if "description" not in template:
        return [*tools]
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def with_tool_texts(messages: Messages, tools: Sequence[Tool], template: str) -> Messages:
    """Return the messages for a template without tools: descriptions, calls and results as text."""
    example = '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    return with_descriptions(without_tools(messages), tools, example, template)


def with_descriptions(
    messages: Messages, tools: Sequence[Tool], example: str, template: str
) -> Messages:
    """Return the messages with a description of the tools and an example of a call.

    It is a system message, or text before the first message if the template has no such messages.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    about = f"You can call these functions:\n{listed}\nTo call one, answer with\n{example}"
    first, *rest = messages
    if _NO_SYSTEM in template and isinstance(first.get("content"), str):
        return [{**first, "content": f"{about}\n\n{first['content']}"}, *rest]
    if first.get("role") == "system":
        return [{**first, "content": f"{first['content']}\n\n{about}"}, *rest]
    return [{"role": "system", "content": about}, *messages]


def without_tools(messages: Messages) -> Messages:
    """Return the messages with calls and results as text; results of several calls are one turn."""
    made: Messages = []
    after_result = False
    for message in normalize_messages(messages):
        own = _as_text(message)
        if after_result and own["role"] == "user":
            made[-1]["content"] += f"\n{own['content']}"
        else:
            made.append(own)
        after_result = message["role"] == "tool"
    return made


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {**message, "content": content}
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    listed = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return {"role": message.get("role"), "content": f"{content}\n{listed}" if content else listed}


def with_parsed_arguments(messages: list[Any], template: str) -> list[Any]:
    """Return the messages with the arguments of earlier tool calls as their template expects them.

    ApiError: a call is malformed.
    """
    as_text = _JOINS_ARGUMENTS.search(template) is not None
    return [_parsed(f"messages[{i}]", each, as_text) for i, each in enumerate(messages)]


def _parsed(where: str, message: Any, as_text: bool) -> Any:
    """Return a message with arguments as objects, or as JSON text."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls, made = message["tool_calls"], []
    for call in calls if isinstance(calls, list) else [{}]:
        function = call.get("function") if isinstance(call, Mapping) else None
        try:
            name, arguments = function["name"], function["arguments"]  # type: ignore[index]
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError
        except (KeyError, TypeError, ValueError, RecursionError):
            text = f"{where}.tool_calls must be calls of functions with a JSON object as arguments"
            raise ApiError(400, text, "messages") from None
        shown = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        made.append({**call, "function": {"name": name, "arguments": shown}})
    return {**message, "tool_calls": made}


def with_contents(messages: list[Any], template: str) -> list[Any]:
    """Return the messages with calls as their template expects it.

    Most templates need a text as content, if only an empty one; see also `_CALLS_APART`.
    """
    made = []
    for each in messages:
        if isinstance(each, Mapping) and each.get("tool_calls"):
            content = each.get("content") or ""
            if content and _CALLS_APART in template:
                made.append({key: each[key] for key in each if key != "tool_calls"})
            each = {**each, "content": None if _CALLS_APART in template else content}
        made.append(each)
    return made


def with_short_ids(messages: list[Any]) -> list[Any]:
    """Return the messages with ids of calls that Mistral's templates accept; see `SHORT_IDS`."""
    return [_with_short_ids(each) if isinstance(each, Mapping) else each for each in messages]


def _with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if isinstance(own := made.get("tool_call_id"), str):
        made["tool_call_id"] = _short_id(own)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [{**call, "id": _short_id(str(call.get("id")))} for call in calls]
    return made


def _short_id(own: str) -> str:
    """Return an id that is accepted as it is, or 9 characters that stand for it."""
    accepted = len(own) == 9 and own.isascii() and own.isalnum()
    return own if accepted else hashlib.sha256(own.encode("utf-8", "replace")).hexdigest()[:9]
