"""Answers of gpt-oss in its format harmony: messages on channels, some of which call functions.

Source: OpenAI 2025, "OpenAI harmony response format" (openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .tool_call_parser import Part, Text, ToolCall, overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", START, "<|call|>", "<|return|>")  # of a message
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINNINGS = ("assistant", "to=", CHANNEL, START, MESSAGE)  # of a header, after white space
_LONGEST_HEADER = 512  # characters
_CALLED = re.compile(r"to=functions\.([a-zA-Z0-9_-]+)")


def is_harmony(template: str) -> bool:
    """Whether a chat template has the markers of harmony."""
    return CHANNEL in template and MESSAGE in template


class HarmonyParser:
    """Splits an answer into reasoning (channel ``analysis``), calls of functions, and other text.

    Args:
        names: names of the functions that may be called.

    Attributes:
        calls: number of complete calls so far.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = set(names)
        self.calls = 0
        self._rest, self._at = "", 0  # text, of which the first characters are parsed
        self._kind: str | None = None  # of the message: reasoning, content or call; None: a header

    def push(self, text: str, last: bool) -> list[Part]:
        """See `AnswerParser`."""
        self._rest += text
        self._parts: list[Part] = []
        while self._header(last) if self._kind is None else self._body(last):
            pass
        self._rest, self._at = self._rest[self._at :], 0
        return self._parts

    def _header(self, last: bool) -> bool:
        """Read up to the text of a message; return whether something follows.

        The decision depends on the text alone, not on the pieces in which it comes.
        """
        rest, at = self._rest, self._at
        head = rest[at : at + _LONGEST_HEADER + len(MESSAGE)]
        shown = head.lstrip()
        begun = shown.startswith(_BEGINNINGS)
        end = head.find(MESSAGE) if begun else -1
        if end < 0:
            is_open = begun or any(each.startswith(shown) for each in _BEGINNINGS)
            if is_open and len(head) < _LONGEST_HEADER + len(MESSAGE):
                if not last:
                    return False
                if START in head or CHANNEL in head:  # the answer was cut off
                    self._at = len(rest)
                    return False
            self._kind = "content"  # no header: text of a model that does not use the format
            return at < len(rest)
        self._at = at + end + len(MESSAGE)
        called = _CALLED.search(head, 0, end)
        if called is not None and called[1] in self._names:
            self._kind = "call"
            self._parts.append(ToolCall(self.calls, called[1], ""))
        else:
            is_reasoning = f"{CHANNEL}analysis" in head[:end]
            self._kind = "reasoning" if is_reasoning else "content"
        return True

    def _body(self, last: bool) -> bool:
        """Read the text of a message; return whether another one follows."""
        found = _END.search(self._rest, self._at)
        shown = self._rest[self._at : found.start() if found else None]
        if found is None and not last:
            shown = shown[: len(shown) - max(overlap(shown, each) for each in _ENDS)]
        if shown:
            text = Text(shown, reasoning=self._kind == "reasoning")
            call = ToolCall(self.calls, "", shown)
            self._parts.append(call if self._kind == "call" else text)
        self._at = found.end() if found else self._at + len(shown)
        if self._kind == "call" and (found or last):
            self.calls += 1
        if found is None:
            return False
        self._kind = None
        return self._at < len(self._rest)
