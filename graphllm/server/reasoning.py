"""Reasoning of an answer: what a model writes between ``<think>`` and ``</think>`` first."""

from __future__ import annotations

from typing import Any

from .errors import ApiError
from .harmony import is_harmony
from .tool_call_parser import overlap

BEGIN, END = "<think>", "</think>"
_LONGEST_SPACE = 512  # characters of white space before the reasoning
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # of OpenAI's API
_THREE = {"minimal": "low", "xhigh": "high"}  # the efforts that templates do not have


def reasoning_variables(template: str, effort: str | None, required: bool = True) -> dict[str, Any]:
    """Return the variables of a chat template that set how much a model reasons.

    Args:
        template: source of the template.
        effort: one of `EFFORTS`; None leaves it to the template.
        required: whether a model that cannot reason refuses an effort.

    Raises:
        ApiError: the model cannot reason, or cannot do without.
    """
    if effort is None:
        return {}
    if effort != "none" and "reasoning_effort" in template:
        return {"reasoning_effort": _THREE.get(effort, effort)}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != "none"}
    if effort != "none" and not required:
        return {}
    if (effort != "none") == (END in template or is_harmony(template)):
        return {}
    what = "does not reason" if effort != "none" else "always reasons"
    raise ApiError(400, f"this model {what}", "reasoning_effort", "unsupported_value")


class ReasoningParser:
    """Splits an answer into reasoning and the rest, piece by piece.

    Args:
        begun: whether the prompt ends with the beginning of the reasoning.
    """

    def __init__(self, begun: bool) -> None:
        self._rest = ""  # not parsed yet
        self._state = self._reasoning if begun else self._start
        self._gap = False  # whether only white space came since the reasoning

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """Return the reasoning and the other text that ``text`` completes.

        ``last``: no more follows.
        """
        self._rest += text
        return self._state(last)

    def _start(self, last: bool) -> tuple[str, str]:
        head = self._rest[: _LONGEST_SPACE + len(BEGIN)]
        shown = head.lstrip()
        if shown.startswith(BEGIN):
            at = len(head) - len(shown) + len(BEGIN)
            self._rest, self._state = self._rest[at:], self._reasoning
            return self._reasoning(last)
        is_open = len(head) < _LONGEST_SPACE + len(BEGIN) and not last
        if is_open and BEGIN.startswith(shown):
            return "", ""
        self._state = self._content
        return self._content(last)

    def _reasoning(self, last: bool) -> tuple[str, str]:
        at = self._rest.find(END)
        if at < 0:
            end = len(self._rest) - (0 if last else overlap(self._rest, END))
            found, self._rest = self._rest[:end], self._rest[end:]
            return found, ""
        found, self._rest = self._rest[:at], self._rest[at + len(END) :]
        self._state, self._gap = self._content, True
        return found, self._content(last)[1]

    def _content(self, last: bool) -> tuple[str, str]:
        found, self._rest = self._rest, ""
        if self._gap:
            found = found.lstrip()
            self._gap = not found
        return "", found
