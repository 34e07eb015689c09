"""What can be a prompt: a text, or token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..arguments import as_int, invalid_argument, quote
from ..errors import RequestError

Prompt = str | Sequence[int]


def parse_prompt(value: Any, where: str) -> str | list[int]:
    """One prompt of the function ``where``: its text, or its ids. RequestError."""
    found = parse_prompts(value, where)
    if not found:
        raise RequestError("the prompt is empty")
    if isinstance(found, tuple):
        raise RequestError(f"{where} takes one prompt; llm.generate takes several")
    return found


def parse_prompts(value: Any, where: str) -> str | list[int] | tuple[str | list[int], ...]:
    """One prompt, or a tuple of prompts if ``value`` is an iterable of them. RequestError."""
    if isinstance(value, str):
        return str(value)
    items = _items(value, where)
    if items and not any(isinstance(item, (str, Iterable)) and _has_axes(item) for item in items):
        return _ids(items, where)
    return tuple(
        str(item) if isinstance(item, str) else _ids(_items(item, where), where) for item in items
    )


def _items(value: Any, where: str) -> list[Any]:
    """The elements of what is no text. RequestError for what has none, and for messages."""
    if isinstance(value, Mapping):
        raise _messages(where) if "role" in value else _no_prompt(value)
    if isinstance(value, (bytes, bytearray)) or not isinstance(value, Iterable):
        raise _no_prompt(value)
    items = list(value)
    if any(isinstance(item, Mapping) for item in items):
        raise _messages(where)
    return items


def _has_axes(item: Any) -> bool:
    """Whether it holds elements; a scalar of NumPy or torch does not."""
    return getattr(item, "ndim", 1) != 0


def _ids(items: Iterable[Any], where: str) -> list[int]:
    ids = []
    for item in items:
        number = as_int(item)
        if number is None:
            raise RequestError(f"the prompt of {where} holds {quote(item)}, which is no token id")
        ids.append(number)
    return ids


def _no_prompt(value: Any) -> RequestError:
    return invalid_argument("prompt", value, "a text or token ids")


def _messages(where: str) -> RequestError:
    return RequestError(f"{where} takes a text or token ids; messages go to llm.chat")
