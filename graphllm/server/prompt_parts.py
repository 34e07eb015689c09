"""Prompts as llama.cpp's server takes them: texts and token ids, also mixed in one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import invalid_argument, token_ids
from ..errors import ContextExceeded
from ..tokenizer import Tokenizer
from .errors import ApiError, api_error
from .json_shapes import STRING, Shape, array, fields, one_of

Parts = list[str | int]  # of a prompt: texts and token ids
_EXPECTED = "a string, token ids, or a list of either"
_MIXED = array(one_of(STRING, {"type": "integer", "minimum": 0}))
PROMPT: Shape = one_of(STRING, _MIXED, fields("prompt_string", prompt_string=STRING))


def check_prompt_sizes(body: Any, context: int) -> None:
    """Refuse a body whose ``prompt`` has more token ids than the context.

    A list that begins with an id is judged by its length: the rule of the field would look at each
    of millions of ids, which the event loop has no time for. ApiError: a list is too long.
    """
    value = body.get("prompt") if isinstance(body, dict) else None
    prompts: list[Any] = [value]
    if isinstance(value, list) and value and isinstance(value[0], list):
        prompts = value
    for each in prompts:
        if not isinstance(each, list) or len(each) <= context:
            continue
        count = len(each) if isinstance(each[0], int) else [*map(type, each)].count(int)
        if count > context:
            raise api_error(ContextExceeded(count, context), "prompt")


def prompt_list(name: str, value: Any, most: int) -> list[Parts]:
    """Return the prompts of a field, at least one and at most ``most``.

    A list with a token id is one prompt, any other list has a prompt in each entry. RequestError,
    ApiError: the value is malformed.
    """
    several = isinstance(value, list) and {*map(type, value)}.isdisjoint((int, bool))
    prompts = value if several else [value]
    if not prompts or len(prompts) > most:
        raise invalid_argument(name, value, f"at least one prompt and at most {most}")
    return [_parts(name, each) for each in prompts]


def _parts(name: str, value: Any) -> Parts:
    if isinstance(value, dict) and "prompt_string" in value:
        if value.get("multimodal_data"):
            text = f"{name}.multimodal_data is not supported by this server"
            raise ApiError(400, text, name, "unsupported_value")
        value = value["prompt_string"]
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise invalid_argument(name, value, _EXPECTED)
    token_ids(name, [part for part in parts if not isinstance(part, str)])
    return parts


def encode_parts(tokenizer: Tokenizer, parts: Parts) -> list[int]:
    """Return the token ids of a prompt. Special tokens are added to a text at its beginning."""
    found: list[int] = []
    for index, part in enumerate(parts):
        found += [part] if isinstance(part, int) else tokenizer.encode(part, add_special=not index)
    return found


def single_text(parts: Sequence[str | int]) -> str | None:
    """Return the text of a prompt that is one text; None for another one."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else None
