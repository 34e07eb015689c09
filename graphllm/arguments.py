"""Argument checks: one rule per argument validates it and converts it to a plain Python value.

A rule is called with the name and the value of an argument. It returns the value in the type that
the code uses (NumPy scalars become Python's), or raises a one-line RequestError that names the
argument, shows the value and states what is accepted.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError

Rule = Callable[[str, Any], Any]  # (name, value) -> value
MAX_MAGNITUDE = 1e30  # fits float32, with headroom for products
_SHOWN = 80  # maximum number of characters of a value in an error
_READ = 1000  # characters that these are chosen from; sequences of spaces become one


def quote(value: object) -> str:
    """Format a value for an error: on one line, with at most 80 characters."""
    try:
        text = " ".join(_repr(value, _READ).split())
    except Exception:  # a user's __repr__ may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _repr(value: object, room: int) -> str:
    """Return ``repr(value)``, of which all but the first ``room`` characters may be missing.

    A request may have lists with millions of elements.
    """
    if type(value) is str:
        return repr(value[:room])
    if type(value) is not list:
        return repr(value)
    shown: list[str] = []
    for item in value:
        if room <= 0:
            break
        shown.append(_repr(item, room))
        room -= len(shown[-1]) + 2
    return f"[{', '.join(shown)}]"


def invalid_argument(name: str, value: object, expected: str) -> RequestError:
    """Return the error "``name`` = ``value`` must be ``expected``"."""
    return RequestError(f"{name} = {quote(value)} must be {expected}", argument=name)


def as_int(value: object) -> int | None:
    """Convert a Python or NumPy integer to int; return None for anything else, bools included."""
    if type(value) is int:
        return value
    if _is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def are_ints(items: Collection[object]) -> bool:
    """Whether there are items and each is an int, no bool; in a tenth of the time of `as_int`."""
    return {*map(type, items)} == {int}


def check_token_ids(ids: Iterable[int], vocab: int, name: str | None = None) -> None:
    """Raise RequestError if an id is not in a vocabulary of ``vocab`` tokens.

    ``name``: argument that has the ids.
    """
    own = [*ids]
    if are_ints(own) and min(own) >= 0 and max(own) < vocab:
        return  # in a tenth of the time of the loop
    for token in own:
        if as_int(token) is None or not 0 <= token < vocab:
            raise RequestError(f"token id {quote(token)} is not in 0..{vocab - 1}", name)


def _is_bool(value: object) -> bool:
    """Return whether ``value`` is a Python or NumPy bool, without importing NumPy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _bound(number: int) -> str:
    """Format an upper bound; a large power of two minus one as such."""
    power = number > 1000 and not number & (number + 1)
    return f"2^{number.bit_length()}-1" if power else str(number)


@dataclass(frozen=True)
class Integer:
    """An integer from ``least`` to ``most``, by default without an upper bound."""

    least: int = 0
    most: int | None = None

    def __call__(self, name: str, value: Any) -> int:
        number = as_int(value)
        if number is None:
            raise invalid_argument(name, value, "an integer")
        if number < self.least or (self.most is not None and number > self.most):
            most = self.most
            within = (
                f"at least {self.least}" if most is None else f"in {self.least}..{_bound(most)}"
            )
            raise invalid_argument(name, value, within)
        return number


@dataclass(frozen=True)
class Real:
    """A finite number from ``least`` (exclusive if ``above``) to ``most``."""

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
    """A Python or NumPy bool."""
    if not _is_bool(value):
        raise invalid_argument(name, value, "True or False")
    return bool(value)


def text(name: str, value: Any) -> str:
    """A non-empty string."""
    if not isinstance(value, str) or not value:
        raise invalid_argument(name, value, "a non-empty string")
    return str(value)


def path(name: str, value: Any) -> str | os.PathLike[str]:
    """A non-empty string or path without NUL characters."""
    if isinstance(value, (str, os.PathLike)):
        as_text = os.fspath(value)
        if isinstance(as_text, str) and as_text and "\0" not in as_text:
            return value
    raise invalid_argument(name, value, "a path")


def function(name: str, value: Any) -> Callable[..., Any]:
    """Any callable."""
    if not callable(value):
        raise invalid_argument(name, value, "a function")
    return value


def functions(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """An iterable of callables."""
    items = _items(value)
    if items is None or not all(map(callable, items)):
        raise invalid_argument(name, value if items is None else items, "a list of functions")
    return items


@dataclass(frozen=True)
class OneOf:
    """One of the strings ``choices``."""

    choices: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            known = f"{', '.join(self.choices[:-1])} or {self.choices[-1]}"
            raise invalid_argument(name, value, known)
        return value


@dataclass(frozen=True)
class Optional:
    """None, or a value that ``rule`` accepts."""

    rule: Rule

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.rule(name, value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A non-empty string, or an iterable of non-empty strings."""
    items = (value,) if isinstance(value, str) else _items(value)
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise invalid_argument(name, value if items is None else items, "non-empty strings")
    return tuple(map(str, items))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """An iterable of integers of at least 0."""
    items = _items(value)
    if items and are_ints(items) and min(items) >= 0:
        return items
    ids = None if items is None else [as_int(item) for item in items]
    if ids is None or any(i is None or i < 0 for i in ids):
        raise invalid_argument(
            name, value if items is None else items, "token ids, integers of at least 0"
        )
    return tuple(i for i in ids if i is not None)


def token_biases(name: str, value: Any) -> dict[int, float]:
    """A mapping of token ids to biases, numbers that are finite or -inf."""
    what = "a mapping of token ids to numbers"
    if not isinstance(value, Mapping):
        raise invalid_argument(name, value, what)
    ids = [as_int(key) for key in value]
    if any(i is None or i < 0 for i in ids):
        raise invalid_argument(name, value, what)
    rule = Real()
    biases = [x if x == -math.inf else rule(name, x) for x in value.values()]
    return {i: float(x) for i, x in zip(ids, biases) if i is not None}


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping with string keys."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise invalid_argument(name, value, "a mapping with string keys")
    return dict(value)


def text_mapping(name: str, value: Any) -> dict[str, str]:
    """A mapping of strings to strings."""
    found = mapping(name, value)
    if not all(isinstance(item, str) for item in found.values()):
        raise invalid_argument(name, value, "a mapping of strings to strings")
    return found


def _items(value: Any) -> tuple[Any, ...] | None:
    """Return the elements of an iterable, read once.

    None for values that are not iterable, and for strings, bytes and mappings, which are not meant
    as sequences.
    """
    if isinstance(value, (str, bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    try:
        return tuple(value)
    except TypeError:  # a 0-d NumPy array
        return None


def check(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """Apply to each of ``values`` the rule of the same name. Raises RequestError."""
    return {name: rules[name](name, value) for name, value in values.items()}


def unknown_argument(
    name: str, known: Iterable[str], aliases: Mapping[str, str], where: str
) -> RequestError:
    """Return the error for an argument that ``where`` does not have.

    It names the closest known argument, or all of them if none is close.

    Args:
        name: the unknown argument.
        known: names of the arguments that exist.
        aliases: other names of arguments, such as another library's -> the name here.
        where: what was called, as in "llm.generate".
    """
    names = [*known, *aliases]
    near = difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"nearest: {aliases.get(near[0], near[0])}" if near else f"known: {', '.join(known)}"
    return RequestError(f"{where} has no argument {name!r}; {hint}")
