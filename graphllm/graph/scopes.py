"""Where in a model a node is made, as the path of a weight and as a line of code; what each such
place returns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor import Tensor


@dataclass
class _ScopeValues:
    made: list[Tensor] = field(default_factory=list)  # in the order of their making
    values: dict[str, Tensor] = field(default_factory=dict)


_scope: ContextVar[str] = ContextVar("graphllm_scope", default="")
_recording: ContextVar[_ScopeValues | None] = ContextVar("graphllm_notes", default=None)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Nodes made inside carry ``name`` appended, with a dot, to the scope around it."""
    path = f"{_scope.get()}.{name}".lstrip(".") if name else _scope.get()
    token, notes = _scope.set(path), _recording.get()
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
def record_scope_values() -> Iterator[dict[str, Tensor]]:
    """The value of every scope that is left inside, in the order in which they are left.

    It is what a module returns: the last result that was made in the scope's block. What has no
    varying axis 0 does not count (states, and what is computed from weights alone). A scope that is
    entered several times has the value of the last time that made one.
    """
    notes = _ScopeValues()
    token = _recording.set(notes)
    try:
        yield notes.values
    finally:
        _recording.reset(token)


def record_result(result: Tensor) -> None:
    """A result with a varying axis 0 was made."""
    notes = _recording.get()
    if notes:
        notes.made.append(result)


# ---------------------------------------------------------------------------------- lines of code

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_MODELS = tuple(str(p / "models") + os.sep for p in (Path(_PACKAGE), Path(_PACKAGE).parent))
_MAKERS = tuple(
    str(Path(_PACKAGE, n)) for n in ("model/decoder.py", "model/nn.py", "graph/tensor.py", "ops")
)


def find_origin() -> str:
    """``file:line`` of the model code that made a node: the nearest frame outside the package, or
    of the shared decoder where a model leaves that to it."""
    frame, shared = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or name.startswith(_MODELS):
            return f"{name}:{frame.f_lineno}"
        if shared and not name.startswith(_MAKERS):
            break  # whoever had the model built is not meant
        if name == _MAKERS[0]:
            shared = shared or f"graphllm/model/decoder.py:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return shared


def relative_origin(origin: str) -> str:
    """``file:line`` for messages: from the working directory, if it is in there."""
    return origin.removeprefix(os.getcwd() + os.sep)


def current_origin() -> str:
    """The line of the model file that asks for a node, for messages."""
    return relative_origin(find_origin())


def error_location() -> str:
    """The line and the scope that ask for a node, as messages begin: ``my_model.py:31:
    model.layers.0.self_attn``."""
    return ": ".join(filter(None, (current_origin(), current_scope())))
