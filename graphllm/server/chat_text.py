"""The text of chat answers: reasoning, and calls of the tools that a request has."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from .errors import ApiError
from .harmony import HarmonyParser, is_harmony
from .reasoning import BEGIN, END, ReasoningParser
from .structured_fields import FORMATS
from .tagged_call_parser import TaggedCallParser
from .tool_call_parser import Part, Text, ToolCall, ToolCallParser
from .tool_formats import TaggedFormat, find_format
from .tool_grammar import call_grammar
from .tools import (
    SHORT_IDS,
    Messages,
    Tool,
    described_tools,
    with_contents,
    with_descriptions,
    with_parsed_arguments,
    with_short_ids,
    with_tool_texts,
    without_tools,
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
        self._tools, self._choice, self.several = tools, choice, several
        self._template = template
        self._form, self._described = find_format(template)

    def prompt(self, messages: Messages) -> tuple[Messages, Object]:
        """Return the messages and the variables of the template that describe the tools."""
        if self._described:
            return messages, {"tools": described_tools(self._tools, self._template)}
        if isinstance(self._form, TaggedFormat):  # the template has calls and results
            form, template = self._form, self._template
            return with_descriptions(messages, self._tools, form.example, template), {}
        return with_tool_texts(messages, self._tools, self._template), {}

    @property
    def grammar(self) -> str | None:
        """The grammar of answers that must be calls; None if they need not be."""
        if self._choice == "auto":
            return None
        tools = self._tools
        if not isinstance(self._choice, str):
            tools = [t for t in tools if t["function"]["name"] == self._choice["name"]]
        return call_grammar(self._form, tools, self.several and self._choice == "required")

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [tool["function"]["name"] for tool in self._tools]

    def parser(self) -> ToolCallParser:
        """Return a parser for one answer."""
        if isinstance(self._form, TaggedFormat):
            return TaggedCallParser(self._form, self._tools)
        return ToolCallParser(self._form, self.names)

    def finish_reason(self, reason: str) -> str:
        """Return the finish_reason of an answer with calls, as OpenAI's API has it."""
        named = not isinstance(self._choice, str)
        return "tool_calls" if reason == "stop" and not named else reason


class AnswerParser(Protocol):
    """Splits one answer. ``calls``: number of complete calls so far."""

    @property
    def calls(self) -> int: ...

    def push(self, text: str, last: bool) -> list[Part]:
        """Return the parts that ``text`` completes, in their order; ``last``: no more follows."""


class ChatText:
    """Splits the texts of a request's answers into reasoning, content and tool calls.

    Args:
        tools: the tools of the request, if any.
        parser: returns a parser for one answer.
    """

    def __init__(self, tools: ToolUse | None, parser: Callable[[], AnswerParser]) -> None:
        self._tools, self._parser = tools, parser
        self._answers: dict[int, AnswerParser] = {}  # by choice

    def message(self, text: str, finish: str) -> tuple[Object, str]:
        """Return the fields of a message with a whole answer, and its finish_reason."""
        answer = self._parser()
        parts = self._wanted(answer.push(text, last=True))
        reasoning, content = _texts(parts)
        made: Object = {"content": content}
        if reasoning:
            made["reasoning_content"] = reasoning
        calls = dict[int, ToolCall]()
        for part in _calls(parts):
            known = calls.setdefault(part.index, ToolCall(part.index, part.name, ""))
            known.arguments += part.arguments
        if calls:
            made["content"] = content or None
            made["tool_calls"] = [call_object(call) for call in calls.values()]
        return made, self._finish(answer, finish)

    def delta(self, index: int, text: str, finish: str | None) -> tuple[Object, str | None]:
        """Return what new text adds to a choice, and its finish_reason.

        Args:
            index: number of the choice.
            text: the new text.
            finish: finish_reason; the text is the last one.
        """
        parts, reason = self.parts(index, text, finish)
        reasoning, content = _texts(parts)
        made: Object = {"content": content} if content else {}
        if reasoning:
            made["reasoning_content"] = reasoning
        if calls := _calls(parts):
            made["tool_calls"] = [{"index": call.index, **call_object(call)} for call in calls]
        return made, reason

    def parts(self, index: int, text: str, finish: str | None) -> tuple[list[Part], str | None]:
        """As `delta`, but return the parts in the order of the text."""
        answer = self._answers.setdefault(index, self._parser())
        parts = self._wanted(answer.push(text, last=finish is not None))
        return parts, self._finish(answer, finish) if finish is not None else None

    def reasoning_tokens(self, texts: Iterable[str], size: int) -> int:
        """Return how many of an answer's tokens have its reasoning, and what precedes it.

        Args:
            texts: texts of the tokens.
            size: characters of reasoning in the whole answer.
        """
        parser, count, found = self._parser(), 0, 0
        for text in texts:
            if found >= size:
                break
            count += 1
            found += len(_texts(parser.push(text, last=False))[0])
        return count

    def _wanted(self, parts: list[Part]) -> list[Part]:
        """Return the parts without those of further calls if there may not be several."""
        if self._tools is None or self._tools.several:
            return parts
        return [part for part in parts if isinstance(part, Text) or part.index == 0]

    def _finish(self, answer: AnswerParser, reason: str) -> str:
        return self._tools.finish_reason(reason) if self._tools and answer.calls else reason


class _MarkedParser:
    """Parser of an answer with reasoning and calls between markers; either may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.calls

    def push(self, text: str, last: bool) -> list[Part]:
        """See `AnswerParser`."""
        reasoning, content = self._reasoning.push(text, last) if self._reasoning else ("", text)
        parts: list[Part] = [Text(reasoning, reasoning=True)] if reasoning else []
        if self._calls is None:
            return [*parts, Text(content)] if content else parts
        return [*parts, *self._calls.push(content), *(self._calls.finish() if last else ())]


def _texts(parts: Iterable[Part]) -> tuple[str, str]:
    """Return the reasoning and the content."""
    texts = [part for part in parts if isinstance(part, Text)]
    reasoning = "".join(part.text for part in texts if part.reasoning)
    return reasoning, "".join(part.text for part in texts if not part.reasoning)


def _calls(parts: Iterable[Part]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


def call_object(call: ToolCall) -> Object:
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
    for form in FORMATS:
        if values.get(form) is not None:
            text = f"{form} with tools needs tool_choice none"
            raise ApiError(400, text, form, "unsupported_value")
    return ToolUse(tools, choice, values.get("parallel_tool_calls", True), template)


def chat_messages(
    messages: list[Any], tools: ToolUse | None, template: str
) -> tuple[list[Any], Object]:
    """Return the messages of a chat for its template, and further variables of the template."""
    parsed = with_contents(with_parsed_arguments(messages, template), template)
    if SHORT_IDS in template:
        parsed = with_short_ids(parsed)
    if tools is not None:
        return tools.prompt(parsed)
    results = any(isinstance(each, Mapping) and each.get("role") == "tool" for each in parsed)
    return without_tools(parsed) if results and "tool" not in template else parsed, {}


def chat_text(template: str, prompt_end: str, tools: ToolUse | None, grammar: bool) -> ChatText:
    """Return what splits the answers of a chat.

    Args:
        template: source of the chat template, which shows whether the model reasons.
        prompt_end: last characters of the prompt.
        tools: the tools of the request, if any.
        grammar: whether answers match a grammar, so that they have no reasoning.
    """
    names = [] if tools is None else tools.names
    if is_harmony(template):
        return ChatText(tools, partial(HarmonyParser, names))
    reasons = END in template and not grammar
    begun = prompt_end.rstrip().endswith(BEGIN)

    def parser() -> AnswerParser:
        reasoning = ReasoningParser(begun) if reasons else None
        return _MarkedParser(reasoning, None if tools is None else tools.parser())

    return ChatText(tools, parser)
