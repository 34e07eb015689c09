"""Parser of tool calls in answers, piece by piece; any other text passes through unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .tool_formats import ToolFormat

LONGEST_HEAD = 512  # characters of a call up to its arguments, or of white space
NAME = "([a-zA-Z0-9_-]{1,64})"


def beginnings(atoms: Iterable[str]) -> str:
    """Return the pattern of all beginnings of a sequence of patterns."""
    pattern = ""
    for atom in reversed([*atoms]):
        pattern = f"(?:{atom}{pattern})?"
    return pattern


_GAP = r"\s*"
_NAME_ATOMS = [r"\{", _GAP, *'"name"', _GAP, ":", _GAP, '"', NAME, '"']
_ATOMS = [*_NAME_ATOMS, _GAP, ",", _GAP, '"', "(?:arguments|parameters)", '"', _GAP, ":", _GAP]
_PARTS = [*_ATOMS[:-5], f"(?:{beginnings('arguments')}|{beginnings('parameters')})", *_ATOMS[-4:]]
_HEAD = re.compile("".join(_ATOMS) + r"(?=\{)")
_PARTIAL_HEAD = re.compile(beginnings(_PARTS))
_NAME_FIRST = re.compile("".join(_NAME_ATOMS))
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_PARTIAL_KEY = re.compile(r'\{\s*("[^"]*)?')
_NAMED_HEAD = re.compile(rf"([a-zA-Z0-9_-]{{1,128}})\s{{0,{LONGEST_HEAD}}}(?=\{{)")
_SPACE = re.compile(rf"\s{{0,{LONGEST_HEAD}}}")
_KEYS = {"name", "arguments", "parameters", "id", "type"}


@dataclass
class ToolCall:
    """A call, or what a piece of an answer adds to one.

    Attributes:
        index: number of the call in the answer.
        name: name of the function; empty if an earlier piece had it.
        arguments: JSON text, or the next part of it.
    """

    index: int
    name: str
    arguments: str


@dataclass
class Text:
    """Text that a piece of an answer adds. ``reasoning``: it is no content."""

    text: str
    reasoning: bool = False


Part = Text | ToolCall


class ToolCallParser:
    """Splits an answer into text and tool calls.

    The arguments of a call are passed on as they come, once its name is known. What cannot be a
    call of one of the functions is text.

    Args:
        form: format of the calls.
        names: names of the functions.

    Attributes:
        calls: number of complete calls so far.
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form, self._names = form, set(names)
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)))
        self._longest = max(map(len, self._names), default=0)
        self.calls = 0
        self._rest, self._at = "", 0  # what is not parsed yet: the text from a position on
        self._state = self._text if form.anywhere else self._opening
        self._begun = ""  # what precedes the call that is being read
        self._in_text = False  # whether text came since the last call
        self._scanner = _ValueScanner()
        self._held = list[str]()  # parts of a call that is read to its end

    @property
    def _marks(self) -> tuple[str, ...]:
        """What calls in a text begin with."""
        return (self._form.begin,)

    def push(self, text: str) -> list[Part]:
        """Return the text and the parts of calls that ``text`` completes, in their order."""
        return self._run(text, last=False)

    def finish(self) -> list[Part]:
        """Return what was held back, at the end of the answer."""
        return self._run("", last=True)

    def _run(self, text: str, last: bool) -> list[Part]:
        self._rest, self._at = self._rest[self._at :] + text, 0
        self._parts = list[Part]()
        while self._state(last):
            pass
        return self._parts

    def _take_text(self, end: int) -> None:
        """Consume the rest up to ``end`` as text, after what preceded a call that is none."""
        if text := self._begun + self._rest[self._at : end]:
            self._parts.append(Text(text))
        self._begun, self._at, self._in_text = "", end, True

    def _after_space(self, at: int) -> int:
        """Return the position after white space, but at most `LONGEST_HEAD` characters of it.

        What is held back until other text comes is bounded so, and is not read again and again.
        """
        found = _SPACE.match(self._rest, at)
        return at if found is None else found.end()

    # Each state consumes some of the rest, and returns whether another one goes on with it. It
    # copies only what it consumes, and leaves a bounded part for the next push, so that the time is
    # linear in the length of an answer, however it is split.
    def _text(self, last: bool) -> bool:
        """Text up to the beginning of a call. White space alone before a call is no text."""
        rest, marks = self._rest, self._marks
        found = self._any_mark.search(rest, self._at)
        tail = rest[max(self._at, len(rest) - max(map(len, marks))) :]
        held = 0 if last else max(overlap(tail, mark) for mark in marks)
        end = len(rest) - held if found is None else found.start()
        is_text = self._in_text or (last and not self.calls)
        if is_text or self._after_space(self._at) < end:
            self._take_text(end)
        if found is None:
            return False
        self._begun, self._at = found[0], found.end()
        self._state = self._head
        return True

    def _opening(self, last: bool) -> bool:
        """The beginning of an answer that may be calls as a whole."""
        if self._form.named:
            return self._opening_name(last)
        head, opening = self._rest[:LONGEST_HEAD], self._form.begin + "{"
        shown = "".join(head.split())
        if shown.startswith(opening):
            self._at = self._rest.index("{")
            self._begun, self._state = self._rest[: self._at], self._head
            return True
        if last or len(head) == LONGEST_HEAD or not opening.startswith(shown):
            self._state = self._passing
            return True
        return False

    def _opening_name(self, last: bool) -> bool:
        """As `_opening`, of calls without an object around them; also what follows a call."""
        start = self._after_space(self._at)
        found = _NAMED_HEAD.match(self._rest, start)
        if found is not None and (name := self._called(found[1])) in self._names:
            self._begin_call(name, found.end())
            return True
        name = self._rest[start : start + self._longest + self._form.id_length + 1]
        if self._after_space(start + len(name)) == len(self._rest):
            name = name.rstrip()
            if not last and self._may_be_called(name):
                return False
        if self.calls and not name:  # white space after a call is no text
            return False
        self._state = self._passing
        return True

    def _called(self, found: str) -> str:
        """Return the name of a function, without the id that follows it; or all, if none does."""
        size = len(found) - self._form.id_length
        return found[:size] if found[size:].isalnum() else found

    def _may_be_called(self, text: str) -> bool:
        """Whether a text is the beginning of a name and its id."""
        for name in self._names:
            own = text[len(name) :]
            is_id = text.startswith(name) and len(own) <= self._form.id_length and own.isalnum()
            if name.startswith(text) or is_id:
                return True
        return False

    def _passing(self, last: bool) -> bool:
        """Text up to the end."""
        self._take_text(len(self._rest))
        return False

    def _head(self, last: bool) -> bool:
        """A call up to its arguments; or the whole call, if its keys come in another order."""
        start = self._after_space(self._at)
        read = self._rest[start : start + LONGEST_HEAD]
        found = _HEAD.match(read)
        if found is not None and found[1] in self._names:
            self._begin_call(found[1], start + found.end())
            return True
        is_open = not last and len(read) < LONGEST_HEAD
        if found is None and is_open and _PARTIAL_HEAD.fullmatch(read):
            return False
        key, name = _FIRST_KEY.match(read), _NAME_FIRST.match(read)
        if key is None and is_open and _PARTIAL_KEY.fullmatch(read):
            return False
        is_named = key is not None and key[1] == "name"
        if key is None or key[1] not in _KEYS or found is not None:
            return self._not_a_call(start)
        if is_named and (name is None or name[1] not in self._names):
            return self._not_a_call(start)
        self._begun += self._rest[self._at : start]
        self._at, self._state = start, self._whole_call
        return True

    def _begin_call(self, name: str, end: int) -> None:
        """Pass on the name of a call, whose arguments begin at ``end``."""
        self._parts.append(ToolCall(self.calls, name, ""))
        self._begun, self._at = "", end
        self._begin_arguments(name)

    def _whole_call(self, last: bool) -> bool:
        """A call whose object is read to its end. If it is none, all of the object is text."""
        part, done = self._scanned()
        self._held.append(part)
        if not done and not last:
            return False
        text, self._held, self._scanner = "".join(self._held), [], _ValueScanner()
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        except (ValueError, KeyError, TypeError, RecursionError):
            name = arguments = None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            self._begun += text
            return self._not_a_call(self._at)
        self._parts.append(ToolCall(self.calls, name, json.dumps(arguments, ensure_ascii=False)))
        self.calls += 1
        self._begun, self._state, self._in_text = "", self._after, False
        return True

    def _not_a_call(self, end: int) -> bool:
        """Pass on as text what was read as the beginning of a call, up to ``end``."""
        self._take_text(end)
        self._state = self._text if self._form.anywhere else self._passing
        return True

    def _begin_arguments(self, name: str) -> None:
        """Expect the arguments of a call of ``name``."""
        self._scanner, self._state = _ValueScanner(), self._arguments

    def _arguments(self, last: bool) -> bool:
        """The arguments of a call, as they come."""
        part, done = self._scanned()
        if part:
            self._parts.append(ToolCall(self.calls, "", part))
        if not done:
            return False
        self._end_call()
        return True

    def _end_call(self) -> None:
        """Count a complete call, and expect what may follow its arguments."""
        self.calls, self._in_text = self.calls + 1, False
        self._following()

    def _following(self) -> None:
        """Expect what may follow the arguments of a call."""
        self._scanner = _ValueScanner(depth=1)
        self._state = self._opening_name if self._form.named else self._closing

    def _scanned(self) -> tuple[str, bool]:
        """Consume the rest up to the end of the value, and return it and whether the end came."""
        end = self._scanner.end(self._rest, self._at)
        part = self._rest[self._at : end]
        self._at = len(self._rest) if end is None else end
        self._scanner.restart()
        return part, end is not None

    def _closing(self, last: bool) -> bool:
        """The brace of a call, which models forget, or further keys and the brace."""
        self._at = at = self._after_space(self._at)
        mark = self._rest[at : at + 1]
        if mark == ",":
            self._state = self._further_keys
        elif mark.strip():
            self._at, self._state = at + (mark == "}"), self._leave
        return bool(mark)

    def _further_keys(self, last: bool) -> bool:
        """Keys after the arguments of a call, up to its brace."""
        if done := self._scanned()[1]:
            self._state = self._leave
        return done

    def _leave(self, last: bool) -> bool:
        self._scanner, self._state = _ValueScanner(), self._after
        return True

    def _after(self, last: bool) -> bool:
        """What follows a call: its end, or the next one of a list."""
        rest, end, at = self._rest, self._form.end, self._after_space(self._at)
        between = "," if self._form.listed else ";"
        if rest.startswith(between, at) and not self._form.anywhere:
            self._at, self._begun, self._state = at + 1, between, self._head
            return self._after_space(at + 1) < len(rest)
        if end and rest.startswith(end, at):
            self._at = at + len(end)
            self._state = self._text if self._form.anywhere else self._trailing
            return True
        if not last and (at == len(rest) or (end and end.startswith(rest[at : at + len(end)]))):
            return False
        self._state = self._text if self._form.anywhere else self._trailing
        return True

    def _trailing(self, last: bool) -> bool:
        """Text after a list of calls."""
        if self._after_space(self._at) < len(self._rest):
            self._state = self._passing
            return True
        return False


class _ValueScanner:
    """Finds the end of a JSON object whose text comes in parts; each character is read once."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted, self._escaped, self._read = depth, False, False, 0

    def restart(self) -> None:
        """Expect the next text to begin where the last one ended."""
        self._read = 0

    def end(self, text: str, start: int) -> int | None:
        """Return the position after the object; None if it goes on.

        The text from ``start`` on begins with that of the last call.
        """
        first, self._read = start + self._read, len(text) - start
        for at in range(first, len(text)):
            character = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return at + 1
        return None


def overlap(text: str, marker: str) -> int:
    """Return how many of the last characters may be the beginning of ``marker``."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
