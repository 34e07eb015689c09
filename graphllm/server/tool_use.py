"""Tools of one chat request: what its prompt gets, and how its answers show calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError
from .tool_call_parser import ToolCall, ToolCallParser
from .tools import (
    Messages,
    Tool,
    call_grammar,
    find_format,
    with_parsed_arguments,
    with_tool_texts,
)

Object = dict[str, Any]


class ToolUse:
    """The tools of a request, and the calls in its answers.

    Args:
        tools: the tools that the model may call, at least one.
        choice: ``auto``, ``required``, or the function to call.
        several: whether an answer may have several calls.
        template: source of the chat template.

    Raises:
        ApiError: the format of the template's calls is not supported.
    """

    def __init__(
        self, tools: Sequence[Tool], choice: str | Tool, several: bool, template: str
    ) -> None:
        self._tools, self._choice, self._several = tools, choice, several
        self._form, self._described = find_format(template)
        self._parsers: dict[int, ToolCallParser] = {}  # by choice

    def prompt(self, messages: Messages) -> tuple[Messages, Object]:
        """Return the messages and the variables of the template that describe the tools."""
        if self._described:
            return messages, {"tools": self._tools}
        return with_tool_texts(messages, self._tools), {}

    @property
    def grammar(self) -> str | None:
        """The grammar of answers that must be calls; None if they need not be."""
        if self._choice == "auto":
            return None
        tools = self._tools
        if not isinstance(self._choice, str):
            tools = [t for t in tools if t["function"]["name"] == self._choice["name"]]
        return call_grammar(self._form, tools, self._several and self._choice == "required")

    def _parser(self) -> ToolCallParser:
        return ToolCallParser(self._form, [tool["function"]["name"] for tool in self._tools])

    def message(self, text: str) -> Object:
        """Return the content and the calls of a whole answer."""
        parser = self._parser()
        before, parts = parser.push(text)
        rest, more = parser.finish()
        calls = dict[int, ToolCall]()
        for part in (*parts, *more):
            known = calls.setdefault(part.index, ToolCall(part.index, part.name, ""))
            known.arguments += part.arguments
        if not calls:
            return {"content": text}
        listed = [_call(call) for call in calls.values()]
        return {"content": before + rest or None, "tool_calls": listed}

    def delta(self, index: int, text: str, finish: str | None) -> tuple[Object, str | None]:
        """Return what new text adds to a choice, and its finish_reason.

        Args:
            index: number of the choice.
            text: the new text.
            finish: finish_reason; the text is the last one.
        """
        parser = self._parsers.setdefault(index, self._parser())
        shown, calls = parser.push(text)
        if finish is not None:
            rest, more = parser.finish()
            shown, calls = shown + rest, [*calls, *more]
        if finish is not None and parser.calls:
            finish = self.finish_reason(finish)
        made: Object = {"content": shown} if shown else {}
        if calls:
            made["tool_calls"] = [{"index": call.index, **_call(call)} for call in calls]
        return made, finish

    def finish_reason(self, reason: str) -> str:
        """Return the finish_reason of an answer with calls, as OpenAI's API has it."""
        named = not isinstance(self._choice, str)
        return "tool_calls" if reason == "stop" and not named else reason


def _call(call: ToolCall) -> Object:
    """Return the object of a call; without a name that of its next arguments."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def tool_use(values: Mapping[str, Any], template: str) -> ToolUse | None:
    """Return the tools that the fields of a request ask for, if any. ApiError: they do not fit."""
    tools, choice = values.get("tools", []), values.get("tool_choice", "auto")
    if not tools:
        if "tool_choice" in values and choice != "none":
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None
    names = {tool["function"]["name"] for tool in tools}
    if not isinstance(choice, str) and choice["name"] not in names:
        raise ApiError(400, f"no tool has the name {choice['name'][:64]!r}", "tool_choice")
    if choice == "none":
        return None
    if values.get("response_format") is not None:
        text = "response_format with tools needs tool_choice none"
        raise ApiError(400, text, "response_format", "unsupported_value")
    return ToolUse(tools, choice, values.get("parallel_tool_calls", True), template)


def chat_messages(messages: list[Any], tools: ToolUse | None) -> tuple[list[Any], Object]:
    """Return the messages of a chat for its template, and further variables of the template."""
    parsed = with_parsed_arguments(messages)
    return (parsed, {}) if tools is None else tools.prompt(parsed)
