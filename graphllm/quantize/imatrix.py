"""Importance matrices of llama.cpp: mean squared activations of the inputs of each matrix.

Source of both file formats: llama.cpp, `common/imatrix-loader.cpp` and `tools/imatrix`.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from ..errors import ModelFileError, quote
from ..weights.gguf import GgufFile

Array = np.ndarray
_MAX_ENTRIES, _MAX_NAME = 1 << 20, 1 << 16
_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path) -> dict[str, Array]:
    """Return the importance of the columns of each matrix, by GGUF's tensor names.

    Args:
        path: A file of llama.cpp's imatrix tool, in its GGUF or its older binary format.

    Returns:
        float32 [experts, columns]; one expert for an ordinary matrix.

    Raises:
        ModelFileError: The file is missing or malformed, or a value is not finite or negative.
    """
    try:
        with open(path, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        found = _read_gguf(path) if is_gguf else _read_binary(path)
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    for name, values in found.items():
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ModelFileError(f"{path}: entry {quote(name)}: a value is negative or not finite")
    return found


def _read_gguf(path: Path) -> dict[str, Array]:
    found = {}
    with GgufFile(path) as file:
        if file.value("general.type", str) != "imatrix":
            raise ModelFileError(f"{path}: is a GGUF file, but not an importance matrix")
        for name in file.tensors:
            if not name.endswith(_SUMS):
                continue
            base = name.removesuffix(_SUMS)
            sums, counts = (_floats(file, base + kind) for kind in (_SUMS, _COUNTS))
            sums, counts = sums.reshape(counts.size, -1), counts.reshape(-1, 1)
            # An expert that no token was routed to has no statistics.
            found[base] = np.where(counts > 0, sums / np.maximum(counts, 1), np.float32(1))
    return found


def _floats(file: GgufFile, name: str) -> Array:
    info = file.readable(name)
    if info.dtype.name != "f32":
        raise ModelFileError(f"{file.path}: tensor {quote(name)} is {info.dtype}, not f32")
    return file.raw(name).reshape(-1).view("<f4").copy()


def _read_binary(path: Path) -> dict[str, Array]:
    """Read the format before GGUF: names, numbers of calls, values."""
    data, at = path.read_bytes(), 0

    def integer(what: str, most: int) -> int:
        nonlocal at
        if at + 4 > len(data):
            raise ModelFileError(f"{path}: ends at byte {len(data)}, before the {what}")
        (value,) = struct.unpack_from("<i", data, at)
        at += 4
        if not 0 < value <= most:
            raise ModelFileError(f"{path}: is not an importance matrix: {what} is {value}")
        return value

    found = {}
    for _ in range(integer("number of entries", _MAX_ENTRIES)):
        size = integer("length of a name", min(_MAX_NAME, len(data) - at))
        name = data[at : at + size].decode("utf-8", "replace")
        at += size
        calls = integer("number of calls", (1 << 31) - 1)
        count = integer("number of values", (1 << 31) - 1)
        if at + 4 * count > len(data):
            raise ModelFileError(f"{path}: entry {quote(name)} ends past the end of the file")
        values = np.frombuffer(data, "<f4", count, at)
        at += 4 * count
        found[name] = (values / np.float32(calls)).reshape(1, -1)
    return found
