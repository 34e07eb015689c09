"""Stop strings, matched in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Find the first stop string in text that arrives in pieces.

    A stop string may begin in one piece and end in a later one. The match is the stop string that
    ends first; among those that end at the same character, the longest.

    Attributes:
        matched: whether a stop string was found. No text follows after that.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Append ``text`` and return the text that can be emitted now.

        A suffix that may be the beginning of a stop string is held back.
        """
        if not self._stop_strings:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop_strings if (at := text.find(s)) >= 0]
        if found:
            self.matched, self._held = True, ""
            return text[: min(found)[1]]
        at = self._partial_match(text)
        self._held = text[at:]
        return text[:at]

    def _partial_match(self, text: str) -> int:
        """Return the start of the longest suffix of ``text`` that is a prefix of a stop string."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stop_strings):
                return at
        return len(text)

    def finish(self) -> str:
        """Return the text that was held back. Call it when no more text follows."""
        held, self._held = self._held, ""
        return held
