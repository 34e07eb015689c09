"""Prompts as llama.cpp's server takes them: texts and token ids, also mixed in one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arguments import invalid_argument, token_ids
from ..tokenizer import Tokenizer
from .errors import ApiError
from .json_shapes import STRING, Shape, array, fields, one_of

Parts = list[str | int]  # of a prompt: texts and token ids
_EXPECTED = "a string, token ids, or a list of either"
_MIXED = array(one_of(STRING, {"type": "integer", "minimum": 0}))
PROMPT: Shape = one_of(STRING, _MIXED, fields("prompt_string", prompt_string=STRING))


def prompt_list(name: str, value: Any, most: int) -> list[Parts]:
    """Return the prompts of a field, at least one and at most ``most``.

    A list with a token id is one prompt, any other list has a prompt in each entry. RequestError,
    ApiError: the value is malformed.
    """
    several = isinstance(value, list) and not any(isinstance(each, int) for each in value)
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
