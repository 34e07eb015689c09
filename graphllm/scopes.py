"""Where in a model a node is made, as the path of a weight; and what each such place returns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor import Tensor


@dataclass
class _Notes:
    made: list[Tensor] = field(default_factory=list)  # in the order of their making
    values: dict[str, Tensor] = field(default_factory=dict)


_scope: ContextVar[str] = ContextVar("graphllm_scope", default="")
_notes: ContextVar[_Notes | None] = ContextVar("graphllm_notes", default=None)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Nodes made inside carry ``name`` appended, with a dot, to the scope around it."""
    path = f"{_scope.get()}.{name}".lstrip(".") if name else _scope.get()
    token, notes = _scope.set(path), _notes.get()
    before = len(notes.made) if notes else 0
    try:
        yield
    finally:
        _scope.reset(token)
    if notes and len(notes.made) > before:
        notes.values.pop(path, None)  # the order is that of the last time
        notes.values[path] = notes.made[-1]


def current_scope() -> str:
    return _scope.get()


@contextmanager
def noted() -> Iterator[dict[str, Tensor]]:
    """The value of every scope that is left inside, in the order in which they are left.

    It is what a module returns: the last result that was made in the scope's block. What has no
    varying axis 0 does not count (states, and what is computed from weights alone). A scope that is
    entered several times has the value of the last time that made one.
    """
    notes = _Notes()
    token = _notes.set(notes)
    try:
        yield notes.values
    finally:
        _notes.reset(token)


def note(result: Tensor) -> None:
    """A result with a varying axis 0 was made."""
    notes = _notes.get()
    if notes:
        notes.made.append(result)
