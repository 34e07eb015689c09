"""Custom logits processors: functions of a request that change its logits on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..arguments import quote
from ..errors import SHOWN, RequestError

LogitsProcessor = Callable[[Sequence[int], np.ndarray], Any]  # (ids so far, logits) -> logits


class ForcedIds:
    """Logits processor under which an answer begins with given ids, whatever their logits.

    Args:
        ids: ids that the answer begins with.
        prompt_tokens: number of tokens of the prompt.
    """

    def __init__(self, ids: Sequence[int], prompt_tokens: int) -> None:
        self.ids, self._prompt_tokens = ids, prompt_tokens

    def __call__(self, ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        at = len(ids) - self._prompt_tokens
        if at < len(self.ids):
            logits[:] = -np.inf
            logits[self.ids[at]] = 0
        return logits


def process_logits(
    processors: Iterable[LogitsProcessor], ids: Sequence[int], logits: np.ndarray
) -> np.ndarray:
    """Apply ``processors`` in order, each to what the previous one returned.

    Args:
        processors: functions of (ids, logits), which return logits of the same shape. They may
            change their arguments, which are copies.
        ids: ids of the prompt and those sampled so far.
        logits: float32 [vocab]. If no token can be sampled from them (NaN, +inf, only -inf), they
            are returned as they are, so that the fault is found in the model.

    Returns:
        float32 [vocab].

    Raises:
        RequestError: a function raised an exception, did not return numbers of the right shape, or
            returned NaN, +inf or only -inf.
    """
    if not np.isfinite(logits.max()):
        return logits
    for each in processors:
        try:
            found = np.asarray(each(list(ids), logits.copy()))
        except Exception as error:
            raise _failed(each, f"raised {_line(error)}") from error
        if found.dtype.kind not in "fiu":
            raise _failed(each, f"returned {quote(found.tolist())}, not an array of numbers")
        if found.shape != logits.shape:
            raise _failed(each, f"returned the shape {found.shape}, not {logits.shape}")
        with np.errstate(over="ignore"):
            logits = found.astype(np.float32)
        top = float(logits.max())
        if not np.isfinite(top):
            what = "-inf for all ids" if top == -np.inf else str(top).replace("nan", "NaN")
            raise _failed(each, f"returned {what}, from which no token can be sampled")
    return logits


def _line(error: Exception) -> str:
    """Return the type and the text of an exception, on one line."""
    try:
        text = " ".join(str(error).split())[:SHOWN]
    except Exception:  # a user's __str__ may raise anything
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _failed(processor: LogitsProcessor, what: str) -> RequestError:
    name = getattr(processor, "__qualname__", None) or type(processor).__qualname__
    return RequestError(f"the logits processor {name} {what}", "processors")
