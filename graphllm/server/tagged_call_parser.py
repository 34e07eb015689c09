"""Parser of tool calls whose parts are between markers; see `TaggedFormat`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .tool_call_parser import (
    LONGEST_HEAD,
    NAME,
    ToolCall,
    ToolCallParser,
    beginnings,
    overlap,
)
from .tool_formats import TaggedFormat
from .tool_grammar import string_values
from .tools import Tool

_GAP = r"\s{0,64}"  # white space within a call: bounded, and so is the time to match its beginning
_LONGEST_KEY = 256
# How templates that write values with Jinja's ``string`` filter show them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class TaggedCallParser(ToolCallParser):
    """As `ToolCallParser`, for calls between markers.

    Arguments with tags become a JSON object. Those that may only be strings are passed on as they
    come, others when they are complete: JSON values as they are, any other text as a string.

    Args:
        form: format of the calls.
        tools: the functions.
    """

    def __init__(self, form: TaggedFormat, tools: Sequence[Tool]) -> None:
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each["parameters"] for each in functions}
        super().__init__(form, self._schemas)
        self._tags, self._ends = form.tags, form.ends
        self._head_pattern, self._partial_head = _head_patterns(form)
        self._properties: Mapping[str, Any] = {}  # of the call that is being read
        self._separator = ""  # what precedes the next argument
        self._value = list[str]()  # parts of a value that is no string
        self._is_string = self._at_start = False

    @property
    def _marks(self) -> tuple[str, ...]:
        assert isinstance(self._form, TaggedFormat)
        return tuple(filter(None, (self._form.wrapper, self._form.begin)))

    def _head(self, last: bool) -> bool:
        """A call up to its arguments."""
        read = self._begun + self._rest[self._at : self._at + LONGEST_HEAD]
        found = self._head_pattern.match(read)
        if found is not None and found[1] in self._names:
            self._at += found.end() - len(self._begun)
            self._begun = ""
            self._parts.append(ToolCall(self.calls, found[1], ""))
            self._begin_arguments(found[1])
            return True
        if found is None and not last and self._partial_head.fullmatch(read):
            return False
        return self._not_a_call(self._at)

    def _begin_arguments(self, name: str) -> None:
        if self._tags is None:
            super()._begin_arguments(name)
            return
        schema = self._schemas[name].get("properties")
        self._properties = schema if isinstance(schema, Mapping) else {}
        self._add("{")
        self._separator, self._state = "", self._key

    def _add(self, arguments: str) -> None:
        """Pass on a part of the arguments."""
        if arguments:
            self._parts.append(ToolCall(self.calls, "", arguments))

    # -- arguments with tags
    def _key(self, last: bool) -> bool:
        """The name of an argument, or the end of the call."""
        assert self._tags is not None
        at = self._after_space(self._at)
        rest, begin = self._rest[at : at + _LONGEST_KEY], self._tags.key_begin
        end = rest.find(self._tags.key_end, len(begin))
        if rest.startswith(begin) and end >= 0:
            self._begin_value(rest[len(begin) : end])
            self._at = at + end + len(self._tags.key_end)
            return True
        is_key = begin.startswith(rest[: len(begin)]) and len(rest) < _LONGEST_KEY
        if not last and (is_key or _begins(self._ends[0], rest)):
            return False
        if not last or rest.startswith(self._ends[0]):  # else the answer was cut off
            self._add("}")
            self._end_call()
            return True
        return False

    def _begin_value(self, key: str) -> None:
        assert self._tags is not None
        self._is_string = string_values(self._properties.get(key)) is not None
        begin = json.dumps(key, ensure_ascii=False) + ": "
        self._add(self._separator + begin + ('"' if self._is_string else ""))
        self._separator, self._at_start = ", ", True
        self._state = self._value_begin if self._tags.value_begin else self._in_value

    def _value_begin(self, last: bool) -> bool:
        """The marker before a value, which models may forget."""
        assert self._tags is not None
        mark, at = self._tags.value_begin, self._after_space(self._at)
        rest = self._rest[at : at + len(mark)]
        if not last and rest != mark and mark.startswith(rest):
            return False
        if rest == mark:
            self._at = at + len(mark)
        self._state = self._in_value
        return True

    def _in_value(self, last: bool) -> bool:
        """A value up to its end marker."""
        assert self._tags is not None
        rest, mark, lines = self._rest, self._tags.value_end, self._tags.lines
        if self._at_start and lines:
            if self._at == len(rest):
                return False
            self._at += rest[self._at] == "\n"
        self._at_start = False
        found = rest.find(mark, self._at)
        end = found
        if found < 0:
            tail = rest[max(self._at, len(rest) - len(mark)) :]
            end = len(rest) - (0 if last else overlap(tail, mark))
        trims = lines and end > self._at and rest[end - 1] == "\n" and (found >= 0 or not last)
        self._pass_on(rest[self._at : end - trims])
        self._at = end - trims
        if found < 0:
            if last and self._value:
                self._add(_json_value("".join(self._value)))
            return False
        self._at = found + len(mark)
        self._add('"' if self._is_string else _json_value("".join(self._value)))
        self._value, self._state = [], self._key
        return True

    def _pass_on(self, text: str) -> None:
        """Pass on a part of a string; keep that of any other value."""
        if self._is_string:
            self._add(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._value.append(text)

    # -- after the arguments
    def _following(self) -> None:
        self._remaining, self._state = list(self._ends), self._after

    def _after(self, last: bool) -> bool:
        """The markers after the arguments, each of which models may forget."""
        at = self._after_space(self._at)
        rest = self._rest[at : at + LONGEST_HEAD]
        for index, mark in enumerate(map(str.lstrip, self._remaining)):
            if rest.startswith(mark):
                self._at = at + len(mark)
                self._remaining = self._remaining[index + 1 :]
                return True
        if not last and any(_begins(mark.lstrip(), rest) for mark in self._remaining):
            return False
        self._state = self._text
        return True


def _begins(mark: str, text: str) -> bool:
    """Whether a text is the beginning of a marker, or the marker of a text."""
    return mark.startswith(text) or text.startswith(mark)


def _json_value(text: str) -> str:
    """Return the JSON text of a value that may be one, or else of a string."""
    found = text.strip()
    found = _PYTHON.get(found, found)
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else found


def _head_patterns(form: TaggedFormat) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the pattern of a call up to its arguments, and that of its beginnings."""
    follow = ["{"] if form.tags is None else [form.tags.key_begin, form.ends[0]]
    atoms = [*_literal(form.begin), _GAP, NAME, _GAP]
    if form.separator:
        atoms += [*_literal(form.separator.strip()), _GAP]
    wrapper = [*_literal(form.wrapper), _GAP] if form.wrapper else []
    ahead = "|".join(map(re.escape, follow))
    whole = f"(?:{''.join(wrapper)})?{''.join(atoms)}(?={ahead})"
    ends = [beginnings([*atoms, *_literal(mark)]) for mark in follow]
    ends += [beginnings([*wrapper, *atoms, *_literal(mark)]) for mark in follow]
    return re.compile(whole), re.compile("|".join(ends))


def _literal(text: str) -> Iterator[str]:
    return map(re.escape, text)
