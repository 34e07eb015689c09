"""Grammars of answers that must be tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .tool_formats import HARMONY, ArgumentTags, TaggedFormat, ToolFormat
from .tools import Tool

# As `engine.grammar` has it for JSON schemas.
_SPACING = {"x-guidance": {"whitespace_pattern": r" |\n[ \t]{0,20}"}}
_SHARED = ("$defs", "definitions")  # keys of a schema to which its properties may refer


def call_grammar(form: ToolFormat, tools: Sequence[Tool], several: bool) -> str:
    """Return the Lark grammar of answers that call one of ``tools``, or several times if so."""
    if isinstance(form, TaggedFormat):
        return "\n".join(_tagged(form, tools, several))
    rules = []
    for index, tool in enumerate(tools):
        own = tool["function"]
        head, tail = f'{{"name": "{own["name"]}", "{form.key}": ', '"}"'
        if form is HARMONY:
            head = f"<|channel|>commentary to=functions.{own['name']} <|constrain|>json<|message|>"
            tail, several = "", False  # the token <|call|> ends the answer
        elif form.named:
            head, tail = own["name"], ""
        own_id = f"/[a-zA-Z0-9]{{{form.id_length}}}/" if form.id_length else ""
        rules.append(f"call_{index}: {_text(head)} {own_id} {_json(own['parameters'])} {tail}")
    if form.listed:
        start = '"[" call ("," " "? call)* "]"' if several else '"[" call "]"'
    elif form.begin:
        one = f"{_text(form.begin + chr(10))} call {_text(chr(10) + form.end)}"
        start = f'{one} ("\\n" {one})*' if several else one
    elif form.named:
        start = "call+" if several else "call"
    else:
        start = 'call (";" " "? call)*' if several else "call"
    return "\n".join([f"start: {start}", _any_call(tools), *rules])


def _tagged(form: TaggedFormat, tools: Sequence[Tool], several: bool) -> Iterator[str]:
    """Yield the rules of calls between markers, with the white space of the templates."""
    begin, *ends = form.begin, *form.ends
    if form.wrapped:
        between = '("\\n")?' if several else ""
        calls = f"call ({between} call)*" if several else "call"
        yield f"start: {_text(form.wrapper)} {calls} {_text(ends.pop())}"
    else:
        yield 'start: call ("\\n" call)*' if several else "start: call"
        if form.wrapper:
            begin = f"{form.wrapper}\n{begin}"
            ends.insert(1, "\n")
    yield _any_call(tools)
    for index, tool in enumerate(tools):
        own = tool["function"]
        head = f"call_{index}: {_text(begin + own['name'] + form.separator)}"
        if form.tags is None:
            yield f"{head} {_json(own['parameters'])} {_text(''.join(ends))}"
            continue
        arguments = [*_arguments(form.tags, own["parameters"])]
        names = [f"call_{index}_{at}{'' if a[1] else '?'}" for at, a in enumerate(arguments)]
        yield f'{head} "\\n"? {" ".join(names)} {_text("".join(ends))}'
        yield from (f"call_{index}_{at}: {rule}" for at, (rule, _) in enumerate(arguments))
    if form.tags is not None:
        end = re.escape(_value_end(form.tags)).replace("\\\n", r"\n").replace("/", r"\/")
        yield f"string[lazy]: /(?s:.*){end}/"


def _arguments(tags: ArgumentTags, schema: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the rule of each property of a schema, and whether it is required."""
    shared = {key: schema[key] for key in _SHARED if key in schema}
    required = schema.get("required") or ()
    properties = schema.get("properties")
    for name, own in properties.items() if isinstance(properties, Mapping) else ():
        head = _text(f"{tags.key_begin}{name}{tags.key_end}")
        head += f' "\\n"? {_text(tags.value_begin)}' if tags.value_begin else ' "\\n"'
        texts = string_values(own)
        if texts is None:
            own = {**own, **shared} if isinstance(own, Mapping) else own
            value = f"{_json(own)} {_text(_value_end(tags))}"
        elif texts:
            value = f"({' | '.join(map(_text, texts))}) {_text(_value_end(tags))}"
        else:
            value = "string"
        yield f'{head} {value} "\\n"?', name in required


def _value_end(tags: ArgumentTags) -> str:
    return f"\n{tags.value_end}" if tags.lines else tags.value_end


def string_values(schema: Any) -> list[str] | None:
    """Return the strings that a schema lists; empty for any, None if not all values are strings."""
    if not isinstance(schema, Mapping):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(listed, list):
        return listed if listed and all(isinstance(each, str) for each in listed) else None
    return [] if schema.get("type") in ("string", ["string"]) else None


def _any_call(tools: Sequence[Tool]) -> str:
    return f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"


def _json(schema: Any) -> str:
    """Return the term of the values of a JSON schema."""
    return f"%json {json.dumps({**schema, **_SPACING} if isinstance(schema, Mapping) else schema)}"


def _text(text: str) -> str:
    """Return the term of a string; that of an empty one is empty."""
    return json.dumps(text) if text else ""
