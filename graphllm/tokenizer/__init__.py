"""Tokenizers: text to token ids and back.

For a GGUF file, ids and texts equal llama.cpp's; for a Hugging Face directory, transformers'.
`load`, `from_gguf` and `from_directory` select the class:

- `bpe`, `sentencepiece`, `wordpiece`: vocabularies in GGUF files.
- `tokenizer_json`: tokenizer.json, or vocab.json and merges.txt; `hf_classes` has the pipelines of
  transformers' tokenizer classes.
- `piece_vocabulary`: SentencePiece models with a vocab.json (Marian, M2M-100); `languages`: the
  language codes of translation models.
- `sentencepiece_model`: SentencePiece .model files; `chatglm`: those of ChatGLM.
- `package_encoding`: encoding with the tokenizers package while other threads run.

`decoding` has the base class, `vocabulary` the base class of those that hold their pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ModelFileError, quote
from ..weights.gguf import GgufFile
from .bpe import BpeTokenizer
from .decoding import TextStream
from .sentencepiece import SentencePieceTokenizer, UnigramTokenizer
from .vocabulary import Vocabulary

__all__ = ["TextStream", "Tokenizer", "from_directory", "from_gguf", "load"]


class Tokenizer(Protocol):
    """Interface of tokenizers. ``bos_id`` and ``eos_id`` are None if the model has none."""

    vocab_size: int  # upper bound of ids; some ids may have no token
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]  # ids that end a generation (EOS, end of turn)
    add_bos: bool  # whether encode(add_special=True) starts with bos_id
    notes: Sequence[str]  # warnings about the vocabulary, one line each

    def encode(
        self,
        text: str,
        add_special: bool = False,
        parse_special: bool = False,
        literal: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Return the token ids of ``text``. A lone surrogate counts as U+FFFD.

        Args:
            text: Text to encode.
            add_special: Whether to add the model's begin and end tokens.
            parse_special: Whether the text of a control token becomes its id, as in chat templates.
                Never use it for untrusted text.
            literal: Spans [start, end) of ``text``, in ascending order, in which no control token
                is parsed, nor a token named like one (``<|name|>``), whatever its type.
        """

    def decode(
        self, ids: Iterable[int], skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Return the text of ``ids``. Invalid UTF-8 becomes U+FFFD.

        Args:
            ids: Token ids; RequestError for an id out of range.
            skip_special: Whether control tokens are left out.
            continuation: Whether the ids follow other text. If not, the space that some
                vocabularies put before a text is removed.
        """

    def stream(self, skip_special: bool = True, continuation: bool = False) -> TextStream:
        """Return an incremental decoder; see `decode` for the arguments."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, control tokens included. RequestError as in `decode`."""


_BPE_MODEL = "sentencepiece.bpe.model"
_KINDS: dict[str, type[Vocabulary]] = {
    "llama": SentencePieceTokenizer,
    "t5": UnigramTokenizer,
    "gpt2": BpeTokenizer,
    "gemma4": BpeTokenizer,
}


def from_gguf(file: GgufFile) -> Tokenizer:
    """Return the tokenizer of an open GGUF file.

    ModelFileError for an unknown kind of vocabulary, or a malformed one.
    """
    key = "tokenizer.ggml.model"
    kind = file.value(key, str)
    if kind == "bert":
        from .wordpiece import WordPieceTokenizer  # not needed for decoders

        return WordPieceTokenizer(file)
    if kind is None or kind not in _KINDS:
        text = f"{quote(kind)} is not supported; known: {', '.join(_KINDS)}, bert"
        raise ModelFileError(f"{file.path}: key {key!r}: {text}")
    return _KINDS[kind](file)


def from_directory(folder: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Return the tokenizer of a Hugging Face directory.

    It is read from tokenizer.json, else from a SentencePiece model (and vocab.json), else from
    vocab.json and merges.txt. ``config`` is the content of config.json if it has been read already.
    ModelFileError if none of them exists, or one is malformed.
    """
    from . import chatglm, tokenizer_json  # not needed for GGUF files
    from .sentencepiece_model import SentencePieceModelTokenizer
    from .tokenizer_config import TokenizerDirectory

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
    if "vocab.json" in present and not present.isdisjoint(("source.spm", _BPE_MODEL)):
        from .piece_vocabulary import M2M100Tokenizer, MarianTokenizer

        is_marian = "source.spm" in present
        return MarianTokenizer(directory) if is_marian else M2M100Tokenizer(directory)
    if _BPE_MODEL in present:
        raise ModelFileError(
            f"{directory.folder / _BPE_MODEL}: models with this file number their pieces "
            "differently; a tokenizer.json is required"
        )
    if {"vocab.json", "merges.txt"} <= present:
        return tokenizer_json.from_merges(directory)
    raise ModelFileError(
        f"{directory.folder}: no tokenizer: neither tokenizer.json, tokenizer.model, nor "
        "vocab.json with merges.txt"
    )


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a .gguf file or a Hugging Face directory. ModelFileError."""
    if Path(path).is_dir():
        return from_directory(Path(path))
    with GgufFile(path) as file:
        return from_gguf(file)
