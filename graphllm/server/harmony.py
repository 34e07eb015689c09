"""Answers of gpt-oss in its format harmony: messages on channels, some of which call functions.

Source: OpenAI 2025, "OpenAI harmony response format" (openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .tool_call_parser import Part, Text, ToolCall, overlap

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", START, "<|call|>", "<|return|>")  # of a message
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
        self._rest = ""  # not parsed yet
        self._kind: str | None = None  # of the message: reasoning, content or call; None: a header

    def push(self, text: str, last: bool) -> list[Part]:
        """See `AnswerParser`."""
        self._rest += text
        self._parts: list[Part] = []
        while self._header(last) if self._kind is None else self._body(last):
            pass
        return self._parts

    def _header(self, last: bool) -> bool:
        """Read up to the text of a message; return whether something follows."""
        at = self._rest.find(MESSAGE)
        if at < 0:
            if last and self._rest.startswith((START, CHANNEL)):  # the answer was cut off
                self._rest = ""
                return False
            is_header = self._rest[:2] in ("", "<", "<|") or self._rest.startswith("assistant")
            if not is_header or last:  # no header: text of a model that does not use the format
                self._kind = "content"
                return bool(self._rest)
            return False
        header, self._rest = self._rest[:at], self._rest[at + len(MESSAGE) :]
        called = _CALLED.search(header)
        if called is not None and called[1] in self._names:
            self._kind = "call"
            self._parts.append(ToolCall(self.calls, called[1], ""))
        else:
            self._kind = "reasoning" if f"{CHANNEL}analysis" in header else "content"
        return True

    def _body(self, last: bool) -> bool:
        """Read the text of a message; return whether another one follows."""
        rest = self._rest
        ends = [(at, mark) for mark in _ENDS if (at := rest.find(mark)) >= 0]
        at, mark = min(ends, default=(-1, ""))
        held = 0 if last else max(overlap(rest, each) for each in _ENDS)
        shown = rest[:at] if at >= 0 else rest[: len(rest) - held]
        if shown:
            text = Text(shown, reasoning=self._kind == "reasoning")
            call = ToolCall(self.calls, "", shown)
            self._parts.append(call if self._kind == "call" else text)
        self._rest = rest[len(shown) + len(mark) :]
        if self._kind == "call" and (at >= 0 or last):
            self.calls += 1
        if at < 0:
            return False
        self._kind = None
        return bool(self._rest)
