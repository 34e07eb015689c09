"""Fields of the endpoints of llama.cpp's server."""

from __future__ import annotations

import math
from typing import Any

from ..arguments import Integer, OneOf, Real, flag, invalid_argument, token_ids
from .chat_parts import as_object, malformed, string
from .fields import (
    COMMON,
    COUNT,
    MAX_BIASES,
    MAX_CHOICES,
    TEMPLATE,
    TOP_LOGPROBS,
    Field,
    Unsupported,
    any_text,
    messages_field,
    token_ids_up_to,
)
from .json_shapes import OBJECT, STRING, accepts, array, fields, one_of, shape_of
from .prompt_parts import PROMPT, Parts, prompt_list
from .reasoning import EFFORTS
from .tools import tool_choice_field, tools_field

MAX_TEXT = 1_000_000  # characters that ``/tokenize`` takes, and ids that ``/detokenize`` takes


@accepts(shape_of(Integer(-1, 2**32 - 1)))
def _seed(name: str, value: Any) -> int | None:
    """A seed; -1 chooses one."""
    found = Integer(-1, 2**32 - 1)(name, value)
    return None if found in (-1, 2**32 - 1) else found


@accepts(array(fields("text", text=STRING, filename=STRING), 0))
def _files(name: str, value: Any) -> list[tuple[str, str]]:
    """Names and texts of files."""
    if not isinstance(value, list):
        raise malformed(name, "a list of files")
    found = []
    for index, each in enumerate(value):
        where = f"{name}[{index}]"
        file = as_object(where, each)
        text, own = file.get("text"), file.get("filename", "tmp")
        found.append((string(f"{where}.filename", own), string(f"{where}.text", text)))
    return found


@accepts(one_of(PROMPT, array(PROMPT, 1, MAX_CHOICES)))
def _prompts(name: str, value: Any) -> list[Parts]:
    """A prompt, or a list of prompts."""
    return prompt_list(name, value, MAX_CHOICES)


_BIASES = f"an object or a list of pairs with at most {MAX_BIASES} biases by token id or text"


@accepts(one_of(OBJECT, array(array({}, 2, 2), 0, MAX_BIASES)))
def _biases(name: str, value: Any) -> dict[int | str, float]:
    """Biases by token id or text: an object, or a list of pairs; false bans a token."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise invalid_argument(name, value, _BIASES)
    found: dict[int | str, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise invalid_argument(name, value, _BIASES)
        key, bias = pair
        found[_bias_key(name, key)] = -math.inf if bias is False else Real()(name, bias)
    return found


def _bias_key(name: str, key: Any) -> int | str:
    """Return a token id, also if it is written as the key of an object, or a text."""
    if not isinstance(key, str):
        return token_ids(name, [key])[0]
    return int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key


@accepts(array(STRING, 0))
def _names(name: str, value: Any) -> list[str]:
    """A list of names."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise malformed(name, "a list of strings")
    return value


@accepts({"type": "string", "maxLength": MAX_TEXT})
def _content(name: str, value: Any) -> str:
    """A string of bounded length, also an empty one."""
    if len(found := any_text(name, value)) > MAX_TEXT:
        raise invalid_argument(name, value, f"a string of at most {MAX_TEXT:,} characters")
    return found


NATIVE = COMMON | {
    "prompt": Field(_prompts),
    "n_predict": Field(Integer(-1, COUNT), "max_tokens"),
    "max_tokens": Field(Integer(-1, COUNT), "max_tokens"),
    "seed": Field(_seed, "seed"),
    "return_tokens": Field(flag),
    "cache_prompt": Field(flag),  # whether it is cached changes no answer
    "n": Field(Unsupported((1,))),
    "n_probs": Field(Integer(0, TOP_LOGPROBS)),
    "post_sampling_probs": Field(Unsupported((False,))),
    "response_fields": Field(_names),
    "logit_bias": Field(_biases),
}  # fmt: skip
INFILL = NATIVE | {
    "input_prefix": Field(any_text),
    "input_suffix": Field(any_text),
    "input_extra": Field(_files),
    "prompt": Field(any_text),
}
TOKENIZE = {
    "content": Field(_content),
    "add_special": Field(flag),
    "parse_special": Field(flag),
    "with_pieces": Field(flag),
}
DETOKENIZE = {"tokens": Field(token_ids_up_to(MAX_TEXT))}
APPLY_TEMPLATE = TEMPLATE | {
    "messages": Field(messages_field),
    "tools": Field(tools_field),
    "tool_choice": Field(tool_choice_field),
    "reasoning_effort": Field(OneOf(EFFORTS)),
    "add_generation_prompt": Field(flag),
}
