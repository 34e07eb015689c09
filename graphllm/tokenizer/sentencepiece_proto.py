"""Reader and writer of SentencePiece models (ModelProto), the content of .model files.

Source: sentencepiece, `sentencepiece_model.proto`, and the wire format of protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError
from .pieces import Pieces, words
from .untrusted_files import LARGEST_ID, read_bytes
from .vocabulary import NORMAL

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # fields of ModelProto
_DUMMY_PREFIX = 3  # field add_dummy_prefix of NormalizerSpec
_SHORT = 118  # bytes of a piece in a message of at most 127 bytes
_MODEL_TYPE, UNIGRAM, BPE = 3, 1, 2  # field model_type of TrainerSpec, and its values
_CHARSMAP, _MERGE_SPACES = 2, 4  # fields of NormalizerSpec
_BOS, _EOS = 41, 42  # fields bos_id and eos_id of TrainerSpec


@dataclass(frozen=True)
class ModelProto:
    """Pieces with scores and types, and the two specifications in wire format.

    ``bos`` and ``eos`` are ids or None; ``prefix``: whether a space is put before a text.
    """

    pieces: list[bytes]
    scores: np.ndarray  # float32 [pieces]
    kinds: np.ndarray  # uint8 [pieces]
    trainer: bytes
    normalizer: bytes
    bos: int | None
    eos: int | None
    prefix: bool

    @property
    def unprefixed(self) -> bytes:
        """``normalizer`` without the space before a text; of duplicate fields the last counts."""
        return self.normalizer + bytes([_DUMMY_PREFIX << 3, 0])

    @property
    def charsmap(self) -> bytes:
        """Precompiled rules of the normaliser, see `check_charsmap`; empty without any."""
        found = dict(_fields(self.normalizer)).get(_CHARSMAP, b"")
        return found if isinstance(found, bytes) else b""

    @property
    def merges_spaces(self) -> bool:
        """Whether spaces are merged, and removed around a text."""
        return bool(dict(_fields(self.normalizer)).get(_MERGE_SPACES, True))

    @property
    def is_bpe(self) -> bool:
        """Whether pieces are merged by score; otherwise this is a unigram model, or another."""
        return dict(_fields(self.trainer)).get(_MODEL_TYPE) == BPE


def read_model(path: Path) -> ModelProto:
    """Read a .model file. ModelFileError if it is another kind of file or truncated."""
    data = read_bytes(path)
    pieces: list[bytes] = []
    scores, kinds = [], []
    specs = {_TRAINER: b"", _NORMALIZER: b""}
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                if len(pieces) == LARGEST_ID:
                    raise ModelFileError(f"{path}: more than {LARGEST_ID} pieces")
                piece = dict(_fields(_bytes(value)))
                pieces.append(_bytes(piece[1]))
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                kinds.append(int(piece.get(3, NORMAL)))
            elif number in specs:
                specs[number] += _bytes(value)
        trainer = dict(_fields(specs[_TRAINER]))
        normalizer = dict(_fields(specs[_NORMALIZER]))
        bos, eos = (_signed(trainer.get(key, default)) for key, default in ((_BOS, 1), (_EOS, 2)))
        kinds_array = np.array(kinds, np.uint8)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, struct.error):
        raise ModelFileError(f"{path}: not a SentencePiece model, or truncated") from None
    if not pieces or not kinds_array.all():
        raise ModelFileError(
            f"{path}: not a SentencePiece model: no pieces, or pieces without a type"
        )
    return ModelProto(
        pieces,
        np.array(scores, np.float32),
        kinds_array,
        specs[_TRAINER],
        specs[_NORMALIZER],
        bos if 0 <= bos < len(pieces) else None,
        eos if 0 <= eos < len(pieces) else None,
        bool(normalizer.get(_DUMMY_PREFIX, True)),
    )


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("expected bytes, found a number")
    return value


def _signed(value: int | bytes) -> int:
    number = int(value)
    return number - (1 << 64) if number >> 63 else number


def _decode_varint(data: bytes, start: int) -> tuple[int, int]:
    """Decode a varint at ``start``; return it and the offset of its end."""
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of a message's fields: int for a varint, bytes for all others."""
    start = 0
    while start < len(data):
        tag, start = _decode_varint(data, start)
        wire = tag & 7
        if wire == 0:
            value, start = _decode_varint(data, start)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, start = _decode_varint(data, start)
        else:
            size = {1: 8, 5: 4}[wire]
        if size > len(data) - start:
            raise ValueError("truncated data")
        yield tag >> 3, data[start : start + size]
        start += size


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def length_delimited(number: int, data: bytes) -> bytes:
    """Encode a length-delimited protobuf field."""
    return _encode_varint(number << 3 | 2) + _encode_varint(len(data)) + data


def normalizer_spec(charsmap: bytes, prefix: bool, merge_spaces: bool) -> bytes:
    """Return a NormalizerSpec in wire format.

    Args:
        charsmap: Precompiled rules, see `check_charsmap`; empty: texts stay as they are.
        prefix: Whether a space is put before a text.
        merge_spaces: Whether spaces are merged, and removed around a text.
    """
    name = length_delimited(1, b"user_defined" if charsmap else b"identity")
    rules = length_delimited(_CHARSMAP, charsmap) if charsmap else b""
    flags = [_DUMMY_PREFIX << 3, prefix, _MERGE_SPACES << 3, merge_spaces, 5 << 3, True]
    return name + rules + bytes(flags)  # 5: escape_whitespaces


def check_charsmap(data: bytes) -> None:
    """Check the precompiled rules of a normaliser, which the package trusts. ValueError.

    They are the size of a trie in bytes, uint32; the trie (a double array of uint32 units, Yata
    et al. 2007, as darts-clone stores it); and replacements, each of which ends with a zero byte.
    """
    size = int.from_bytes(data[:4], "little")
    if not 0 < size <= len(data) - 4 or size % 1024:
        raise ValueError(f"a trie of {size} bytes in {len(data)} bytes is not supported")
    texts = data[4 + size :]
    if not texts.endswith(b"\0"):
        raise ValueError("the last replacement does not end")
    units = np.frombuffer(data, "<u4", size // 4, 4)
    nodes = np.flatnonzero(units >> 31 == 0)
    found = units[nodes]
    # A child is at this place XOR its label, in the same block of 256 units.
    children = nodes ^ (found >> 10 << ((found & 512) >> 6)).astype(np.int64)
    if children.max(initial=0) >= len(units):
        raise ValueError("the trie has a node outside of it")
    values = units[children[found >> 8 & 1 == 1]] & 0x7FFFFFFF
    if values.max(initial=0) >= len(texts):
        raise ValueError("the trie has a replacement outside of the file")


def serialize_model(
    pieces: Pieces,
    scores: np.ndarray,
    kinds: np.ndarray,
    trainer: bytes,
    normalizer: bytes,
) -> bytes:
    """Serialize a ModelProto.

    Pieces are field 1, {1: piece, 2: score, 3: type}. There may be 262,144 of them, so they are
    written in bulk, in whole words: what a word writes too much is overwritten by what follows.

    Args:
        pieces: Texts of the pieces.
        scores: Scores, float32 [pieces].
        kinds: Types, uint8 [pieces].
        trainer: TrainerSpec in wire format, field 2.
        normalizer: NormalizerSpec in wire format, field 3.
    """
    sizes, head_sizes = pieces.sizes, np.full(len(pieces), 4)
    heads = {}  # of pieces whose sizes need more than one byte
    for token in np.flatnonzero(sizes > _SHORT).tolist():
        head = b"\x0a" + _encode_varint(int(sizes[token]))
        heads[token] = b"\x0a" + _encode_varint(len(head) + int(sizes[token]) + 7) + head
        head_sizes[token] = len(heads[token])
    ends = np.cumsum(head_sizes + sizes + 7)
    texts = ends - 7 - sizes
    body = np.empty(int(ends[-1]) + 8, np.uint8)
    for at in range(0, _SHORT, 8):
        rows = np.flatnonzero((sizes > at) & (sizes <= _SHORT))
        if not len(rows):
            break
        words(body)[texts[rows] + at] = words(pieces.text)[pieces.starts[rows] + at]
    # Tags: field 2 is a fixed32, 3 a varint.
    bits = np.ascontiguousarray(scores, "<f4").view("<u4").astype(np.uint64)
    tails = 0x18_00000000_15 | bits << np.uint64(8) | kinds.astype(np.uint64) << np.uint64(48)
    words(body)[ends - 7] = tails
    rows = np.flatnonzero(sizes <= _SHORT)
    short = sizes[rows].astype(np.uint32)
    words(body, "<u4")[texts[rows] - 4] = 0x0A000A | (short + 9) << 8 | short << 24
    for token, head in heads.items():
        own = head + pieces[token]
        end = int(ends[token]) - 7
        body[end - len(own) : end] = np.frombuffer(own, np.uint8)
    last = length_delimited(2, trainer) + length_delimited(3, normalizer)
    return body[: int(ends[-1])].tobytes() + last


def load_processor(model: bytes) -> Any:
    """Load a serialized ModelProto into the package's processor. ValueError: why it refuses it."""
    from sentencepiece import SentencePieceProcessor  # slow to import

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return processor
