"""The decoder of tokenizer.json, as a function from one token to its bytes.

Source: the tokenizers package, `src/decoders`. Invalid UTF-8 becomes U+FFFD, as everywhere in
graphllm; the package also replaces valid byte tokens next to invalid ones.
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
    """Decode GPT-2's byte characters; a text with any other character is returned as UTF-8."""
    found = [BYTES.get(char) for char in text]
    return text.encode() if None in found else b"".join(filter(None, found))


def _fallback(text: str) -> bytes:
    byte = _BYTE.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.encode()


# What WordPiece's cleanup writes without the space before it, as far as a single token can have it.
_CLEANED = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")


def clean_up(text: str) -> str:
    """Remove the space before punctuation and contractions, as WordPiece's decoder does."""
    for mark in _CLEANED:
        text = text.replace(f" {mark}", mark)
    return text


@dataclass
class Decoder:
    """Decoding of a token's text: replacements, then the byte coding.

    ``strips``: the first space of a text is removed. ``all_spaces``: so are the other spaces of its
    first token. ``prefix``: beginning of a WordPiece token that continues a word; other tokens
    begin with a space, with ``cleanup`` not before punctuation.
    """

    replacements: list[tuple[str, str]] = field(default_factory=list)
    coding: str = ""
    fused: bool = False
    strips: bool = False
    all_spaces: bool = False
    prefix: str = ""
    cleanup: bool = False

    def take(self, step: dict[str, Any]) -> bool:
        """Add a step of the decoder chain.

        Returns:
            False if its kind is unknown or it is not supported at this position.
        """
        kind, early = step["type"], not self.fused and not self.coding
        if kind == "Replace" and early and "String" in step["pattern"]:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace" and early:
            self.replacements.append((step["replacement"], " "))
            self.strips = self.all_spaces = step["prepend_scheme"] != "never"
        elif kind in ("ByteLevel", "ByteFallback") and early:
            self.coding = kind
        elif kind == "WordPiece" and early:
            self.coding, self.prefix, self.strips = kind, step["prefix"], True
            self.cleanup = step["cleanup"]
        elif kind == "Fuse":
            self.fused = True
        elif kind == "Strip" and self.fused and step["content"] == " " and not step["stop"]:
            self.strips = step["start"] == 1
            return step["start"] <= 1
        else:
            return False
        return True

    def to_bytes(self, text: str) -> bytes:
        """Return the bytes of a token with this text."""
        for old, new in self.replacements:
            text = text.replace(old, new)
        if self.coding == "ByteLevel":
            return _alphabet(text)
        if self.coding == "WordPiece":
            inner = self.prefix and text.startswith(self.prefix)
            text = text[len(self.prefix) :] if inner else f" {text}"
            return (clean_up(text) if self.cleanup else text).encode()
        return _fallback(text) if self.coding else text.encode()


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for part in state.get("decoders", []):
        yield from _steps(part)


def read_decoder(decoder: Any, path: Path) -> Decoder:
    """Convert the package's ``decoder`` to a `Decoder`. ModelFileError if it is not supported."""
    if decoder is None:
        raise ModelFileError(f"{path}: no decoder, so its tokens have no text")
    result = Decoder()
    for step in _steps(json.loads(decoder.__getstate__())):
        if not result.take(step):
            raise ModelFileError(
                f"{path}: decoder {step['type']} is not supported in this form or position"
            )
    return result
