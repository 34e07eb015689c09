"""Quantised activations: int8 or FP8 with shared scales, which linears multiply.

Not a file format. x ~= d * q with an int8 or e4m3 number q and a float32 scale d for each block, or
for each row where the name ends in ``row``; and sums of int8 q for kernels that multiply unsigned
weights or weights with an offset. A row of K elements is stored in planes, so that a kernel streams
each plane:

========  =================  ================  ==========================
format    q                  d                 sums of q
========  =================  ================  ==========================
a8_32     int8 [K]           f32 [K / 32]      int32 [K / 32]
a8_256    int8 [K]           f32 [K / 256]     int16 [K / 16]
a8_row    int8 [K]           f32 [1]           int32 [1]
f8_row    e4m3 [K]           f32 [1]           none
f8_128    e4m3 [K]           f32 [K / 128]     none
========  =================  ================  ==========================

Rows of the last three are padded with zero bytes to a multiple of 32, so that every row is aligned
for vector and tensor core loads if the first one is. e4m3 is OCP's 8-bit float without infinities,
`ml_dtypes.float8_e4m3fn`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ..errors import GraphError
from ..graph.dtype import DType, register

F32 = np.float32
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Array = np.ndarray

A8_32 = register(DType("a8_32", 32, 32 + 4 + 4))
A8_256 = register(DType("a8_256", 256, 256 + 4 + 32))
A8_ROW = register(DType("a8_row", 32, 32, tail=8, align=32))
F8_ROW = register(DType("f8_row", 32, 32, tail=4, align=32))
F8_128 = register(DType("f8_128", 128, 128 + 4, align=32))


class Layout(NamedTuple):
    """Planes of a row."""

    q: np.dtype
    most: float  # steps from 0 to the largest magnitude of a block
    block: int  # elements that share a scale; 0: the row
    per_sum: int = 0  # elements in a sum; 0: the row
    sums: str | None = None  # type of the sums


_INT8 = np.dtype(np.int8)
LAYOUTS = {
    A8_32: Layout(_INT8, 127, 32, 32, "<i4"),
    A8_256: Layout(_INT8, 127, 256, 16, "<i2"),
    A8_ROW: Layout(_INT8, 127.5, 0, 0, "<i4"),
    F8_ROW: Layout(E4M3, 448, 0),
    F8_128: Layout(E4M3, 448, 128),
}
ACTIVATIONS = tuple(LAYOUTS)

# Blocks whose largest magnitude is below this are stored as zero: above it neither the scale nor
# its inverse leaves the normal float32 range, so flush-to-zero hardware computes the same bits.
ACT_TINY = F32(2.0**-100)
ROTATED = 16  # elements that are rotated together; the scale 1 / sqrt(16) is exact


def _layout_of(dtype: DType, elements: int) -> Layout:
    """The planes of a row of ``elements``, with the row's length in place of 0. GraphError if
    ``dtype`` is no activation format or the row is not whole blocks."""
    if dtype not in LAYOUTS:
        known = ", ".join(kind.name for kind in LAYOUTS)
        raise GraphError(f"{dtype} is not an activation format; known: {known}")
    dtype.row_nbytes(elements)
    found, row = LAYOUTS[dtype], max(1, elements)
    return found._replace(block=found.block or row, per_sum=found.per_sum or row)


def quantise_act(x: Array, dtype: DType) -> Array:
    """Quantise float32 [..., K] to uint8 [..., row_bytes]. GraphError if K is not whole blocks.

    For each block, which is the row in a8_row and f8_row, every operation rounding once to float32,
    with no fused multiply-add and no reciprocal estimates::

        amax    = max |x|
        most    = 127 (a8_32, a8_256), 127.5 (a8_row) or 448 (f8)
        inverse = most / amax
        d       = amax / most
        q       = int8(clip(round_half_even(x * inverse), -127, 127))      (a8)
                  e4m3(clip(x * inverse, -448, 448)), to nearest even      (f8)
        sum     = exact integer sum of q

    127.5 is half of int8's range, as in compressed-tensors (`calculate_qparams`), for whose
    checkpoints a8_row is. When amax < 2**-100 (zero included): d = 0 and q = 0. When any x is NaN
    or infinite: d = NaN and q = 0, so that the block reads back as NaN. Both cases can be
    recognised from the maximum, as an unsigned integer, of the bits of |x|. The module's docstring
    has the layout of a row.
    """
    shape, elements = x.shape[:-1], x.shape[-1]
    layout = _layout_of(dtype, elements)
    rows, most = math.prod(shape), F32(layout.most)
    x = np.ascontiguousarray(x, dtype=F32)
    blocks = x.reshape(rows, elements // layout.block, layout.block)
    amax = np.abs(blocks).max(axis=-1, initial=0, keepdims=True)
    finite, live = np.isfinite(amax), amax >= ACT_TINY
    safe = np.where(finite & live, amax, F32(1))
    scaled = np.where(finite & live, blocks, F32(0)) * (most / safe)
    if layout.q == _INT8:
        scaled, most = np.rint(scaled), F32(127)
    q = np.clip(scaled, -most, most).astype(layout.q).reshape(rows, elements)
    d = np.where(finite, np.where(live, safe / F32(layout.most), F32(0)), F32(np.nan))
    planes = [q, d.astype("<f4")[..., 0]]
    if layout.sums:
        parts = q.reshape(rows, elements // layout.per_sum, layout.per_sum)
        planes.append(parts.sum(axis=-1, dtype=layout.sums))
    made = np.zeros((rows, dtype.row_nbytes(elements)), np.uint8)
    end = 0
    for plane in planes:
        part = np.ascontiguousarray(plane).view(np.uint8)
        made[:, end : end + part.shape[1]] = part
        end += part.shape[1]
    return made.reshape(*shape, made.shape[1])


def split_act(raw: Array, dtype: DType, elements: int) -> tuple[Array, Array, Array]:
    """Return the planes of quantised activations, as views where possible.

    Args:
        raw: uint8 [T, row_bytes].
        dtype: an activation format.
        elements: K, the elements of a row.

    Returns:
        q [T, K], d float32 [T, blocks] and the sums [T, n], of which f8 formats have none: see the
        module's docstring.

    Raises:
        GraphError: ``raw`` is not uint8 [T, row_bytes].
    """
    layout = _layout_of(dtype, elements)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != dtype.row_nbytes(elements):
        raise GraphError(f"{raw.dtype} {list(raw.shape)} does not hold {elements} {dtype} elements")
    scales_end = elements + elements // layout.block * 4
    q = raw[:, :elements].view(layout.q)
    d = raw[:, elements:scales_end].view("<f4")
    kind = np.dtype(layout.sums or np.int8)
    count = elements // layout.per_sum if layout.sums else 0
    return q, d, raw[:, scales_end : scales_end + count * kind.itemsize].view(kind)


def dequantise_act(raw: Array, dtype: DType, elements: int) -> Array:
    """Return quantised activations as float32 [..., K]: d * q, rounded once.

    Args:
        raw: uint8 [..., row_bytes].
        dtype: an activation format.
        elements: K, the elements of a row.
    """
    q, d, _ = split_act(raw.reshape(-1, raw.shape[-1]), dtype, elements)
    return scaled(q, d).reshape(*raw.shape[:-1], elements)


def scaled(q: Array, d: Array) -> Array:
    """Return d * q as float32 [rows, K], rounded once. q [rows, K], d [rows, blocks]."""
    blocks = q.reshape(*d.shape, q.shape[1] // max(1, d.shape[1])).astype(F32)
    return (d[..., None] * blocks).reshape(q.shape)


def rotate_blocks(x: Array) -> Array:
    """Return x, float32 [..., K], times the normalised Hadamard matrix in blocks of `ROTATED`.

    The order of additions is that of the fast Walsh-Hadamard transform.
    """
    shape = x.shape
    for distance in (1, 2, 4, 8):
        low, high = np.moveaxis(x.reshape(-1, 2, distance), 1, 0)
        x = np.stack((low + high, low - high), axis=1)
    return x.reshape(shape) * F32(0.25)
