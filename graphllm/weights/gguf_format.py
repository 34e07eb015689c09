"""Parser of the GGUF format: header, metadata, tensor entries.

Source of the format: ggml, `docs/gguf.md`. Files are untrusted: every count, length and offset is
checked against the size of the file before it is used. A malformed file costs at most one pass over
it and raises a ModelFileError that names the file and the key or tensor.
"""

from __future__ import annotations

import itertools
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from ..errors import ModelFileError, quote
from ..formats import BLOCK_FORMATS
from ..graph.dtype import DTYPES, DType
from .mapped_file import TensorInfo

# ggml_type -> name of a plain dtype. The block formats declare their own numbers.
PLAIN_TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16",
}  # fmt: skip

# Other formats: with their sizes known, the file can be listed, but the tensors cannot be read.
_UNSUPPORTED: dict[int, DType] = {
    number: DType(name, block, nbytes)
    for number, name, block, nbytes in (
        (9, "q8_1", 32, 36), (15, "q8_k", 256, 292), (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74), (18, "iq3_xxs", 256, 98), (19, "iq1_s", 256, 50),
        (21, "iq3_s", 256, 110), (22, "iq2_s", 256, 82), (29, "iq1_m", 256, 56),
        (34, "tq1_0", 256, 54), (35, "tq2_0", 256, 66), (40, "nvfp4", 64, 36),
        (41, "q1_0", 128, 18),
    )
}  # fmt: skip

# Metadata value type -> struct code; strings and arrays have types of their own.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMPY = {"B": "u1", "b": "i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "f": "<f4",
          "Q": "<u8", "q": "<i8", "d": "<f8"}  # fmt: skip
_STRUCTS = {code: struct.Struct("<" + code) for code in _NUMPY}
_MAX_DIMS = 4
_MAX_KEYS, _MAX_TENSORS = 1 << 16, 1 << 18  # far above those of any model
_WINDOW = 1 << 20  # bytes in which lengths of strings are guessed at once
_WALK = 64  # strings that are first read one by one where a guess fails
_MAX_NAME = 65535  # bytes of a key (the format's limit) or of a tensor's name


T = TypeVar("T", int, float, bool, str)
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def typed_value(
    metadata: Mapping[str, Any],
    key: str,
    kind: type[T],
    error: Callable[[str, str], ModelFileError],
) -> T | None:
    """Return the value of ``key`` as ``kind``, or None if it is missing.

    Args:
        metadata: Values by key.
        key: Key to look up.
        kind: int, float, bool or str; an integer is accepted as a float.
        error: Makes the exception for a value of another type, from the key and a text.
    """
    value = metadata.get(key)
    number = isinstance(value, int) and not isinstance(value, bool)
    if value is None or (number if kind is int else isinstance(value, kind)):
        return value
    if kind is float and number:
        return kind(value)
    raise error(key, f"{quote(value)} is not {_KINDS[kind]}")


class StringArray(Sequence[str]):
    """An array of strings in a mapped file, decoded on access.

    Args:
        data: bytes of the file.
        starts: int64, offset of each string; its length is the 8 bytes before.
        end: offset of the end of the last string.
    """

    def __init__(self, data: memoryview, starts: np.ndarray, end: int) -> None:
        self._data, self._starts, self._end = data, starts, end

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = int(self._starts[index])
        size: int = _STRUCTS["Q"].unpack_from(self._data, start - 8)[0]
        return str(self._data[start : start + size], "utf-8", "replace")

    def spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a copy of the bytes of all strings, uint8, and the offset and the size of each."""
        first = int(self._starts[0]) if len(self) else self._end
        text = np.frombuffer(self._data[first : self._end], np.uint8).copy()
        sizes = np.diff(self._starts, append=self._end + 8) - 8
        return text, self._starts - first, sizes

    def to_bytes(self) -> list[bytes]:
        """Return all strings undecoded."""
        text, starts, sizes = self.spans()
        blob = text.tobytes()
        return [blob[a:b] for a, b in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    def __repr__(self) -> str:
        return f"StringArray({len(self)} strings)"


class Cursor:
    """A position in the file's bytes, with checked reads."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.pos = 0
        self.where = "header"  # the part being read, for error messages

    def error(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {self.where}: {text}")

    def skip(self, count: int) -> int:
        """Skip ``count`` bytes, which must exist, and return their offset."""
        start = self.pos
        if count > len(self.data) - start:
            raise self.error(
                f"the file ends at byte {len(self.data)}, but {count} bytes are needed at {start}"
            )
        self.pos = start + count
        return start

    def number(self, code: str) -> Any:
        form = _STRUCTS[code]
        return form.unpack_from(self.data, self.skip(form.size))[0]

    def string(self, limit: int | None = None) -> str:
        size = self.number("Q")
        if limit is not None and size > limit:
            raise self.error(f"a name of {size} bytes (at most {limit})")
        start = self.skip(size)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            raise self.error(f"the string at byte {start} is not UTF-8") from None

    def value(self) -> object:
        """Read a metadata value, which begins with its type."""
        kind = self.number("I")
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _BOOL:
            flag = self.number("B")
            if flag > 1:
                raise self.error(f"a boolean of value {flag}")
            return bool(flag)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise self.error(f"unknown value type {kind}")

    def array(self) -> np.ndarray | StringArray:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind != _BOOL and kind not in _NUMBERS:
            known = "arrays of arrays are not supported" if kind == _ARRAY else "unknown type"
            raise self.error(f"array of value type {kind}: {known}")
        code = np.dtype(_NUMPY[_NUMBERS.get(kind, "B")])
        start = self.skip(count * code.itemsize)
        values = np.frombuffer(self.data, code, count, start)
        if kind == _BOOL:
            if count and values.max() > 1:
                raise self.error("a boolean that is neither 0 nor 1")
            return values.view(np.bool_)
        return values

    def strings(self, count: int) -> StringArray:
        """Read a string array; the offsets found while scanning for its end are kept."""
        if count > (len(self.data) - self.pos) // 8:
            raise self.error(f"{count} strings do not fit in the file")
        found, pos, left, walk = [np.zeros(0, np.int64)], self.pos, count, _WALK
        while left:
            starts, pos = _short_strings(self.data, pos, left)
            left -= len(starts)
            found.append(starts)
            walk *= 2 if len(starts) < walk else 1  # so that few guesses fail
            if left:  # a string that is long or contains zero bytes, or the rest of a window
                starts, pos = _strings(self.data, pos, min(left, walk))
                left -= len(starts)
                found.append(starts)
            if pos > len(self.data):
                size = len(self.data)
                raise self.error(f"a string of the array goes past the file's end ({size} bytes)")
        self.pos = pos
        return StringArray(self.data, np.concatenate(found), pos)


def _strings(data: memoryview, pos: int, count: int) -> tuple[np.ndarray, int]:
    """Read lengths one by one: return the offsets of ``count`` strings, and the end of the last.

    The end is past that of ``data`` if a string is.
    """
    starts, size_at = array("q"), _STRUCTS["Q"].unpack_from
    try:  # unpack_from and append check the range
        for _ in range(count):
            (size,) = size_at(data, pos)
            starts.append(pos + 8)
            pos += 8 + size
    except (struct.error, OverflowError):
        pos = len(data) + 1
    return np.array(starts, np.int64), pos


def _short_strings(data: memoryview, pos: int, count: int) -> tuple[np.ndarray, int]:
    """Read as many lengths at once as can be guessed; returns as `_strings`, maybe fewer strings.

    Seven zero bytes are rarely anything but the end of a length below 256. Each length must lead
    to the next one, so a wrong guess ends the result, but cannot change it.
    """
    window = np.frombuffer(data[pos : pos + _WINDOW], np.uint8)
    zeros = window[1:] == 0
    for shift in (1, 2, 3):  # runs of 2, 4 and 7 zeros
        zeros = zeros[:-shift] & zeros[shift:]
    at = np.flatnonzero(zeros)
    ends = at + 8 + window[at]
    if not len(at) or at[0] != 0:
        return np.zeros(0, np.int64), pos
    wrong = np.flatnonzero(ends[:-1] != at[1:])
    right = min(count, int(wrong[0]) + 1 if len(wrong) else len(at))
    return pos + 8 + at[:right], pos + int(ends[right - 1])


def read_header(cursor: Cursor) -> tuple[int, int, int]:
    """Read the header: version, number of tensors, number of metadata keys."""
    start = cursor.skip(4)
    magic = bytes(cursor.data[start : start + 4])
    if magic != b"GGUF":
        raise cursor.error(f"not a GGUF file: it starts with {quote(magic)}")
    version = cursor.number("I")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise cursor.error("a big-endian GGUF file; only little-endian is supported")
        raise cursor.error(f"GGUF version {version}; supported are 2 and 3")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if key_count > _MAX_KEYS or tensor_count > _MAX_TENSORS:
        raise cursor.error(f"{key_count} keys and {tensor_count} tensors are too many")
    return version, tensor_count, key_count


def read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    """Read the metadata by key."""
    metadata: dict[str, object] = {}
    for number in range(count):
        cursor.where = f"metadata key {number}"
        key = cursor.string(_MAX_NAME)
        cursor.where = f"key {quote(key)}"
        if key in metadata:
            raise cursor.error("appears twice")
        metadata[key] = cursor.value()
    return metadata


def read_tensors(cursor: Cursor, count: int, alignment: int, data: bool) -> dict[str, TensorInfo]:
    """Read the tensor entries by name, with offsets from the start of the file.

    Args:
        cursor: Position after the metadata.
        count: Number of tensors.
        alignment: Alignment of the tensors' data in bytes.
        data: Whether the data must lie within the file.
    """
    entries: dict[str, tuple[tuple[int, ...], DType, int]] = {}
    for number in range(count):
        cursor.where = f"tensor {number}"
        name = cursor.string(_MAX_NAME)
        cursor.where = f"tensor {quote(name)}"
        if name in entries:
            raise cursor.error("appears twice")
        entries[name] = _entry(cursor)
    data_start = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, (shape, dtype, offset) in entries.items():
        cursor.where = f"tensor {quote(name)}"
        nbytes = math.prod(shape) // dtype.block * dtype.nbytes
        start = data_start + offset
        if offset % alignment:
            raise cursor.error(f"offset {offset} is not aligned to {alignment}")
        if data and start + nbytes > len(cursor.data):
            raise cursor.error(
                f"its {nbytes} bytes at {start} end past the file's {len(cursor.data)} bytes"
            )
        supported = DTYPES.get(dtype.name) == dtype
        tensors[name] = TensorInfo(name, shape, dtype, nbytes, start, supported)
    _no_overlap(cursor, tensors)
    return tensors


def _dtype_of(kind: int) -> DType | None:
    """The dtype of a ggml_type; None if it is unknown."""
    for form in BLOCK_FORMATS.values():
        if form.gguf_type == kind:
            return form.dtype
    return DTYPES[PLAIN_TYPES[kind]] if kind in PLAIN_TYPES else _UNSUPPORTED.get(kind)


def _entry(cursor: Cursor) -> tuple[tuple[int, ...], DType, int]:
    """Read one entry: shape (outermost first), dtype, offset from the start of the data."""
    dims = cursor.number("I")
    if dims > _MAX_DIMS:
        raise cursor.error(f"{dims} dimensions (at most {_MAX_DIMS})")
    shape = tuple(cursor.number("Q") for _ in range(dims))[::-1] or (1,)
    kind, offset = cursor.number("I"), cursor.number("Q")
    dtype = _dtype_of(kind)
    if dtype is None:
        raise cursor.error(f"unknown tensor type {kind}")
    if 0 in shape:
        raise cursor.error(f"shape {list(shape)} has no elements")
    if shape[-1] % dtype.block:
        raise cursor.error(f"rows of {shape[-1]} are not whole {dtype} blocks of {dtype.block}")
    return shape, dtype, offset


def _no_overlap(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            cursor.where = f"tensor {quote(after.name)}"
            raise cursor.error(f"overlaps tensor {quote(before.name)}")
