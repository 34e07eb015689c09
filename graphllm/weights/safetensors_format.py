"""Parser of safetensors headers: 8 bytes of length, then a JSON object; the tensors follow.

Source of the format: the README of huggingface/safetensors. Files are untrusted: the header is
checked for consistency and against the size of the file. A malformed file raises a ModelFileError
that names the file and the tensor.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import ModelFileError, quote
from ..graph.dtype import BF16, F16, F32, I8, I32, I64, DType
from .mapped_file import TensorInfo
from .strict_json import json_object

# Storage types of quantised weights and flags; no weight of a model has them as its dtype.
U8 = DType("u8", 1, 1, np.dtype(np.uint8))
BOOL = DType("bool", 1, 1, np.dtype(np.bool_))
F8_E4M3 = DType("f8_e4m3", 1, 1, np.dtype(ml_dtypes.float8_e4m3fn))

READABLE: dict[str, DType] = {
    "F32": F32, "F16": F16, "BF16": BF16, "U8": U8, "I8": I8, "I32": I32, "I64": I64, "BOOL": BOOL,
    "F8_E4M3": F8_E4M3,
}  # fmt: skip

# Other dtypes: with their sizes known, the file can be listed, but the tensors cannot be read.
_UNSUPPORTED: dict[str, DType] = {
    name: DType(name.lower(), block, nbytes)
    for name, block, nbytes in (
        ("F64", 1, 8), ("F8_E5M2", 1, 1), ("F8_E4M3FNUZ", 1, 1),
        ("F8_E5M2FNUZ", 1, 1), ("F8_E8M0", 1, 1), ("F6_E2M3", 4, 3), ("F6_E3M2", 4, 3),
        ("F4", 2, 1), ("I16", 1, 2), ("U16", 1, 2), ("U32", 1, 4), ("U64", 1, 8), ("C64", 1, 8),
    )
}  # fmt: skip

_KNOWN = READABLE | _UNSUPPORTED

MAX_HEADER = 100_000_000  # bytes: the format's limit
_MAX_DIMS = 8
_KEYS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
_LFS = b"version "  # start of a Git LFS pointer; as a length it would be too large


def read_header(view: memoryview, path: Path, data: bool) -> dict[str, TensorInfo]:
    """Read the tensors by name, in the order of their data, which must not have gaps.

    Args:
        view: Bytes of the file.
        path: The file, for error messages.
        data: Whether the data must fill the file to its end.
    """
    if view[:8] == _LFS:
        raise ModelFileError(f"{path}: a Git LFS pointer; run git lfs pull to download the file")
    size = int.from_bytes(view[:8], "little")
    if len(view) < 8 or size > MAX_HEADER:
        raise ModelFileError(
            f"{path}: not a safetensors file: it does not start with the length of a header"
        )
    start = 8 + size
    if start > len(view):
        raise ModelFileError(
            f"{path}: header: the file ends at byte {len(view)}, but the header at {start}"
        )
    text = bytes(view[8:start])
    if not text.startswith(b"{"):
        raise ModelFileError(f"{path}: header: does not start with '{{'")
    header = json_object(text, f"{path}: header")
    _check_metadata(header.pop(_METADATA, {}), path)
    found = [_entry(name, value, start, path) for name, value in header.items()]
    found.sort(key=lambda t: (t.offset, t.nbytes))
    end = start
    for info in found:
        if info.offset != end:
            what = "overlaps the previous tensor" if info.offset < end else "its data follow a gap"
            raise _error(path, info.name, what)
        end += info.nbytes
        if data and end > len(view):
            what = f"its {info.nbytes} bytes at {info.offset} end past the file's {len(view)} bytes"
            raise _error(path, info.name, what)
    if data and end < len(view):
        raise ModelFileError(f"{path}: the last {len(view) - end} bytes belong to no tensor")
    return {info.name: info for info in found}


def _error(path: Path, name: str, text: str) -> ModelFileError:
    return ModelFileError(f"{path}: tensor {quote(name)}: {text}")


def _check_metadata(value: Any, path: Path) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ModelFileError(f"{path}: header: {_METADATA} does not map strings to strings")


def _entry(name: str, value: Any, start: int, path: Path) -> TensorInfo:
    """Parse the entry of one tensor; the data begin at byte ``start``."""
    if not isinstance(value, dict) or value.keys() != _KEYS:
        raise _error(path, name, f"its entry is not an object of {', '.join(sorted(_KEYS))}")
    kind, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise _error(path, name, f"unknown dtype {quote(str(kind))}")
    dtype = _KNOWN[kind]
    if not _counts(shape) or len(shape) > _MAX_DIMS:
        raise _error(path, name, f"shape is not a list of at most {_MAX_DIMS} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, name, "data_offsets are not a start and an end")
    elements, nbytes = math.prod(shape), offsets[1] - offsets[0]
    if elements % dtype.block or elements // dtype.block * dtype.nbytes != nbytes:
        raise _error(path, name, f"{kind} of shape {shape} does not have {nbytes} bytes")
    if (
        math.prod(d for d in shape if d) >= 2**63
    ):  # NumPy refuses such shapes even if they have no elements
        raise _error(path, name, f"shape {shape} is too large")
    return TensorInfo(name, tuple(shape), dtype, nbytes, start + offsets[0], kind in READABLE)


def _counts(value: Any) -> bool:
    """Return whether ``value`` is a list of integers in [0, 2^63)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
