"""SentencePiece tokenizers of .model files in a directory, and of llama2.c's pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, quote
from .hf_classes import prefix_scheme
from .pieces import Pieces
from .sentencepiece import SentencePieceTokenizer
from .sentencepiece_proto import ModelProto, read_model, serialize_model
from .tokenizer_config import AddedToken, TokenizerDirectory
from .vocabulary import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, known_eog_ids

_WITH_END = ("T5Tokenizer", "PegasusTokenizer")  # classes that end texts with </s>


@dataclass(frozen=True)
class VocabularyData:
    """A vocabulary in the form of GGUF's keys; see `VocabularySource`."""

    path: Path
    metadata: Mapping[str, Any]


def _metadata(**values: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


class Llama2cTokenizer(SentencePieceTokenizer):
    """Llama's SentencePiece tokenizer from pieces and scores."""

    key_format = "{}"


def from_llama2c(pieces: list[bytes], scores: Sequence[float], source: Path) -> Llama2cTokenizer:
    """Return the tokenizer of a llama2.c vocabulary.

    Ids 0, 1 and 2 are the unknown, begin and end tokens, 3 to 258 the bytes; pieces have plain
    spaces. ModelFileError if there are fewer pieces.
    """
    if len(pieces) < 259:
        raise ModelFileError(
            f"{source}: {len(pieces)} pieces; a llama's vocabulary has at least 259"
        )
    named = [b"<unk>", b"<s>", b"</s>", *pieces[3:259]]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) - 259)]
    rest = [piece.replace(b" ", SPACE.encode()) for piece in pieces[259:]]
    values = _metadata(
        tokens=named + rest,
        scores=np.asarray(scores, np.float32),
        token_type=np.array(kinds, np.uint8),
    )
    return Llama2cTokenizer(VocabularyData(source, values))


class SentencePieceModelTokenizer(SentencePieceTokenizer):
    """Tokenizer of a SentencePiece .model file (BPE or unigram) in a Hugging Face directory.

    Ids: ``offset`` unused ones, the file's pieces, ``extras``, the directory's added and special
    tokens, padding up to the model's vocabulary size.

    Args:
        path: The .model file.
        directory: Settings of the directory.
        offset: Id of the first piece.
        names: Texts of special tokens by name, for directories that do not state them.
        extras: Special tokens that follow the pieces.
        controls: Pieces that are control tokens, whatever their type in the file.
    """

    key_format = "{}"

    def __init__(
        self,
        path: Path,
        directory: TokenizerDirectory,
        *,
        offset: int = 0,
        names: Mapping[str, str] | None = None,
        extras: Sequence[str] = (),
        controls: Sequence[str] = (),
    ) -> None:
        self._proto, self._directory, self._offset = read_model(path), directory, offset
        proto = self._proto
        self._tokens = [b""] * offset + proto.pieces
        kinds = np.where(proto.kinds == USER_DEFINED, NORMAL, proto.kinds)
        self._types: list[int] = [UNUSED] * offset + kinds.tolist()
        self.prefix_after_special = prefix_scheme(directory) == "always"
        self._keeps_space = directory.class_name(byte_level=False) == "LlamaTokenizer"
        named = directory.named(names or {})
        self._known = {piece: offset + i for i, piece in enumerate(proto.pieces)}
        self._add(path, [AddedToken(text, special=True) for text in extras])
        self._mark([text for text in controls if text.encode() in self._known])
        for token, added in sorted(directory.added.items()):
            self._place(path, token, added)
        self._add(path, [*named.values(), *directory.extras()])
        self._tokens += [b""] * (directory.rows - len(self._tokens))
        self._types += [UNUSED] * (len(self._tokens) - len(self._types))
        ids = {key: self._id_of(named.get(f"{key}_token")) for key in ("bos", "eos")}
        super().__init__(VocabularyData(path, self._keys(proto, ids)))

    def _id_of(self, token: AddedToken | None) -> int | None:
        return None if token is None else self._known[token.content.encode()]

    def _keys(self, proto: ModelProto, ids: Mapping[str, int | None]) -> dict[str, Any]:
        """Return the vocabulary in the form of GGUF's keys."""
        own = {"bos": proto.bos, "eos": proto.eos}
        own = {key: None if value is None else value + self._offset for key, value in own.items()}
        ids = {key: own[key] if value is None else value for key, value in ids.items()}
        scores = np.zeros(len(self._tokens), np.float32)
        scores[self._offset : self._offset + len(proto.scores)] = proto.scores
        flag, ends = self._directory.flag, self._directory.class_name(False) in _WITH_END
        return _metadata(
            tokens=self._tokens,
            scores=scores,
            token_type=np.array(self._types, np.uint8),
            bos_token_id=ids["bos"],
            eos_token_id=ids["eos"],
            add_bos_token=flag("add_bos_token", True) and ids["bos"] is not None,
            add_eos_token=flag("add_eos_token", ends) and ids["eos"] is not None,
            add_space_prefix=flag("add_prefix_space", True) and proto.prefix,
        )

    def _mark(self, texts: Sequence[str], kind: int = CONTROL) -> None:
        """Set the type of these pieces, so that merging does not produce them."""
        for text in texts:
            token = self._known[text.encode()]
            if self._types[token] not in (UNKNOWN, BYTE):
                self._types[token] = kind

    def _place(self, path: Path, token: int, added: AddedToken) -> None:
        """Place an added token at an id, which may be a piece's. Earlier ids may stay unused."""
        text = added.content.encode()
        if self._known.get(text, token) != token or not text:
            raise ModelFileError(
                f"{path}: added token {quote(added.content)} has the id {token} in the directory, "
                f"but {self._known.get(text)} in the model"
            )
        missing = token + 1 - len(self._tokens)
        self._tokens += [b""] * missing
        self._types += [UNUSED] * missing
        self._known.pop(self._tokens[token], None)  # replace a placeholder, as in Phi-3
        self._tokens[token], self._known[text] = text, token
        self._mark([added.content], CONTROL if added.special else USER_DEFINED)

    def _add(self, path: Path, tokens: Sequence[AddedToken]) -> None:
        """Add tokens without an id after all others, unless they are pieces."""
        for added in tokens:
            known = self._known.get(added.content.encode(), len(self._tokens))
            self._place(path, known, added)

    def _find_ends(self) -> frozenset[int]:
        controls = dict(self._with_text(self._kinds == CONTROL))
        ends = known_eog_ids(controls) | self._directory.eos_ids(self.vocab_size)
        return frozenset(ends if self.eos_id is None else {*ends, self.eos_id})

    def _model(self, scores: np.ndarray) -> bytes:
        return self._serialized(self._proto.normalizer)

    def _serialized(self, normalizer: bytes) -> bytes:
        """Return the model for the package; tokens that are split off before are CONTROL."""
        proto = self._proto
        own = self._kinds[self._offset : self._offset + len(proto.pieces)]
        split_off = np.isin(own, (CONTROL, USER_DEFINED))
        kinds = np.where(split_off, np.uint8(CONTROL), proto.kinds)
        pieces = Pieces.of(proto.pieces)
        return serialize_model(pieces, proto.scores, kinds, proto.trainer, normalizer)

    @cached_property
    def _unprefixed(self) -> Any:
        """Processor for text without a space before it."""
        return self._load(self._serialized(self._proto.unprefixed))

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        if self._keeps_space and text.startswith((" ", SPACE)):
            starts = False  # as in transformers 5; SentencePiece itself would add one
        own = self._processor if starts and self.space_prefix else self._unprefixed
        ids: list[int] = own.EncodeAsIds(text)
        return [token + self._offset for token in ids] if self._offset else ids
