"""Scopes (paths such as ``model.layers.0.mlp``) and source lines of graph nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Node = Any  # a `graphllm.graph.tensor.Tensor`, whose module imports this one


@dataclass
class _ScopeValues:
    created: list[Node] = field(default_factory=list)  # in order of creation
    values: dict[str, Node] = field(default_factory=dict)


_scope: ContextVar[str] = ContextVar("graphllm_scope", default="")
_recording: ContextVar[_ScopeValues | None] = ContextVar("graphllm_scope_values", default=None)


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Append ``name``, after a dot, to the scope of nodes created inside."""
    path = f"{_scope.get()}.{name}".lstrip(".") if name else _scope.get()
    token, recording = _scope.set(path), _recording.get()
    before = len(recording.created) if recording else 0
    try:
        yield
    finally:
        _scope.reset(token)
    if recording and len(recording.created) > before:
        recording.values.pop(path, None)  # ordered by the last exit
        recording.values[path] = recording.created[-1]


def current_scope() -> str:
    return _scope.get()


@contextmanager
def record_scope_values() -> Iterator[dict[str, Node]]:
    """Record the value of every scope, ordered by exit from the scope.

    The value of a scope is what its module returns: the last node created in its block whose axis 0
    varies (states, and values computed from weights only, do not count). A scope that is entered
    several times has the value of the last time that created one.
    """
    recording = _ScopeValues()
    token = _recording.set(recording)
    try:
        yield recording.values
    finally:
        _recording.reset(token)


def record_result(result: Node) -> None:
    """Note that a result with a varying axis 0 was created."""
    recording = _recording.get()
    if recording:
        recording.created.append(result)


# ---------------------------------------------------------------------------------- lines of code

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_MODELS = tuple(str(p / "models") + os.sep for p in (Path(_PACKAGE), Path(_PACKAGE).parent))
# Shared model code, whose lines are reported for nodes that a model leaves to it.
_SHARED = ("decoder", "blocks", "encoder", "encoder_decoder")
_DECODER = tuple(str(Path(_PACKAGE, "model", f"{name}.py")) for name in _SHARED)
_BUILDERS = (
    *_DECODER,
    *(str(Path(_PACKAGE, n)) for n in ("model/nn.py", "graph/tensor.py", "ops")),
)


def find_origin() -> str:
    """Return ``file:line`` of the model code that is creating a node.

    That is the nearest frame outside the package; for a node that a model leaves to the shared
    decoder it is the decoder's line.
    """
    frame, shared = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or name.startswith(_MODELS):
            return f"{name}:{frame.f_lineno}"
        if shared and not name.startswith(_BUILDERS):
            break  # the caller of the model builder is not model code
        if name in _DECODER:
            shared = shared or f"graphllm/model/{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return shared


def relative_origin(origin: str) -> str:
    """Return ``file:line`` for messages, relative to the working directory if it is inside."""
    return origin.removeprefix(os.getcwd() + os.sep)


def current_origin() -> str:
    """Return the line of model code that is creating a node, for messages."""
    return relative_origin(find_origin())


def error_location() -> str:
    """Return the prefix of error messages: ``my_model.py:31: model.layers.0.self_attn``."""
    return ": ".join(filter(None, (current_origin(), current_scope())))
