"""A tiny model with a chat template that has tools, and a schema for its answers."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_models as tiny

import graphllm

TEMPLATE = """\
{%- if tools %}{{ '<tools>' ~ tools | tojson ~ '</tools> <tool_call>' }}{% endif %}
{%- for message in messages %}
{{- message.role ~ ': ' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}
{%- endfor %}{{ 'assistant:' }}
"""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["fox", "dog"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def load(folder: Path, context: int = 1024) -> graphllm.LLM:
    """Load the model; its files are written to ``folder``."""
    path = tiny.write_tiny(folder / "tiny.gguf", "llama", context=context)
    (folder / "chat.jinja").write_text(TEMPLATE)
    return graphllm.load(
        path, device="cpu", threads=1, max_sequences=8, chat_template=folder / "chat.jinja"
    )


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"a", "b"} and found["a"] <= 99 and found["b"] in ("fox", "dog")
