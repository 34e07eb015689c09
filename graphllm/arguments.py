"""Checks of arguments: a rule for each says what it accepts, and makes a plain Python value of it.

A rule is called with the argument's name and value. It returns the value as the type that the code
works with (NumPy scalars become Python's), or raises a RequestError of one line that names the
argument, shows the value and says what is wanted.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError

Rule = Callable[[str, Any], Any]  # name, value -> value
MAX_MAGNITUDE = 1e30  # what float32 holds, with room for products
_SHOWN = 80  # characters of a value in an error


def quote(value: object) -> str:
    """A value as errors show it: on one line, and not longer than a line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # whatever a user's __repr__ may raise
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def invalid_argument(name: str, value: object, wanted: str) -> RequestError:
    """The error for a value that is not what is ``wanted``."""
    return RequestError(f"{name} = {quote(value)} must be {wanted}", argument=name)


def as_int(value: object) -> int | None:
    """An int, or what NumPy has for one, as an int; None for anything else, bools included."""
    if type(value) is int:
        return value
    if _is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_bool(value: object) -> bool:
    """Whether it is Python's or NumPy's, without an import of NumPy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


@dataclass(frozen=True)
class Integer:
    """A whole number from ``least`` to ``most``, by default without an upper bound."""

    least: int = 0
    most: int | None = None

    def __call__(self, name: str, value: Any) -> int:
        number = as_int(value)
        if number is None:
            raise invalid_argument(name, value, "a whole number")
        if number < self.least or (self.most is not None and number > self.most):
            bits = (self.most or 0).bit_length()
            within = f"in {self.least}..2^{bits}-1" if self.most else f"at least {self.least}"
            raise invalid_argument(name, value, within)
        return number


@dataclass(frozen=True)
class Real:
    """A finite number from ``least`` (not ``least`` itself, if ``above``) to ``most``."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    _size = f"below {MAX_MAGNITUDE:g} in size"

    def __call__(self, name: str, value: Any) -> float:
        if type(value) is not float and (not isinstance(value, numbers.Real) or _is_bool(value)):
            raise invalid_argument(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise invalid_argument(name, value, self._size) from None
        if not math.isfinite(number):
            raise invalid_argument(name, value, "a finite number")
        low = number <= self.least if self.above else number < self.least
        if low or number > self.most:
            raise invalid_argument(name, value, self._range())
        if abs(number) >= MAX_MAGNITUDE:
            raise invalid_argument(name, value, self._size)
        return number

    def _range(self) -> str:
        if self.most < math.inf:
            return f"in {'(' if self.above else '['}{self.least:g}, {self.most:g}]"
        return f"{'above' if self.above else 'at least'} {self.least:g}"


def flag(name: str, value: Any) -> bool:
    """True or False, or what NumPy has for them."""
    if not _is_bool(value):
        raise invalid_argument(name, value, "True or False")
    return bool(value)


def text(name: str, value: Any) -> str:
    """A str that is not empty."""
    if not isinstance(value, str) or not value:
        raise invalid_argument(name, value, "a text that is not empty")
    return str(value)


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """A str or a path, not empty and without NUL characters."""
    if isinstance(value, (str, os.PathLike)):
        as_text = os.fspath(value)
        if isinstance(as_text, str) and as_text and "\0" not in as_text:
            return value
    raise invalid_argument(name, value, "a path")


def function(name: str, value: Any) -> Callable[..., Any]:
    """Anything that can be called."""
    if not callable(value):
        raise invalid_argument(name, value, "a function")
    return value


@dataclass(frozen=True)
class OneOf:
    """One of some texts."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            known = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise invalid_argument(name, value, known)
        return value


@dataclass(frozen=True)
class Optional:
    """None, or what ``rule`` accepts."""

    rule: Rule

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.rule(name, value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A text, or any iterable of texts, none of them empty."""
    items = (value,) if isinstance(value, str) else _items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise invalid_argument(name, value if items is None else items, "texts that are not empty")
    return tuple(map(str, items))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Any iterable of whole numbers from 0 on."""
    items = _items(value)
    ids = None if items is None else [as_int(item) for item in items]
    if ids is None or any(i is None or i < 0 for i in ids):
        raise invalid_argument(
            name, value if items is None else items, "token ids, whole numbers from 0 on"
        )
    return tuple(i for i in ids if i is not None)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping whose keys are texts."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid_argument(name, value, "a mapping with texts as keys")
    return dict(value)


def text_mapping(name: str, value: Any) -> dict[str, str]:
    """A mapping of texts to texts."""
    found = mapping(name, value)
    if not all(isinstance(item, str) for item in found.values()):
        raise invalid_argument(name, value, "a mapping of texts to texts")
    return found


def _items(value: Any) -> tuple[Any, ...] | None:
    """The elements of an iterable, which is gone through once; None for what is none, and for
    texts, bytes and mappings, whose elements nobody means."""
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # a NumPy array without axes
        return None


def check(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` as the rules of the same names turn them. RequestError as these raise it."""
    return {name: rules[name](name, value) for name, value in values.items()}


def unknown_argument(
    name: str, known: Iterable[str], aliases: Mapping[str, str], where: str
) -> RequestError:
    """The error for an argument that ``where`` does not have, with the nearest that it has."""
    names = [*known, *aliases]
    near = difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"nearest: {aliases.get(near[0], near[0])}; " if near else ""
    return RequestError(f"{where} has no argument {name!r}; {hint}known: {', '.join(known)}")
