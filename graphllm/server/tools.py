"""Tools of chat requests: their fields, the formats of calls by chat template, and grammars."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..arguments import flag, invalid_argument, mapping
from ..chat.messages import normalize_messages
from .errors import ApiError
from .json_shapes import OBJECT, accepts, array, fields, one_of

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
# As `engine.grammar` has it for JSON schemas.
_SPACING = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,20}"}}

_FUNCTION = fields("type", "function", type={"const": "function"}, function=OBJECT)
SHORT_IDS = "length != 9"  # in templates that refuse ids of other lengths
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


# -- formats
@dataclass(frozen=True)
class ToolFormat:
    """How a chat template writes tool calls, each an object with a name and arguments.

    Attributes:
        name: name of the format.
        begin, end: what encloses a call, or all calls if they are a list; control tokens, which
            answers do not show, are left out.
        key: key of the arguments.
        listed: whether the calls are one JSON list.
        anywhere: whether text may precede the calls.
        named: whether a call is the name and the arguments, without an object around them.
    """

    name: str
    begin: str
    end: str
    key: str = "arguments"
    listed: bool = False
    anywhere: bool = False
    named: bool = False


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", anywhere=True)  # Qwen, too
MISTRAL = ToolFormat("mistral", "[", "]", listed=True)  # after the control token [TOOL_CALLS]
# Each call follows [TOOL_CALLS], its arguments [ARGS]: both control tokens.
MISTRAL_NAMED = ToolFormat("mistral named", "", "", named=True)
LLAMA3 = ToolFormat("llama3", "", "", key="parameters")

HARMONY = ToolFormat("harmony", "", "")  # gpt-oss; see `harmony.HarmonyParser`

# What a template contains, in order of precedence, and its format; None: it is not supported.
_FORMATS: tuple[tuple[str, ToolFormat | None], ...] = (
    ("<arg_key>", None),  # GLM
    ("<function=", None),  # Qwen3-Coder
    ("[CALL_ID]", None),  # Mistral, versions 11 and 12 of its tokenizer
    ("[ARGS]", MISTRAL_NAMED),
    ("<｜tool▁call▁begin｜>", None),  # DeepSeek
    ("<|channel|>", HARMONY),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3),
)


def find_format(template: str) -> tuple[ToolFormat, bool]:
    """Return the format of a template's tool calls, and whether the template describes the tools.

    A template without tools gets `HERMES`, and `with_tool_texts` describes the tools. ApiError: the
    format is not supported.
    """
    for sign, form in _FORMATS:
        if sign in template and "tool" in template:
            if form is None:
                text = f"the format of tool calls of this model ({sign}) is not supported"
                raise ApiError(400, text, "tools", "unsupported_value")
            return form, True
    return HERMES, False


def with_tool_texts(messages: Messages, tools: Sequence[Tool]) -> Messages:
    """Return the messages for a template without tools: descriptions, calls and results as text."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    about = (
        f"You can call these functions:\n{listed}\nTo call one, answer with\n<tool_call>\n"
        '{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    )
    made = without_tools(messages)
    if made[0]["role"] == "system":
        return [{**made[0], "content": f"{made[0]['content']}\n\n{about}"}, *made[1:]]
    return [{"role": "system", "content": about}, *made]


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


def with_parsed_arguments(messages: list[Any]) -> list[Any]:
    """Return the messages with the arguments of earlier tool calls as objects, as templates expect.

    ApiError: a call is malformed.
    """
    return [_parsed(f"messages[{i}]", each) for i, each in enumerate(messages)]


def _parsed(where: str, message: Any) -> Any:
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
        made.append({**call, "function": {"name": name, "arguments": arguments}})
    return {**message, "tool_calls": made}


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


# -- grammars
def call_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool) -> str:
    """Return the Lark grammar of answers that call one of ``tools``, or several times if so."""
    rules = []
    for index, tool in enumerate(tools):
        own = tool["function"]
        head, tail = f'{{"name": "{own["name"]}", "{form.key}": ', '"}"'
        if form is HARMONY:
            head = f"<|channel|>commentary to=functions.{own['name']} <|constrain|>json<|message|>"
            tail, several = "", False  # the token <|call|> ends the answer
        elif form.named:
            head, tail = own["name"], ""
        schema = json.dumps({**own["parameters"], **_SPACING})
        rules.append(f"call_{index}: {json.dumps(head)} %json {schema} {tail}")
    some = " | ".join(f"call_{index}" for index in range(len(tools)))
    if form.listed:
        start = '"[" call ("," " "? call)* "]"' if several else '"[" call "]"'
    elif form.begin:
        begin, end = json.dumps(form.begin + "\n"), json.dumps("\n" + form.end)
        one = f"{begin} call {end}"
        start = f'{one} ("\\n" {one})*' if several else one
    elif form.named:
        start = "call+" if several else "call"
    else:
        start = 'call (";" " "? call)*' if several else "call"
    return "\n".join([f"start: {start}", f"call: {some}", *rules])
