"""Vocabulary-only GGUF files of any kind, written by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from gguf_files import finish


def write_vocabulary(
    path: Path, content: dict[str, Any], arch: str = "foreign", title: str = "", **keys: Any
) -> Path:
    """A file with ``pieces`` (str or bytes), ``types``, ``scores`` and ``merges``, if there.

    The rest of ``content``, and ``keys``, which come first, are other tokenizer.ggml.*: str, bool
    or int, or None for none. `model` is gpt2 where they do not say. ``title`` is general.name.
    """
    parts = {"model": "gpt2"} | content | keys
    parts = {key: value for key, value in parts.items() if value is not None}
    writer = gguf.GGUFWriter(path, arch)
    if title:
        writer.add_name(title)
    if "pieces" in parts:
        pieces = parts.pop("pieces")
        writer.add_token_list([p.encode() if isinstance(p, str) else p for p in pieces])
    if "types" in parts:
        writer.add_token_types(parts.pop("types"))
    if "scores" in parts:
        writer.add_token_scores(parts.pop("scores"))
    if "merges" in parts:
        writer.add_token_merges(parts.pop("merges"))
    for key, value in parts.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add("tokenizer.ggml." + key, value)
    return finish(writer, path)
