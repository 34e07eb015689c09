"""Writer of safetensors files.

Source of the format: the README of huggingface/safetensors. The header has the offsets of all
tensors, so their shapes must be known before the first byte is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..graph.dtype import DType
from ..weights.safetensors_format import READABLE

_ALIGNMENT = 8  # of the data, as in the library's own files
_CODES = {dtype.name: code for code, dtype in READABLE.items()}


class SafetensorsEntry(NamedTuple):
    """A tensor to write; its dtype is one of `READABLE`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.nbytes


def _header(tensors: Sequence[SafetensorsEntry]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # which transformers requires
    end = 0
    for each in tensors:
        start, end = end, end + each.nbytes
        entries[each.name] = {
            "dtype": _CODES[each.dtype.name], "shape": list(each.shape),
            "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsWriter:
    """A safetensors file being written; a context manager.

    Tensors are written in the order of ``tensors``, each in any number of parts.

    Args:
        path: The file, which must not exist.
        tensors: All tensors.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, tensors: Sequence[SafetensorsEntry]) -> None:
        self._path, self._header = path, _header(tensors)
        self._left = [each.nbytes for each in tensors if each.nbytes]

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._path.open("xb")
        self._append(self._header)
        return self

    def write(self, data: np.ndarray) -> None:
        """Append bytes of the current tensor."""
        if not data.nbytes:
            return
        self._left[0] -= data.nbytes
        assert self._left[0] >= 0, "more bytes than the tensor has"
        self._append(np.ascontiguousarray(data).data.cast("B"))
        if not self._left[0]:
            del self._left[0]

    def _append(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def __exit__(self, kind: object, *failure: object) -> None:
        self._file.close()
        assert kind is not None or not self._left, "tensors are missing"


__all__ = ["SafetensorsEntry", "SafetensorsWriter"]
