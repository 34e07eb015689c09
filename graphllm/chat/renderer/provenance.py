"""Taint tracking: which characters of a rendered text came from the caller.

A plain str belongs to the template: a literal, or a token such as ``bos_token``. Strings of the
caller are `Tracked`, and so is the result of every operation on them. `Tracked` is a subclass of
str, so a template's tests see the unchanged text. Each has a shadow: a str of the same length with
`MARK` in place of each of the caller's characters, white space excepted.

Operations that assemble a prompt keep the origin of each character: concatenation, slices, strip,
split, replace, join, changes of case, formatting. The result of any other operation on text of the
caller counts as the caller's as a whole, so that text of the caller never passes for text of the
template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Undefined

MARK = "\x7f"  # ASCII (fast) and caseless: no operation on shadows changes it
_RUN = re.compile(rf"{MARK}[{MARK}\s]*")
_SLICES = frozenset(("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"))
_CUTS = frozenset(("split", "rsplit", "partition", "rpartition"))
# Applied to a shadow, these methods split and align as on the text itself: they distinguish
# characters only by white space, which shadows keep, or change the length of the result, which is
# checked.
_ALIGNED = frozenset(
    ("upper", "lower", "casefold", "capitalize", "swapcase", "title", "center", "ljust", "rjust",
     "split", "rsplit", "splitlines")
)  # fmt: skip
_OTHERS = frozenset(("replace", "join", "zfill", "expandtabs", "translate"))
METHODS = _SLICES | _CUTS | _ALIGNED | _OTHERS  # methods of str that return text


class _Shadows(dict[int, int]):
    """Table for `str.translate` from a text of the caller to its shadow."""

    def __missing__(self, code: int) -> int:
        self[code] = code if chr(code).isspace() else ord(MARK)
        return self[code]


_SHADOWS = _Shadows()


class Tracked(str):
    """A str with characters of the caller: all of them, or those marked in ``shadow``."""

    __slots__ = ("_shadow",)
    _shadow: str

    def __new__(cls, text: str, shadow: str | None = None) -> Tracked:
        self = str.__new__(cls, text)
        self._shadow = str.translate(text, _SHADOWS) if shadow is None else shadow
        return self

    def __str__(self) -> str:
        return self

    def __getitem__(self, index: Any) -> str:
        return Tracked(str.__getitem__(self, index), self._shadow[index])

    def __iter__(self) -> Iterator[str]:
        return map(Tracked, str.__iter__(self), self._shadow)


def _method(name: str) -> Callable[..., Any]:
    def method(self: str, *args: Any, **kwargs: Any) -> Any:
        return call_method(name, self, args, kwargs)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(Tracked, _name, _method(_name))


def track(value: Any) -> Any:
    """Return a copy of plain data in which every str, keys included, is `Tracked`."""
    if isinstance(value, str):
        return Tracked(value)
    if isinstance(value, list):
        return [track(item) for item in value]
    if isinstance(value, dict):
        return {track(key): track(item) for key, item in value.items()}
    return value


def text_of(value: Any) -> str:
    """Return ``value`` as a template prints it; a list or dict counts as the caller's."""
    if type(value) in (str, Tracked):
        return str(value)
    return str(value) if is_own(value) else Tracked(str(value))


def is_own(value: Any) -> bool:
    """Whether ``value`` cannot contain text of the caller. A list can."""
    return value is None or type(value) is str or isinstance(value, (int, float, Undefined))


def concat(values: Iterable[Any]) -> str:
    """Return the concatenated values as text."""
    texts = [text_of(value) for value in values]
    if all(type(text) is str for text in texts):
        return "".join(texts)
    return Tracked("".join(texts), "".join([_shadow_of(text) for text in texts]))


def caller_spans(text: str) -> list[list[int]]:
    """Return the [start, end) spans of the caller's characters.

    White space between two of them belongs to the span.
    """
    runs = _RUN.finditer(_shadow_of(text))
    return [[found.start(), found.start() + len(found[0].rstrip())] for found in runs]


def call_aligned(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call ``function``; find the origins of its result by calling it with the shadows, too."""
    args, kwargs = list(args), kwargs or {}
    result = function(*args, **kwargs)
    if all(map(is_own, (*args, *kwargs.values()))):
        return result
    try:
        shadow = function(*map(_shadow_of, args), **{k: _shadow_of(v) for k, v in kwargs.items()})
    except (TypeError, ValueError, LookupError):  # such as int() of a shadow
        shadow = None
    return _paired(result, shadow)


def call_opaque(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``function``; its result is the caller's as a whole if an argument is `Tracked`."""
    args = list(args)
    result = function(*args, **kwargs)
    if all(map(is_own, (*args, *kwargs.values()))):
        return result
    return _paired(result, None)


def call_method(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``text.name(*args, **kwargs)`` for one of `METHODS`, with its origins."""
    function = getattr(str, name)
    if name == "join":
        return _join(text, *args, **kwargs)
    if name == "replace":
        return _replace(text, args, kwargs)
    if name in _SLICES:
        result = function(text, *args, **kwargs)
        if name in ("rstrip", "removesuffix"):
            return text[: len(result)]
        rest = result if name == "removeprefix" else str.lstrip(text, *args)
        start = len(text) - len(rest)
        return text[start : start + len(result)]
    separator = args[0] if args else kwargs.get("sep")
    if name in _CUTS and separator is not None:
        result = function(text, *args, **kwargs)
        return type(result)(_cut(text, result, len(separator) if "split" in name else 0))
    if name in _ALIGNED:
        return call_aligned(function, (text, *args), kwargs)
    return call_opaque(function, (text, *args), kwargs)


def _cut(text: str, pieces: Iterable[str], gap: int) -> Iterator[str]:
    """Yield ``pieces`` as slices of ``text``, where ``gap`` characters separate them."""
    start = 0
    for piece in pieces:
        yield text[start : start + len(piece)]
        start += len(piece) + gap


def _join(separator: str, items: Iterable[str]) -> str:
    items = list(items)
    str.join(separator, items)  # raises TypeError unless all items are str
    parts = [part for item in items for part in (separator, item)]
    return concat(parts[1:])


def _replace(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    result = str.replace(text, *args, **kwargs)
    old, new, *rest = args
    if not old:
        return Tracked(result)
    count = rest[0] if rest else kwargs.get("count", -1)
    return _join(new, call_method("split", text, (old, count), {}))


def _shadow_of(value: Any) -> Any:
    if type(value) is Tracked:
        return value._shadow
    if isinstance(value, (list, tuple)):
        return type(value)([_shadow_of(item) for item in value])
    if isinstance(value, dict):
        return {key: _shadow_of(item) for key, item in value.items()}
    return value


def _paired(result: Any, shadow: Any) -> Any:
    """Return the result with the origins in ``shadow``; all the caller's if they do not match."""
    if type(result) is Tracked and shadow is None:
        return result
    if isinstance(result, str):
        same = isinstance(shadow, str) and len(shadow) == len(result)
        return Tracked(result, shadow if same else None)
    if isinstance(result, (list, tuple)):
        same = isinstance(shadow, (list, tuple)) and len(shadow) == len(result)
        shadows = shadow if same else [None] * len(result)
        return type(result)(map(_paired, result, shadows))
    return result
