"""Tokenizers: text to token ids and back, from the vocabulary that a model comes with.

Of a GGUF file, ids and texts equal llama.cpp's; of a Hugging Face directory, transformers'. `load`,
`from_gguf` and `from_directory` choose the class for a kind of vocabulary; `decoding` and
`vocabulary` have what the kinds share, and one module each has the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ModelFileError, quote
from ..weights.gguf import GgufFile
from . import chatglm, tokenizer_json
from .bpe import BpeTokenizer
from .decoding import TextStream
from .sentencepiece import SentencePieceTokenizer
from .sentencepiece_model import SentencePieceModelTokenizer, from_llama2c
from .tokenizer_config import TokenizerDirectory
from .vocabulary import Vocabulary

__all__ = ["TextStream", "Tokenizer", "from_directory", "from_gguf", "from_llama2c", "load"]


class Tokenizer(Protocol):
    """What every tokenizer does. ``bos_id`` and ``eos_id`` are None where a model has none."""

    vocab_size: int  # ids are below it; some may stand for nothing
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]  # any of these ends a generation
    add_bos: bool  # whether encode(add_special=True) begins with bos_id
    notes: Sequence[str]  # what a user should know of the vocabulary, a line each

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds the model's begin and end tokens; ``parse_special`` turns the text of
        control pieces into their ids (for chat templates; never for text from outside), except
        where any of it lies in one of the ``literal`` spans [start, end), in ascending order. There
        pieces named as control pieces are (``<|name|>``) are text, too, whatever their type says.
        A lone surrogate in ``text`` counts as U+FFFD.
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
    "llama": SentencePieceTokenizer,
    "gpt2": BpeTokenizer,
    "gemma4": BpeTokenizer,
}


def from_gguf(file: GgufFile) -> Tokenizer:
    """The tokenizer of an open GGUF file; ModelFileError for a bad vocabulary or unknown kind."""
    key = "tokenizer.ggml.model"
    kind = file.value(key, str)
    if kind is None or kind not in _KINDS:
        text = f"{quote(kind)} is not supported; known: {', '.join(_KINDS)}"
        raise ModelFileError(f"{file.path}: key {key!r}: {text}")
    return _KINDS[kind](file)


def from_directory(folder: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, whose ``config`` may have been read already.

    Of tokenizer.json, else of a SentencePiece model, else of vocab.json and merges.txt.
    ModelFileError where there is none of them, or a bad one.
    """
    directory = TokenizerDirectory(Path(folder), config)
    present = {path.name for path in directory.folder.glob("*.*")}
    is_glm = directory.config.get("model_type") == "chatglm"
    if "tokenizer.json" in present:
        return tokenizer_json.from_json(directory)
    if "ice_text.model" in present:
        return chatglm.ChatGlmTokenizer(directory.folder / "ice_text.model", directory)
    for name in ("tokenizer.model", "spiece.model"):
        if name in present:
            kind = chatglm.ChatGlm2Tokenizer if is_glm else SentencePieceModelTokenizer
            return kind(directory.folder / name, directory)
    if "sentencepiece.bpe.model" in present:
        raise ModelFileError(
            f"{directory.folder / 'sentencepiece.bpe.model'}: models with it number their pieces "
            "otherwise; a tokenizer.json is needed"
        )
    if {"vocab.json", "merges.txt"} <= present:
        return tokenizer_json.from_merges(directory)
    raise ModelFileError(
        f"{directory.folder}: no tokenizer: neither tokenizer.json nor tokenizer.model, nor "
        "vocab.json with merges.txt"
    )


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a .gguf file or a Hugging Face directory. ModelFileError."""
    if Path(path).is_dir():
        return from_directory(Path(path))
    with GgufFile(path) as file:
        return from_gguf(file)
