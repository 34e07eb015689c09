"""Validation of chat messages: they become plain data of JSON's types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import RequestError
from ..tokenizer.decoding import replace_surrogates

Message = Mapping[str, Any]
MAX_DEPTH = 100  # of nested lists and mappings
_MAX_INTEGER = 1 << 10_000  # Python refuses to print much larger ones


def normalize_messages(messages: Iterable[Message], where: str = "a chat") -> list[dict[str, Any]]:
    """Return the messages as plain data for a chat template.

    A message is a mapping with a ``role`` and a ``content``: a string, or a list of text parts such
    as ``{"type": "text", "text": "..."}``. A message with ``tool_calls`` needs no content. Other
    keys may have any value that JSON can express.

    Args:
        messages: the messages.
        where: name of the called function, for error messages.

    Raises:
        RequestError: names the message and what is wrong with it.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(
            f"{where} takes a list of messages with role and content, not {_kind(messages)}; "
            "pass a string to llm.generate"
        )
    found = [_message(f"message {index}", message) for index, message in enumerate(messages)]
    if not found:
        raise RequestError(f"{where} needs at least one message")
    return found


def to_plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of ``value`` made of JSON's types. RequestError: a part has another type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return replace_surrogates(str.__str__(value))
    if isinstance(value, int):
        if abs(value) >= _MAX_INTEGER:
            raise RequestError(
                f"{where} is an integer of {value.bit_length()} bits, which is too large"
            )
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{where} is {value}, which JSON cannot express")
        return float(value)
    if depth == MAX_DEPTH:
        raise RequestError(f"{where[:100]}: more than {MAX_DEPTH} nested lists or mappings")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{where} has the key {key!r:.100}, which is not a string")
        return {
            to_plain_data(key, where): to_plain_data(item, f"{where}: {key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [to_plain_data(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where} is {_kind(value)}, which JSON cannot express")


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {_kind(message)}, not a mapping")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role")
    result: dict[str, Any] = to_plain_data(message, where)
    content = result.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(f"{where}: content[{index}]", part)
    elif not isinstance(content, str) and (content is not None or not result.get("tool_calls")):
        raise RequestError(f"{where} has no content: a string or a list of text parts")
    return result


def _check_part(where: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise RequestError(f'{where} is not a mapping with a type, such as {{"type": "text", ...}}')
    if kind != "text":
        raise RequestError(f"{where} is of type {kind!r:.100}; only text is supported")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has no text")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
