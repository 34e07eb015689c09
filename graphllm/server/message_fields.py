"""Fields of Anthropic's ``/v1/messages``, and the chat that its messages describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..arguments import Integer, OneOf, Real, flag, mapping
from .chat_parts import (
    Message,
    add_call,
    arguments,
    as_list,
    as_object,
    joined_text,
    malformed,
    string,
    unsupported_type,
)
from .errors import ApiError
from .fields import (
    BEYOND,
    COUNT,
    SEED,
    TEMPLATE,
    TOP_K,
    Field,
    Unsupported,
    any_text,
    stop_field,
    top_p_field,
)
from .json_shapes import OBJECT, STRING, accepts, array, fields, one_of
from .tools import MAX_TOOLS, Tool, checked_tools, function_tool, named_choice, text_format

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_TYPE = OneOf(("auto", "any", "tool", "none"))


@accepts(array(fields("role", "content", role={"enum": ["user", "assistant"]},
                       content=one_of(STRING, array(OBJECT, 0)))))  # fmt: skip
def messages_field(name: str, value: Any) -> list[Message]:
    """The messages of a chat, whose contents are strings or lists of blocks."""
    messages: list[Message] = []
    for index, each in enumerate(as_list(name, value, "messages")):
        where = f"{name}[{index}]"
        given = as_object(where, each)
        role, content = given.get("role"), given.get("content")
        if role not in ("user", "assistant"):
            raise malformed(f"{where}.role", '"user" or "assistant"')
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise malformed(f"{where}.content", "a string or a list of blocks")
        read = _user_messages if role == "user" else _assistant_message
        messages += read([(f"{where}.content[{at}]", block) for at, block in enumerate(blocks)])
    if not messages or messages[-1]["role"] == "assistant":
        text = f"{name} must end with a message of the user that is not empty"
        raise ApiError(400, text, name)
    return messages


Places = Sequence[tuple[str, Any]]  # blocks after their places in the request


def _user_messages(blocks: Places) -> list[Message]:
    """Return the messages of a user's blocks: results of tools, and texts between them."""
    messages: list[Message] = []
    texts: list[str] = []  # of the last message

    def end_text() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for where, value in blocks:
        block = as_object(where, value)
        if block.get("type") == "text":
            texts.append(string(f"{where}.text", block.get("text")))
        elif block.get("type") == "tool_result":
            end_text()
            own = string(f"{where}.tool_use_id", block.get("tool_use_id"))
            text = joined_text(f"{where}.content", block.get("content") or "", ("text",))
            if block.get("is_error"):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": own, "content": text})
        else:
            raise unsupported_type(where, block, ("text", "tool_result"))
    end_text()
    return messages


def _assistant_message(blocks: Places) -> list[Message]:
    """Return the message of an assistant's blocks."""
    texts, thoughts = list[str](), list[str]()
    message: Message = {"role": "assistant"}
    for where, value in blocks:
        block = as_object(where, value)
        kind = block.get("type")
        if kind == "text":
            texts.append(string(f"{where}.text", block.get("text")))
        elif kind == "thinking":
            thoughts.append(string(f"{where}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            own, name = (string(f"{where}.{key}", block.get(key)) for key in ("id", "name"))
            add_call(message, own, name, arguments(f"{where}.input", block.get("input")))
        else:
            raise unsupported_type(where, block, ("text", "thinking", "tool_use"))
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [message]


@accepts(one_of(STRING, array(fields("type", "text", type={"const": "text"}, text=STRING), 0)))
def _system(name: str, value: Any) -> str:
    """A string, or a list of text blocks."""
    return joined_text(name, value, ("text",))


@accepts(array(fields("name", name=STRING), 0, MAX_TOOLS))
def _tools(name: str, value: Any) -> list[Tool]:
    """A list of tools with an ``input_schema``; those that run on the server are refused."""

    def read(where: str, tool: Any) -> Tool:
        if as_object(where, tool).get("type") not in (None, "custom"):
            raise unsupported_type(where, tool, ("custom",))
        return function_tool(where, tool, "input_schema")

    return checked_tools(name, value, read)


@accepts(fields("type", type={"enum": ["auto", "any", "tool", "none"]}))
def _tool_choice(name: str, value: Any) -> tuple[Any, bool]:
    """The choice as OpenAI has it, and whether an answer may have several calls."""
    given = mapping(name, value)
    kind = _CHOICE_TYPE(f"{name}.type", given.get("type"))
    single = given.get("disable_parallel_tool_use")
    several = single is None or not flag(f"{name}.disable_parallel_tool_use", single)
    if kind == "tool":
        return named_choice(name, {"name": string(f"{name}.name", given.get("name"))}), several
    return _CHOICES[kind], several


@accepts(fields("type", type={"enum": ["enabled", "disabled", "adaptive"]}))
def _thinking(name: str, value: Any) -> str | None:
    """How much the model reasons: an effort, or None for the model's own choice."""
    known = OneOf(("enabled", "disabled", "adaptive"))
    kind = known(f"{name}.type", mapping(name, value).get("type"))
    return {"enabled": "medium", "disabled": "none"}.get(kind)


@accepts(OBJECT)
def _output_config(name: str, value: Any) -> tuple[str | None, Any]:
    """The effort, and the JSON schema of the answer."""
    given = mapping(name, value)
    effort, form = given.get("effort"), given.get("format")
    if effort is not None:
        effort = _EFFORTS[OneOf(tuple(_EFFORTS))(f"{name}.effort", effort)]
    return effort, None if form is None else text_format(f"{name}.format", form)


_PROMPT = TEMPLATE | {
    "model": Field(any_text),
    "messages": Field(messages_field),
    "system": Field(_system),
    "tools": Field(_tools),
    "tool_choice": Field(_tool_choice),
    "thinking": Field(_thinking),
    "output_config": Field(_output_config),
    "mcp_servers": Field(Unsupported(([],))),
    "container": Field(Unsupported()),
    "context_management": Field(Unsupported()),
}
COUNT_TOKENS = _PROMPT
MESSAGES = BEYOND | _PROMPT | {
    "max_tokens": Field(Integer(1, COUNT), "max_tokens"),
    "stream": Field(flag),
    "stop_sequences": Field(stop_field, "stop"),
    "temperature": Field(Real(0, 2), "temperature"),
    "top_p": Field(top_p_field, "top_p"),
    "top_k": TOP_K,
    "seed": SEED,
    "json_schema": Field(Unsupported()),  # ``output_config`` has it
    "n": Field(Unsupported((1,))),
}  # fmt: skip


def chat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields as those of ``/v1/chat/completions``."""
    choice, several = values.get("tool_choice", ("auto", True))
    effort, schema = values.get("output_config", (None, None))
    made = {
        "parallel_tool_calls": several,
        "response_format": schema,
        "reasoning_effort": _reasoning_effort(values, effort),
        # Clients send ``thinking`` by default, to models that cannot reason, too.
        "reasoning_required": effort is not None,
    }
    return {**values, **made} | ({"tool_choice": choice} if "tool_choice" in values else {})


def _reasoning_effort(values: Mapping[str, Any], effort: str | None) -> str | None:
    """Return the effort of reasoning, which ``thinking`` may turn off; None: the model's choice."""
    wanted = values.get("thinking")
    return "none" if wanted == "none" else effort or wanted
