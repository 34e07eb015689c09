"""``chat_template_kwargs``: variables of the chat template that a request sets.

Source: vLLM and llama.cpp, whose clients turn off reasoning with ``{"enable_thinking": false}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..arguments import invalid_argument, mapping
from ..chat.messages import to_plain_data
from ..errors import RequestError
from .errors import ApiError
from .json_shapes import OBJECT, accepts

MAX_CHARS, MAX_NAME = 1 << 16, 64  # of the JSON text of all variables, and of a name
# What other fields set, and arguments of the functions that render a template.
_RESERVED = {
    "messages", "tools", "add_generation_prompt", "continue_final_message", "parse_special", "self",
}  # fmt: skip


@accepts(OBJECT)
def template_variables(name: str, value: Any) -> dict[str, Any]:
    """An object of variables; those that other fields or the model set are refused."""
    given = mapping(name, value)
    for key in given:
        if len(key) > MAX_NAME or not key.isidentifier():
            raise ApiError(400, f"{name}: {key[:MAX_NAME]!r} is no name of a variable", name)
        if key in _RESERVED or key.endswith("_token"):  # such as bos_token
            text = f"{name}.{key} is not supported by this server"
            raise ApiError(400, text, name, "unsupported_value")
    try:
        plain: dict[str, Any] = to_plain_data(given, name)
    except RequestError as error:  # too deeply nested, for one
        raise RequestError(str(error), argument=name) from None
    if len(json.dumps(plain, ensure_ascii=False)) > MAX_CHARS:
        raise invalid_argument(name, value, f"an object of at most {MAX_CHARS} characters")
    return plain


def with_variables(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that fields of a request set, and those that it gives by name.

    ApiError: it sets one of them twice.
    """
    if both := sorted(own.keys() & given.keys()):
        text = f"chat_template_kwargs.{both[0]} is set by another field, too: give one of them"
        raise ApiError(400, text, "chat_template_kwargs")
    return {**own, **given}
