"""Fields that restrict the form of answers: ``structured_outputs`` and ``guided_*``, as vLLM has
them, and llama.cpp's ``grammar``.

Source: vLLM's ``StructuredOutputsParams`` and the ``guided_*`` parameters before them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..arguments import Rule, flag, invalid_argument, mapping, text
from .errors import ApiError
from .json_shapes import OBJECT, STRING, accepts, array, one_of

MAX_CHOICES, MAX_CHOICE_CHARS = 1024, 1 << 16  # of a list of answers, all together
_GBNF_RULE = "::="  # in every GBNF grammar, and in no Lark grammar outside of strings


class Constraint(NamedTuple):
    """A setting that a field gives a value, where the value decides which one."""

    setting: str
    value: Any


@accepts(STRING)
def grammar_field(name: str, value: Any) -> str | None:
    """A grammar in llama.cpp's GBNF, as Lark; None if it is empty."""
    if not isinstance(value, str):
        raise invalid_argument(name, value, "a string")
    if not value.strip():
        return None
    from ..engine.grammar import lark_from_gbnf  # needs the extra ``structured``

    return lark_from_gbnf(name, value)


@accepts(STRING)
def guided_grammar(name: str, value: Any) -> str | None:
    """A grammar in GBNF or Lark, as Lark."""
    return grammar_field(name, value) if _GBNF_RULE in text(name, value) else value


@accepts(one_of(OBJECT, STRING))
def guided_json(name: str, value: Any) -> Any:
    """A JSON schema: an object, or its text."""
    return value if isinstance(value, str) else mapping(name, value)


@accepts(array(STRING, 1, MAX_CHOICES))
def guided_choice(name: str, value: Any) -> str:
    """A list of answers, as a Lark grammar."""
    listed = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not listed or not all(isinstance(each, str) and each for each in value):
        raise invalid_argument(name, value, f"a list of 1 to {MAX_CHOICES} strings")
    if sum(map(len, value)) > MAX_CHOICE_CHARS:
        raise invalid_argument(name, value, f"at most {MAX_CHOICE_CHARS} characters in all")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)


def _json_object(name: str, value: Any) -> Any:
    """True: any JSON object."""
    return {"type": "object"} if flag(name, value) else None


_KINDS: dict[str, tuple[Rule, str]] = {  # rule and setting of each kind
    "json": (guided_json, "json_schema"),
    "regex": (text, "regex"),
    "choice": (guided_choice, "grammar"),
    "grammar": (guided_grammar, "grammar"),
    "json_object": (_json_object, "json_schema"),
}


@accepts(OBJECT)
def structured_outputs(name: str, value: Any) -> Constraint | None:
    """An object with one of the keys json, regex, choice, grammar and json_object."""
    given = {key: each for key, each in mapping(name, value).items() if each is not None}
    if unknown := [key for key in given if key not in _KINDS]:
        what = f"{name}.{unknown[0][:64]}"
        raise ApiError(400, f"{what} is not supported by this server", name, "unsupported_value")
    if len(given) != 1:
        raise ApiError(400, f"{name} must have one of the keys {', '.join(_KINDS)}", name)
    ((kind, own),) = given.items()
    rule, setting = _KINDS[kind]
    found = rule(f"{name}.{kind}", own)
    return None if found is None else Constraint(setting, found)


def is_restricted(values: Mapping[str, Any]) -> bool:
    """Whether fields of a request restrict the form of its answers."""
    return any(values.get(name) is not None for name in FORMATS)


# Fields of requests that restrict the form of answers.
VLLM_FORMATS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
FORMATS = ("response_format", "json_schema", "grammar", *VLLM_FORMATS)
