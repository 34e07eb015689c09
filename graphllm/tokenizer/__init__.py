"""Tokenizers: text to token ids and back, from the vocabulary that a model file carries.

Ids and texts equal llama.cpp's. `load` and `from_gguf` choose the class for a kind of vocabulary;
`vocabulary` has what the kinds share, and one module each has the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Protocol

from ..errors import ModelFileError
from ..weights.gguf import GGUF
from .bpe import BpeTokenizer
from .spm import SpmTokenizer
from .vocabulary import TextStream, Vocabulary

__all__ = ["TextStream", "Tokenizer", "from_gguf", "load"]


class Tokenizer(Protocol):
    """What every tokenizer does. ``bos_id`` and ``eos_id`` are None where a model has none."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]  # any of these ends a generation
    add_bos: bool  # whether encode(add_special=True) begins with bos_id

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds the model's begin and end tokens; ``parse_special`` turns the text of
        control pieces into their ids (for chat templates; never for text from outside). A lone
        surrogate in ``text`` counts as U+FFFD.
        """

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Text of ``ids``; invalid UTF-8 becomes U+FFFD. RequestError for an id out of range.

        ``skip_special`` leaves out control pieces. Vocabularies that put a space before a text lose
        it again here, but not with ``continuation``: then the ids follow other text.
        """

    def stream(self, skip_special: bool = True, continuation: bool = False) -> TextStream:
        """A decoder for one id at a time."""

    def piece(self, token: int) -> bytes:
        """The bytes that the token stands for, control pieces included; RequestError as decode."""


_KINDS: dict[str, type[Vocabulary]] = {
    "llama": SpmTokenizer,
    "gpt2": BpeTokenizer,
    "gemma4": BpeTokenizer,
}


def from_gguf(file: GGUF) -> Tokenizer:
    """The tokenizer of an open GGUF file; ModelFileError for a bad vocabulary or unknown kind."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise ModelFileError(
            f"{file.path}: key 'tokenizer.ggml.model': {kind!r} is not supported; known: {known}"
        )
    return _KINDS[kind](file)


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a .gguf file; ModelFileError as for `from_gguf`."""
    with GGUF(path) as file:
        return from_gguf(file)
