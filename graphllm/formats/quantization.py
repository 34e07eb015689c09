"""Quantise and dequantise weights with the NumPy formulas of their formats.

Every kernel is tested against these formulas, so they favour clarity over speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import GraphError, ModelFileError
from ..graph.dtype import DType
from .block_format import BLOCK_FORMATS, BlockFormat
from .row_format import ROW_FORMATS

F32 = np.float32
Array = np.ndarray

_CHECKED = 4 << 20  # bytes of blocks whose scales are checked at a time
_CHECKERS = 8  # threads at most: the check is bound by memory bandwidth


def dequantise(raw: Array, dtype: DType) -> Array:
    """Return uint8 [..., row_bytes] of ``dtype`` as float32 [..., elements].

    Bit-equal to ggml's scalar code. GraphError if the bytes are not whole blocks or the format is
    not declared.
    """
    if raw.dtype != np.uint8 or raw.ndim == 0 or (raw.shape[-1] - dtype.tail) % dtype.nbytes:
        raise GraphError(f"{raw.dtype} {raw.shape} is not whole {dtype} blocks of {dtype.nbytes} B")
    if dtype.name == "bf16":  # bit shift instead of ml_dtypes: keeps NaN payloads, and is faster
        return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(F32)
    if dtype.numpy is not None:
        return np.ascontiguousarray(raw).view(dtype.numpy.newbyteorder("<")).astype(F32)
    if dtype.name in ROW_FORMATS:
        rows = np.ascontiguousarray(raw).reshape(-1, raw.shape[-1])
        with np.errstate(all="ignore"):
            values = ROW_FORMATS[dtype.name].decode(rows)
        return values.reshape(*raw.shape[:-1], values.shape[1])
    if dtype.name not in BLOCK_FORMATS:
        known = ", ".join((*BLOCK_FORMATS, *ROW_FORMATS))
        raise GraphError(f"no dequantise formula for {dtype}; known: {known}")
    form = BLOCK_FORMATS[dtype.name]
    blocks = np.ascontiguousarray(raw).reshape(-1).view(form.layout)
    count = raw.shape[-1] // dtype.nbytes * dtype.block
    with np.errstate(all="ignore"):  # any bit pattern is a valid input, inf and NaN scales too
        return form.decode(blocks).reshape(*raw.shape[:-1], count)


def quantise(x: Array, dtype: DType) -> Array:
    """Return finite float32 [rows, K] in ``dtype``, uint8 [rows, row_bytes].

    f32, f16 and bf16 round to nearest even; the families of block formats say how their encoders
    relate to ggml's. GraphError for other dtypes, rows that are not whole blocks, and infinite or
    NaN values.
    """
    x = np.ascontiguousarray(x, dtype=F32)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise GraphError(f"quantise needs a finite matrix [rows, K], got shape {list(x.shape)}")
    row_bytes = dtype.row_nbytes(x.shape[1])
    if dtype.name in ("f32", "f16", "bf16"):
        return x.astype(dtype.numpy).view(np.uint8)
    if dtype.name in ROW_FORMATS:
        return ROW_FORMATS[dtype.name].encode(x)
    if dtype.name not in BLOCK_FORMATS:
        known = ", ".join((*BLOCK_FORMATS, *ROW_FORMATS))
        raise GraphError(f"no quantiser for {dtype}; known: {known}")
    with np.errstate(all="ignore"):  # values next to zero, and scales beyond the range of float16
        return _encoded(x, BLOCK_FORMATS[dtype.name]).reshape(x.shape[0], row_bytes)


def _encoded(x: Array, form: BlockFormat) -> Array:
    """The blocks of ``x`` as uint8 [bytes]."""
    values = x.reshape(-1, form.dtype.block)
    blocks = np.empty(len(values), form.layout)
    for name, field in form.encode(values).items():
        blocks[name] = field
    return blocks.view(np.uint8)


def check_scales(raw: Array, dtype: DType) -> None:
    """ModelFileError names the first row of uint8 [rows, row_bytes] that has an infinite or NaN
    scale. Plain dtypes have no scales."""
    if dtype.name in ROW_FORMATS:
        good = np.isfinite(ROW_FORMATS[dtype.name].split(raw)[1]).all(axis=1)
        if not good.all():
            raise bad_scale(int(good.argmin()), dtype)
    if dtype.name not in BLOCK_FORMATS or not raw.size:
        return
    spans = BLOCK_FORMATS[dtype.name].scale_spans()
    rows = max(1, _CHECKED // raw.shape[1])  # at a time, so that the results stay in a cache
    starts = range(0, raw.shape[0], rows)

    def first_bad(start: int) -> int | None:
        blocks = raw[start : start + rows].reshape(-1, raw.shape[1] // dtype.nbytes, dtype.nbytes)
        bad = [_not_finite(blocks, *span) for span in spans]
        found = [start + int(each.any(-1).argmax()) for each in bad if each.any()]
        return min(found, default=None)

    if len(starts) == 1:
        found = [first_bad(0)]
    else:
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        with ThreadPoolExecutor(min(_CHECKERS, len(starts))) as pool:
            found = [*pool.map(first_bad, starts)]
    row = next((row for row in found if row is not None), None)
    if row is not None:
        raise bad_scale(row, dtype)


def bad_scale(row: int, dtype: DType) -> ModelFileError:
    """The error for a row that has an infinite or NaN scale."""
    return ModelFileError(f"row {row} has an infinite or NaN {dtype} scale")


def _not_finite(blocks: Array, offset: int, size: int) -> Array:
    """Whether the scale at ``offset`` is infinite or NaN, by its last byte: bool [rows, blocks].
    Scales of two bytes are float16, those of one byte exponents of which 255 is NaN."""
    exponent = np.uint8(0xFF if size == 1 else 0x7C)  # all bits set: infinite or NaN
    return blocks[..., offset + size - 1] & exponent == exponent


@dataclass(frozen=True, eq=False)
class Blocks:
    """An array in its stored bytes: ``raw`` uint8 [rows, ..., row_bytes], with ``elements`` in the
    last axis.

    Plain dtypes are allowed. GraphError if the bytes do not fit the elements.
    """

    raw: Array
    dtype: DType
    elements: int

    def __post_init__(self) -> None:
        want = self.dtype.row_nbytes(self.elements)
        if self.raw.dtype != np.uint8 or self.raw.ndim < 2 or self.raw.shape[-1] != want:
            raise GraphError(
                f"{self.elements} {self.dtype} elements a row need uint8 [rows, ..., {want}], "
                f"got {self.raw.dtype} {list(self.raw.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, ..., elements)."""
        return (*self.raw.shape[:-1], self.elements)

    def __len__(self) -> int:
        return self.raw.shape[0]

    def __getitem__(self, rows: int | slice | Array | list[int]) -> Blocks:
        """The selected rows: a view for a slice, a copy for an array of row numbers or a mask. An
        integer removes axis 0 of an array with more than two axes, as a view."""
        return Blocks(self.raw[rows], self.dtype, self.elements)

    def rows(self) -> Array:
        """The bytes as uint8 [rows, n], all axes but the first joined."""
        return self.raw.reshape(len(self), math.prod(self.raw.shape[1:]))

    def dequantise(self) -> Array:
        """float32 [rows, ..., elements]."""
        return dequantise(self.raw, self.dtype)

    def tiles(self, max_bytes: int = 16 << 20) -> Iterator[tuple[int, Array]]:
        """Yield a matrix as (first row, float32 [n, elements]), at most ``max_bytes`` each, or one
        row if that is more."""
        step = max(1, max_bytes // (4 * max(1, self.elements)))
        for start in range(0, len(self), step):
            yield start, self[start : start + step].dequantise()
