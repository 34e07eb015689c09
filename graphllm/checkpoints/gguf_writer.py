"""Writer of GGUF files, version 3.

Source of the format: ggml, `docs/gguf.md`. The file gets its name when it is complete.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_file import AtomicFile
from ..errors import ModelFileError, quote
from ..formats import BLOCK_FORMATS
from ..graph.dtype import DType
from ..weights.gguf_format import PLAIN_TYPES, Cursor, read_header
from ..weights.mapped_file import MappedFile

ALIGNMENT = 32
_NUMBERS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_PLAIN_NUMBERS = {name: number for number, name in PLAIN_TYPES.items()}


def _string(text: str | bytes) -> bytes:
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> bytes:
    """Return a metadata value with its type.

    A bool, a str (or UTF-8 bytes), a NumPy number, a one-dimensional NumPy array, or a sequence of
    strings. A Python int is a uint32, a float a float32.
    """
    if isinstance(value, (bool, np.bool_)):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, int):
        value = np.uint32(value)
    elif isinstance(value, float):
        value = np.float32(value)
    if isinstance(value, np.generic):
        kind = _NUMBERS[value.dtype.name]
        return struct.pack("<I", kind) + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, np.ndarray):
        kind = _BOOL if value.dtype == bool else _NUMBERS[value.dtype.name]
        data = value.astype(value.dtype.newbyteorder("<")).tobytes()
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + data
    parts = [struct.pack("<IIQ", _ARRAY, _STRING, len(value)), *map(_string, value)]
    return b"".join(parts)


def read_encoded_metadata(path: Path) -> dict[str, bytes]:
    """Return the metadata of a GGUF file as `encode_value` returns values, which keeps their types.

    ModelFileError if the file is malformed.
    """
    file = MappedFile(path, data=False)
    cursor = Cursor(file.view(), path)
    found = {}
    _, _, count = read_header(cursor)
    for _ in range(count):
        key = cursor.string()
        start = cursor.pos
        cursor.value()
        found[key] = bytes(cursor.data[start : cursor.pos])
    del cursor
    file.close()
    return found


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to write: ``shape`` is outermost first."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return self.dtype.row_nbytes(self.shape[-1]) * math.prod(self.shape[:-1])

    @property
    def padded_bytes(self) -> int:
        """Size in a file, whose tensors are aligned."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def type_number(self) -> int:
        form = BLOCK_FORMATS.get(self.dtype.name)
        number = form.gguf_type if form else _PLAIN_NUMBERS.get(self.dtype.name)
        if number is None:
            raise ModelFileError(f"tensor {quote(self.name)}: GGUF has no type {self.dtype}")
        return number


def _header(metadata: dict[str, bytes], tensors: Sequence[TensorEntry]) -> bytes:
    """The bytes before the tensors' data, padded."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), value]
    offset = 0
    for each in tensors:
        dims = each.shape[::-1]
        parts += [
            _string(each.name),
            struct.pack(f"<I{len(dims)}Q", len(dims), *dims),
            struct.pack("<IQ", each.type_number, offset),
        ]
        offset += each.padded_bytes
    data = b"".join(parts)
    return data + bytes(-len(data) % ALIGNMENT)


def file_bytes(metadata: dict[str, bytes], tensors: Sequence[TensorEntry]) -> int:
    """Return the size of a file that `GgufWriter` writes."""
    return len(_header(_aligned(metadata), tensors)) + sum(each.padded_bytes for each in tensors)


def _aligned(metadata: dict[str, bytes]) -> dict[str, bytes]:
    return {**metadata, "general.alignment": encode_value(ALIGNMENT)}


class GgufWriter:
    """A GGUF file being written; a context manager that removes it after an error.

    Tensors are written in the order of ``tensors``, each in any number of parts.

    Args:
        path: The file.
        metadata: Values by key, see `encode_value`.
        tensors: All tensors.
        force: Whether to replace an existing file.

    Raises:
        RequestError: The file exists.
        OSError: The file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        metadata: dict[str, bytes],
        tensors: Sequence[TensorEntry],
        force: bool = False,
    ) -> None:
        self._file = AtomicFile(path, force)
        self._left = [each.nbytes for each in tensors]
        self._header = _header(_aligned(metadata), tensors)

    def __enter__(self) -> GgufWriter:
        self._file.__enter__()
        try:
            self._file.write(self._header)
        except BaseException:
            self._file.discard()
            raise
        return self

    def write(self, data: np.ndarray) -> None:
        """Append bytes of the current tensor."""
        self._left[0] -= data.nbytes
        assert self._left[0] >= 0, "more bytes than the tensor has"
        self._file.write(np.ascontiguousarray(data).data.cast("B"))
        if not self._left[0]:
            self._file.write(bytes(-self._file.nbytes % ALIGNMENT))
            del self._left[0]

    def __exit__(self, kind: object, *failure: object) -> None:
        assert kind is not None or not self._left, "tensors are missing"
        self._file.__exit__(kind)
