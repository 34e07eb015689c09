"""Errors that a user can act on. The command line prints each as one line and exits with code 1."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

SHOWN = 200  # characters of a value in a message
LISTED = 8  # names in a message

_CONTAINERS = reprlib.Repr()
_CONTAINERS.maxstring = _CONTAINERS.maxother = _CONTAINERS.maxlong = SHOWN // 4


def quote(value: Any) -> str:
    """``value`` as a message shows it: on one line, and of at most `SHOWN` characters."""
    if isinstance(value, (str, bytes)):
        text = repr(value[:SHOWN])  # longer than SHOWN if the value is
    else:
        text = " ".join(_CONTAINERS.repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def join_names(names: Sequence[str], text: Callable[[str], str] = quote) -> str:
    """Names as a message lists them: the first `LISTED`, each by its ``text``, and the count of the
    others."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(text, names[:LISTED])) + more


class GraphllmError(Exception):
    """Base of every error that graphllm raises on purpose; its text is one clear line.

    ``argument``: the argument of the Python function that the error is about, or that would avoid
    it. The command line adds the flag for it; texts name no flags.
    """

    def __init__(self, text: str = "", argument: str | None = None) -> None:
        super().__init__(text)
        self.argument = argument


class ModelFileError(GraphllmError):
    """A model file is missing, malformed or not supported; names the file or tensor."""


class UnusedTensors(ModelFileError):
    """A file has weights, called ``names``, that the model does not ask for."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"unexpected tensor {quote(names[0])} ({len(names)} in all)")
        self.names = names


class ConfigError(GraphllmError):
    """A model configuration has a missing, unknown or impossible value; names the key."""


class GraphError(GraphllmError):
    """A graph cannot be built or verified (shapes, dtypes, state order); names op and scope."""


class PlacementError(GraphllmError):
    """No available backend can run an op, or ``strict`` found one off the first backend."""


class NumericError(GraphllmError):
    """A model computes logits from which no token can be sampled (NaN, infinity); names the
    position and the first op whose result is not finite."""


class RequestError(GraphllmError):
    """A generation request has an impossible value; names the parameter."""


class OutOfMemory(RequestError):
    """A memory has no room: for what, the bytes ``needed`` and those ``free`` (None: not known)."""

    def __init__(
        self, what: str, memory: str, needed: int | None, free: int | None, hint: str,
        argument: str | None = None,
    ) -> None:  # fmt: skip
        needs = "more is needed" if needed is None else f"{needed / 1e9:.2f} GB are needed"
        left = "" if free is None else f", {free / 1e9:.2f} GB are free"
        super().__init__(f"no memory for {what}: {needs} in {memory}{left}; {hint}", argument)
        self.what, self.memory, self.needed, self.free = what, memory, needed, free
