"""SentencePiece vocabularies (`tokenizer.ggml.model` = llama), by the sentencepiece package."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    VocabularySource,
)


class SentencePieceTokenizer(Vocabulary):
    """SentencePiece BPE with scores and byte fallback: Llama 1 and 2, Mistral, Gemma 1 to 3.

    The merging is the package's; special pieces and the leading space are handled before it.
    """

    default_ids = (1, 2, 0)
    default_adds = (True, False, True)

    def __init__(self, file: VocabularySource) -> None:
        super().__init__(file)
        scores = self._numbers("scores", "f")
        if scores is None or not np.isfinite(scores).all():
            raise self._error("scores", "missing or not finite")
        self._byte_tokens = self._find_bytes()
        self._processor = self._load(self._model(scores))

    def _load(self, model: bytes) -> Any:
        """The package's processor of a ModelProto."""
        from sentencepiece import SentencePieceProcessor  # slow to import, so only when needed

        processor = SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(model)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise self._error("tokens", f"not a usable vocabulary: {reason}") from None
        return processor

    def _model(self, scores: np.ndarray) -> bytes:
        """The vocabulary as a SentencePiece ModelProto.

        Control pieces stay out of merging (type CONTROL); user-defined ones are ordinary here,
        since `SpecialTokens` has cut them out. One piece must be UNKNOWN, and BYTE needs all 256.
        """
        kinds = self._kinds.copy()
        pieces: Sequence[bytes] = self._pieces
        fallback = len(set(self._byte_tokens.values())) == 256
        if not fallback:
            kinds[kinds == BYTE] = CONTROL
        kinds[kinds == UNKNOWN] = CONTROL
        kinds[(kinds != CONTROL) & (kinds != BYTE)] = NORMAL
        if len(self._index) != self.vocab_size or b"" in self._index:
            # SentencePiece refuses empty and repeated pieces: hide them under private-use names.
            hidden = {i for i, p in enumerate(pieces) if not p or self._index[p] != i}
            kinds[list(hidden)] = CONTROL
            pieces = [b"\xf3\xb0\x80\x80%d" % i if i in hidden else p for i, p in enumerate(pieces)]
        unknown = np.flatnonzero(self._kinds == UNKNOWN)
        kinds[unknown[0] if len(unknown) else self._unknown_id or 0] = UNKNOWN
        trainer = b"\x18\x02" + b"\x98\x02" + bytes([fallback])  # 3: model_type BPE, 35
        # 3: add_dummy_prefix no, 4: remove_extra_whitespaces no, 5: escape_whitespaces yes
        normalizer = _field(1, b"identity") + b"\x18\x00\x20\x00\x28\x01"
        return model_proto(pieces, scores, kinds, trainer, normalizer)

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


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def model_proto(
    pieces: Sequence[bytes],
    scores: np.ndarray,
    kinds: np.ndarray,
    trainer: bytes,
    normalizer: bytes,
) -> bytes:
    """A ModelProto (source: sentencepiece, `sentencepiece_model.proto`) in wire format.

    ``trainer`` and ``normalizer`` are its fields 2 and 3, so written. Pieces are field 1,
    {1: piece, 2: score, 3: type}. There may be 262,144, so each part of all is made in bulk.
    """
    tails = np.empty((len(pieces), 7), np.uint8)
    tails[:, 0], tails[:, 5], tails[:, 6] = 0x15, 0x18, kinds  # tags: field 2 fixed32, 3 varint
    tails[:, 1:5] = np.ascontiguousarray(scores, "<f4").view(np.uint8).reshape(-1, 4)
    ends = tails.view("S7").ravel().tolist()  # no kind is 0, so "S" cuts nothing off
    sizes = list(map(len, pieces))
    heads = {}
    for size in set(sizes):
        head = b"\x0a" + _varint(size)
        heads[size] = b"\x0a" + _varint(len(head) + size + 7) + head
    starts = map(heads.__getitem__, sizes)
    body = b"".join(itertools.chain.from_iterable(zip(starts, pieces, ends, strict=True)))
    return body + _field(2, trainer) + _field(3, normalizer)
