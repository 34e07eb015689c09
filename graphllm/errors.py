"""Errors that a user can act on. The command line prints each as one line and exits with code 1."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

SHOWN = 200  # maximum number of characters of a value in a message
LISTED = 8  # maximum number of names in a message

_CONTAINERS = reprlib.Repr()
_CONTAINERS.maxstring = _CONTAINERS.maxother = _CONTAINERS.maxlong = SHOWN // 4


def quote(value: Any) -> str:
    """Format ``value`` for a message: on one line, with at most `SHOWN` characters."""
    if isinstance(value, (str, bytes)):
        text = repr(value[:SHOWN])  # longer than SHOWN if the value is
    else:
        text = " ".join(_CONTAINERS.repr(value).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def join_names(names: Sequence[str], text: Callable[[str], str] = quote) -> str:
    """Format names for a message: the first `LISTED`, each by ``text``, and how many more."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(text, names[:LISTED])) + more


class GraphllmError(Exception):
    """Base class of all errors that graphllm raises on purpose. The text is one line.

    ``argument`` names the argument of the Python function that the error is about, or that would
    avoid the error. The command line adds the corresponding flag, so texts name no flags.
    """

    def __init__(self, text: str = "", argument: str | None = None) -> None:
        super().__init__(text)
        self.argument = argument


class ModelFileError(GraphllmError):
    """A model file is missing, malformed or not supported. The text names the file or tensor."""


class UnusedTensors(ModelFileError):
    """A file has weights, listed in ``names``, that the model does not use."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"unexpected tensor {quote(names[0])} ({len(names)} in all)")
        self.names = names


class ConfigError(GraphllmError):
    """A model configuration has a missing, unknown or invalid value. The text names the key."""


class GraphError(GraphllmError):
    """A graph is invalid (shapes, dtypes, order of state accesses). The text names op and scope."""


class PlacementError(GraphllmError):
    """No usable backend can run an op, or an op misses the first backend and ``strict`` is set."""


class NumericError(GraphllmError):
    """Logits contain NaN or infinity, so that no token can be sampled.

    The text names the position and the first op with a non-finite result.
    """


class RequestError(GraphllmError):
    """An argument or a generation request has an invalid value. The text names the parameter."""


class ContextExceeded(RequestError):
    """A prompt has more tokens than the context."""

    def __init__(self, tokens: int, context: int) -> None:
        """Explain the error.

        Args:
            tokens: number of tokens of the prompt.
            context: number of tokens that the context holds.
        """
        super().__init__(f"the prompt has {tokens} tokens, the context holds {context}", "context")
        self.tokens, self.context = tokens, context


class OutOfMemory(RequestError):
    """A memory has too little room.

    Args:
        what: what the allocation is for.
        memory: name of the memory.
        needed: bytes of the allocation; None if unknown.
        free: bytes that are free; None if unknown.
        hint: what to do.
        argument: see `GraphllmError`.
    """

    def __init__(
        self, what: str, memory: str, needed: int | None, free: int | None, hint: str,
        argument: str | None = None,
    ) -> None:  # fmt: skip
        needs = "more is needed" if needed is None else f"{needed / 1e9:.2f} GB are needed"
        left = "" if free is None else f", {free / 1e9:.2f} GB are free"
        super().__init__(f"no memory for {what}: {needs} in {memory}{left}; {hint}", argument)
        self.what, self.memory, self.needed, self.free = what, memory, needed, free
