"""What a parser of tool calls makes of an answer that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from graphllm.server.tagged_call_parser import TaggedCallParser
from graphllm.server.tool_call_parser import Part, Text, ToolCallParser


def joined(pieces: Iterable[list[Part]]) -> list[Part]:
    return [part for parts in pieces for part in parts]


def parsed(
    parser: ToolCallParser | TaggedCallParser, pieces: list[str]
) -> tuple[str, list[tuple[str, str]], int]:
    """Text, calls as (name, JSON text), and the number of complete calls."""
    shown, calls = "", dict[int, list[str]]()
    for part in joined([*map(parser.push, pieces), parser.finish()]):
        if isinstance(part, Text):
            shown += part.text
        else:
            own = calls.setdefault(part.index, [part.name, ""])
            assert part.name in ("", own[0])
            own[1] += part.arguments
    return shown, [(name, text) for name, text in calls.values()], parser.calls
