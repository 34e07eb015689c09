"""Importance matrices of llama.cpp: mean squared activations of the inputs of each matrix.

Source of both file formats: llama.cpp, `common/imatrix-loader.cpp` and `tools/imatrix`. Files are
written in the newer one, GGUF.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoints.gguf_writer import GgufWriter, TensorEntry, encode_value
from ..errors import ModelFileError, quote
from ..graph.dtype import F32
from ..weights.gguf import GgufFile

Array = np.ndarray
_MAX_ENTRIES, _MAX_NAME = 1 << 20, 1 << 16
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class InputStatistics:
    """Sums over the rows that were multiplied by a matrix, or by each of several ones.

    Attributes:
        sums: sums of the squares of each column [matrices, columns].
        counts: number of rows of each matrix [matrices].
    """

    sums: Array
    counts: Array

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> InputStatistics:
        """Return statistics of no rows, for [matrices, columns]."""
        return cls(np.zeros(shape), np.zeros(shape[0], np.int64))

    def add(self, x: Array, ids: Array | None) -> None:
        """Add rows.

        Args:
            x: float32 [T, columns]; [T, matrices, columns] if each matrix has its own rows. With
                ``ids`` [T, columns] or [T, k, columns].
            ids: indices of the matrices that multiply each row [T, k], if not all of them do.
        """
        if ids is None:
            squares = np.einsum("t...k,t...k->...k", x, x)
            self.sums[...] += squares.reshape(self.sums.shape)
            self.counts[...] += len(x)
            return
        for matrix in np.unique(ids):
            token, rank = np.nonzero(ids == matrix)
            rows = x[token] if x.ndim == 2 else x[token, rank]
            self.sums[matrix] += np.einsum("tk,tk->k", rows, rows)
            self.counts[matrix] += len(rows)

    def mean(self) -> Array:
        """Return the importance of columns, float32 [matrices, columns].

        Columns of a matrix without rows, such as an expert that no token was routed to, count 1.
        """
        counts = self.counts.reshape(-1, 1)
        with np.errstate(invalid="ignore"):  # values of a file, which are checked later
            found = np.where(counts > 0, self.sums / np.maximum(counts, 1), 1)
        return found.astype(np.float32)

    def split(self, names: Sequence[str]) -> Iterator[tuple[str, InputStatistics]]:
        """Yield the statistics of the tensors that a weight is stored as: one, or one a matrix."""
        if len(names) == 1:
            yield names[0], self
        elif len(names) == len(self.counts):
            for index, name in enumerate(names):
                yield name, InputStatistics(self.sums[index : index + 1], self.counts[index:][:1])


@dataclass(frozen=True)
class ImportanceMatrix:
    """Statistics by GGUF's tensor names, and the chunks of text that they were collected on."""

    entries: Mapping[str, InputStatistics]
    chunks: int
    context: int

    def weights(self) -> dict[str, Array]:
        """Return the importance of columns as `read_imatrix` does."""
        return {name: each.mean() for name, each in self.entries.items()}

    def write(self, path: Path, dataset: str, force: bool = False) -> None:
        """Write the file of llama.cpp's imatrix tool.

        Args:
            path: the file. It gets this name when it is complete.
            dataset: name of the text.
            force: whether to replace an existing file.

        Raises:
            RequestError: the file exists.
            OSError: it cannot be written.
        """
        metadata = {
            "general.type": "imatrix", "imatrix.datasets": [dataset],
            "imatrix.chunk_count": self.chunks, "imatrix.chunk_size": self.context,
        }  # fmt: skip
        arrays = dict[str, Array]()
        for name, each in sorted(self.entries.items()):
            arrays[name + _SUMS] = each.sums
            arrays[name + _COUNTS] = each.counts.reshape(-1, 1)
        encoded = {key: encode_value(value) for key, value in metadata.items()}
        entries = [TensorEntry(name, array.shape, F32) for name, array in arrays.items()]
        with GgufWriter(path, encoded, entries, force) as writer:
            for array in arrays.values():
                writer.write(array.astype("<f4"))


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
            where = f"{path}: entry {quote(base)}"
            if not counts.size or sums.size % counts.size:
                raise ModelFileError(f"{where}: {sums.size} sums for {counts.size} counts")
            if not (np.isfinite(counts).all() and (counts >= 0).all()):
                raise ModelFileError(f"{where}: a count is negative or not finite")
            found[base] = InputStatistics(sums.reshape(counts.size, -1), counts).mean()
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
