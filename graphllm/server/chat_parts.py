"""Parts of chat messages as OpenAI's Responses and Anthropic's Messages have them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from .errors import ApiError

Message = dict[str, Any]


def as_list(name: str, value: Any, what: str) -> list[Any]:
    """Return a list that is not empty. ApiError."""
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{name} must be a list of {what} that is not empty", name)
    return value


def as_object(where: str, value: Any) -> Mapping[str, Any]:
    """Return an object. ApiError: ``where``, a place such as ``input[0]``, has something else."""
    if not isinstance(value, Mapping):
        raise malformed(where, "an object")
    return value


def string(where: str, value: Any) -> str:
    """Return a string. ApiError."""
    if not isinstance(value, str):
        raise malformed(where, "a string")
    return value


def joined_text(where: str, value: Any, kinds: Collection[str]) -> str:
    """Return the text of a string, or of a list of parts with a ``text``, one per line.

    ``kinds``: types that the parts may have. ApiError: a part is malformed or no text.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(where, "a string or a list of texts")
    texts = []
    for index, each in enumerate(value):
        part = as_object(f"{where}[{index}]", each)
        if part.get("type") not in kinds:
            raise unsupported_type(f"{where}[{index}]", part, kinds)
        texts.append(string(f"{where}[{index}].text", part.get("text")))
    return "\n".join(texts)


def arguments(where: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a call: an object, or its JSON text. ApiError."""
    try:
        found = json.loads(value or "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise malformed(where, "a JSON object")
    return found


def assistant(messages: list[Message], after: Collection[str]) -> Message:
    """Return the message of the assistant that goes on, or a new one.

    ``after``: keys, any of which ends a message: what comes now belongs to the next one.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(key) for key in after):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def add_call(message: Message, own: str, name: str, given: dict[str, Any]) -> None:
    """Add a call of a function, with its id ``own``, to a message of the assistant."""
    function = {"name": name, "arguments": given}
    message.setdefault("tool_calls", []).append(
        {"id": own, "type": "function", "function": function}
    )


def with_system(text: str | None, messages: list[Message]) -> list[Message]:
    """Return the messages after a system text; templates accept one system message only."""
    if not text:
        return messages
    if messages[0]["role"] == "system":
        first, *rest = messages
        return [{"role": "system", "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def malformed(where: str, expected: str) -> ApiError:
    """Return the error for a value at a place of the request."""
    return ApiError(400, f"{where} must be {expected}", _field(where))


def unsupported_type(where: str, value: Mapping[str, Any], kinds: Collection[str]) -> ApiError:
    """Return the error for an object with another type."""
    shown = repr(value.get("type"))[:100]
    text = f"{where}.type = {shown} is not supported, only {', '.join(kinds)}"
    return ApiError(400, text, _field(where), "unsupported_value")


def _field(where: str) -> str:
    return where.partition("[")[0].partition(".")[0]
