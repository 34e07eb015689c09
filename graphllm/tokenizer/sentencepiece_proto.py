"""SentencePiece's .model files, read into arrays.

Source: sentencepiece, `sentencepiece_model.proto`, and the wire format of protocol buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ModelFileError
from .untrusted_files import read_bytes
from .vocabulary import NORMAL

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3  # of a ModelProto
_DUMMY_PREFIX = 3  # of a NormalizerSpec
_BOS, _EOS = 41, 42  # of a TrainerSpec


@dataclass(frozen=True)
class ModelProto:
    """Pieces with their scores and types, and the two specifications in wire format.

    ``bos`` and ``eos`` are ids, or None; ``prefix`` says whether a space is put before a text.
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
        """``normalizer``, but no space is put before a text: the last of two fields counts."""
        return self.normalizer + bytes([_DUMMY_PREFIX << 3, 0])


def read_model(path: Path) -> ModelProto:
    """The file's content. ModelFileError where it is of another kind, or cut off."""
    data = read_bytes(path)
    pieces, scores, kinds = [], [], []
    specs = {_TRAINER: b"", _NORMALIZER: b""}
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                piece = dict(_fields(_bytes(value)))
                pieces.append(_bytes(piece[1]))
                scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                kinds.append(int(piece.get(3, NORMAL)))
            elif number in specs:
                specs[number] += _bytes(value)
        trainer = dict(_fields(specs[_TRAINER]))
        normalizer = dict(_fields(specs[_NORMALIZER]))
        bos, eos = (_signed(trainer.get(key, usual)) for key, usual in ((_BOS, 1), (_EOS, 2)))
        kinds_array = np.array(kinds, np.uint8)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, struct.error):
        raise ModelFileError(f"{path}: not a SentencePiece model, or cut off") from None
    if not pieces or not kinds_array.all():
        raise ModelFileError(f"{path}: not a SentencePiece model: it has no pieces, or bad ones")
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
        raise TypeError("a number where bytes should be")
    return value


def _signed(value: int | bytes) -> int:
    number = int(value)
    return number - (1 << 64) if number >> 63 else number


def _varint(data: bytes, start: int) -> tuple[int, int]:
    """A number, and where it ends."""
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
    """Numbers and values of a message's fields: ints for varints, bytes for all others."""
    start = 0
    while start < len(data):
        tag, start = _varint(data, start)
        wire = tag & 7
        if wire == 0:
            value, start = _varint(data, start)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, start = _varint(data, start)
        else:
            size = {1: 8, 5: 4}[wire]
        if size > len(data) - start:
            raise ValueError("the data end early")
        yield tag >> 3, data[start : start + size]
        start += size
