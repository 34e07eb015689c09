"""JSON schemas of the values that the rules of fields accept, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..arguments import (
    MAX_MAGNITUDE,
    Integer,
    OneOf,
    Real,
    Rule,
    flag,
    mapping,
    text,
    token_ids,
)

Shape = dict[str, Any]
AnyRule = TypeVar("AnyRule", bound=Rule)
STRING: Shape = {"type": "string"}
OBJECT: Shape = {"type": "object"}
_IDS: Shape = {"type": "array", "items": {"type": "integer", "minimum": 0}}

_SHAPES: dict[Any, Shape] = {
    flag: {"type": "boolean"},
    mapping: OBJECT,
    text: {"type": "string", "minLength": 1},
    token_ids: _IDS,
}


def accepts(shape: Shape) -> Callable[[AnyRule], AnyRule]:
    """Return a decorator that states the JSON schema of what a rule accepts.

    A rule may refuse values that the schema allows, but accepts no others.
    """

    def state(rule: AnyRule) -> AnyRule:
        _SHAPES[rule] = shape
        return rule

    return state


def shape_of(rule: Rule) -> Shape:
    """Return the JSON schema of the values that a rule accepts."""
    if isinstance(rule, Integer):
        most = {} if rule.most is None else {"maximum": rule.most}
        return {"type": "integer", "minimum": rule.least, **most}
    if isinstance(rule, Real):
        least = {"exclusiveMinimum" if rule.above else "minimum": rule.least}
        return {"type": "number", **least, "maximum": min(rule.most, MAX_MAGNITUDE)}
    if isinstance(rule, OneOf):
        return {"enum": list(rule.choices)}
    stated = getattr(rule, "shape", None)
    return _SHAPES[rule] if stated is None else stated


def array(items: Shape, least: int = 1, most: int | None = None) -> Shape:
    """Return the schema of a list."""
    return {"type": "array", "items": items, "minItems": least} | (
        {} if most is None else {"maxItems": most}
    )


def one_of(*shapes: Shape) -> Shape:
    """Return the schema of a value that matches one of ``shapes``."""
    return {"anyOf": list(shapes)}


def fields(*required: str, **properties: Shape) -> Shape:
    """Return the schema of an object; all of its properties may be missing but ``required``."""
    return {"type": "object", "properties": properties, "required": list(required)}
