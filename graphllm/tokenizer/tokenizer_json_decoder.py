"""The decoders of tokenizer.json, as what each of them makes of one token.

Source: the tokenizers package, `src/decoders`. Bytes that are no UTF-8 become U+FFFD here as
everywhere in graphllm; of those of byte pieces the package replaces the valid ones beside them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelFileError
from .bpe import BYTES

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _alphabet(text: str) -> bytes:
    """Bytes in GPT-2's characters; a text with another character is itself."""
    found = [BYTES.get(char) for char in text]
    return text.encode() if None in found else b"".join(filter(None, found))


def _fallback(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.encode()


@dataclass
class Decoder:
    """How a token's text is read: replacements, then the coding of bytes.

    ``strips``: a text's first space is none of its own. ``all_spaces``: nor are the others of its
    first token.
    """

    replacements: list[tuple[str, str]] = field(default_factory=list)
    coding: str = ""
    fused: bool = False
    strips: bool = False
    all_spaces: bool = False

    def take(self, step: dict[str, Any]) -> bool:
        """Add a step of the chain; False where it is of no known kind, or not in its place."""
        kind, early = step["type"], not self.fused and not self.coding
        if kind == "Replace" and early and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and early:
            self.replacements.append((step["replacement"], " "))
            self.strips = self.all_spaces = step["prepend_scheme"] != "never"
        elif kind in ("ByteLevel", "ByteFallback") and early:
            self.coding = kind
        elif kind == "Fuse":
            self.fused = True
        elif kind == "Strip" and self.fused and step["content"] == " " and not step["stop"]:
            self.strips = step["start"] == 1
            return step["start"] <= 1
        else:
            return False
        return True

    def to_bytes(self, text: str) -> bytes:
        """The bytes that a token with this text stands for."""
        for old, new in self.replacements:
            text = text.replace(old, new)
        if self.coding == "ByteLevel":
            return _alphabet(text)
        return _fallback(text) if self.coding else text.encode()


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for part in state.get("decoders", []):
        yield from _steps(part)


def read_decoder(decoder: Any, path: Path) -> Decoder:
    """The package's ``decoder``, or None, as a `Decoder`. ModelFileError where that cannot be."""
    if decoder is None:
        raise ModelFileError(f"{path}: it has no decoder, so its tokens have no text")
    made = Decoder()
    for step in _steps(json.loads(decoder.__getstate__())):
        if not made.take(step):
            raise ModelFileError(f"{path}: decoder {step['type']} is not supported as it is there")
    return made
