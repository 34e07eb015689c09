"""SentencePiece vocabularies of GGUF files (`tokenizer.ggml.model` = llama or t5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from .pieces import Pieces
from .sentencepiece_proto import (
    BPE,
    UNIGRAM,
    check_charsmap,
    load_processor,
    normalizer_spec,
    serialize_model,
)
from .vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    VocabularySource,
)


class SentencePieceTokenizer(Vocabulary):
    """SentencePiece BPE with scores and byte fallback: Llama 1 and 2, Mistral, Gemma 1 to 3.

    The sentencepiece package merges; special tokens and the leading space are handled before.
    """

    default_ids: tuple[int | None, int | None, int | None] = (1, 2, 0)
    default_adds = (True, False, True)
    model_type = BPE
    skipped_kind = CONTROL  # type of further tokens that do not take part

    def __init__(self, file: VocabularySource) -> None:
        super().__init__(file)
        scores = self._numbers("scores", "f")
        if scores is None or not np.isfinite(scores).all():
            raise self._error("scores", "missing or not finite")
        self._byte_tokens = self._find_bytes()
        self._processor = self._load(self._model(scores))

    def _load(self, model: bytes) -> Any:
        """Load a ModelProto into the package's processor."""
        try:
            return load_processor(model)
        except ValueError as error:
            raise self._error("tokens", f"not a usable vocabulary: {error}") from None

    def _model(self, scores: np.ndarray) -> bytes:
        """Return the vocabulary as a SentencePiece ModelProto.

        Control tokens do not take part in merging (type CONTROL). User-defined ones are NORMAL,
        since `SpecialTokens` splits them off before. SentencePiece requires one UNKNOWN piece, and
        all 256 BYTE pieces or none.
        """
        kinds = self._kinds.copy()
        fallback = len(set(self._byte_tokens.values())) == 256
        if not fallback:
            kinds[kinds == BYTE] = CONTROL
        kinds[kinds == UNKNOWN] = CONTROL
        kinds[(kinds != CONTROL) & (kinds != BYTE) & (kinds != self.skipped_kind)] = NORMAL
        pieces, hidden = self._pieces, self._pieces.hidden()
        if hidden:  # SentencePiece refuses empty and duplicate pieces: give them private-use names
            kinds[hidden] = CONTROL
            texts = pieces.tolist()
            for token in hidden:
                texts[token] = b"\xf3\xb0\x80\x80%d" % token
            pieces = Pieces.of(texts)
        unknown = np.flatnonzero(self._kinds == UNKNOWN)
        kinds[unknown[0] if len(unknown) else self._unknown_id or 0] = UNKNOWN
        trainer = bytes([3 << 3, self.model_type]) + b"\x98\x02" + bytes([fallback])  # field 35
        return serialize_model(pieces, scores, kinds, trainer, self._normalizer())

    def _normalizer(self) -> bytes:
        """Return the NormalizerSpec: texts are normalised and begin with a space already."""
        return normalizer_spec(b"", prefix=False, merge_spaces=False)

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        if starts and self.space_prefix:
            text = " " + text
        ids: list[int] = self._processor.EncodeAsIds(text)
        return ids

    def _bytes_of(self, token: int) -> bytes:
        kind = self._kinds[token]
        if kind == NORMAL:
            return self._pieces[token].replace(SPACE.encode(), b" ")
        if kind == BYTE:
            return self._byte_tokens[token]
        return self._pieces[token] if kind in (CONTROL, UNKNOWN, USER_DEFINED) else b""


class UnigramTokenizer(SentencePieceTokenizer):
    """SentencePiece unigram with a normaliser: T5, XLM-RoBERTa.

    As in llama.cpp, each part of a text between special tokens begins with a space.
    """

    default_ids = (None, 1, 2)
    default_adds = (False, True, False)
    model_type = UNIGRAM
    skipped_kind = UNUSED  # padding of the vocabulary, whose scores would lower that of unknown

    def _normalizer(self) -> bytes:
        stored: Any = self._file.metadata.get("tokenizer.ggml.precompiled_charsmap")
        charsmap = b""
        if stored is not None:
            if not isinstance(stored, np.ndarray) or stored.dtype not in (np.int8, np.uint8):
                raise self._error("precompiled_charsmap", "not an array of bytes")
            charsmap = stored.tobytes()
            try:
                check_charsmap(charsmap)
            except ValueError as error:
                raise self._error("precompiled_charsmap", str(error)) from None
        merge_spaces = self._flag("remove_extra_whitespaces", False)
        return normalizer_spec(charsmap, self.space_prefix, merge_spaces)

    def _encode_text(self, text: str, starts: bool) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(text)
        return ids
