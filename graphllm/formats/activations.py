"""Quantised activations: int8 blocks with one scale each, which integer kernels multiply.

Not a file format. x ~= d * q, with an int8 q and one float32 scale d for each block, and sums of q
for weight formats with an offset. A row of K elements is stored in planes, so that a kernel streams
each plane: K int8 values, then K / block float32 scales, then the sums (a8_32: an int32 for each 32
elements; a8_256: an int16 for each 16).
"""

from __future__ import annotations

import math

import numpy as np

from ..errors import GraphError
from ..graph.dtype import DType, register

F32 = np.float32
Array = np.ndarray

A8_32 = register(DType("a8_32", 32, 32 + 4 + 4))
A8_256 = register(DType("a8_256", 256, 256 + 4 + 32))

# Blocks whose largest magnitude is below this are stored as zero: above it neither d nor 127 / amax
# leaves the normal float32 range, so flush-to-zero hardware computes the same bits.
ACT_TINY = F32(2.0**-100)


def _elements_per_sum(dtype: DType, elements: int) -> int:
    """32 or 16. GraphError if ``dtype`` is no activation format or the row is not whole blocks."""
    if dtype not in (A8_32, A8_256):
        raise GraphError(f"{dtype} is not an activation format; known: a8_32, a8_256")
    dtype.row_nbytes(elements)
    return 32 if dtype == A8_32 else 16


def quantise_act(x: Array, dtype: DType) -> Array:
    """Quantise float32 [..., K] to uint8 [..., row_bytes]. GraphError if K is not whole blocks.

    For each block of 32 (a8_32) or 256 (a8_256), every operation rounding once to float32, with no
    fused multiply-add and no reciprocal estimates::

        amax    = max |x|
        inverse = 127 / amax
        d       = amax / 127
        q       = int8(clip(round_half_even(x * inverse), -127, 127))
        sum     = exact integer sum of q over each 32 (int32, a8_32) or each 16 (int16, a8_256)

    When amax < 2**-100 (zero included): d = 0 and q = 0. When any x is NaN or infinite: d = NaN and
    q = 0, so that the block reads back as NaN. Both cases can be recognised from the maximum, as an
    unsigned integer, of the bits of |x|. Layout of a row: K int8, K/block float32 d, the sums.
    """
    shape, elements = x.shape[:-1], x.shape[-1]
    per_sum = _elements_per_sum(dtype, elements)
    rows = math.prod(shape)
    x = np.ascontiguousarray(x, dtype=F32)
    blocks = x.reshape(rows, elements // dtype.block, dtype.block)
    amax = np.abs(blocks).max(axis=-1, initial=0, keepdims=True)
    finite, live = np.isfinite(amax), amax >= ACT_TINY
    safe = np.where(finite & live, amax, F32(1))
    scaled = np.where(finite & live, blocks, F32(0)) * (F32(127) / safe)
    q = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    d = np.where(finite, np.where(live, safe / F32(127), F32(0)), F32(np.nan))
    kind = "<i4" if dtype == A8_32 else "<i2"
    sums = q.reshape(rows, elements // per_sum, per_sum).sum(axis=-1, dtype=kind)
    planes = (q.reshape(rows, elements), d.astype("<f4")[..., 0], sums)
    made = np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in planes], axis=1)
    return made.reshape(*shape, dtype.row_nbytes(elements))


def split_act(raw: Array, dtype: DType, elements: int) -> tuple[Array, Array, Array]:
    """Return the three planes of quantised activations, as views where possible.

    Args:
        raw: uint8 [T, row_bytes].
        dtype: a8_32 or a8_256.
        elements: K, the elements of a row.

    Returns:
        q int8 [T, K], d float32 [T, K/block] and the sums (a8_32: int32 [T, K/32]; a8_256: int16
        [T, K/16]).

    Raises:
        GraphError: ``raw`` is not uint8 [T, row_bytes].
    """
    _elements_per_sum(dtype, elements)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != dtype.row_nbytes(elements):
        raise GraphError(f"{raw.dtype} {list(raw.shape)} does not hold {elements} {dtype} elements")
    scales_end = elements + elements // dtype.block * 4
    q = raw[:, :elements].view(np.int8)
    d = raw[:, elements:scales_end].view("<f4")
    return q, d, raw[:, scales_end:].view("<i4" if dtype == A8_32 else "<i2")


def dequantise_act(raw: Array, dtype: DType, elements: int) -> Array:
    """Return quantised activations as float32 [..., K]: d * q, rounded once.

    Args:
        raw: uint8 [..., row_bytes].
        dtype: a8_32 or a8_256.
        elements: K, the elements of a row.
    """
    q, d, _ = split_act(raw.reshape(-1, raw.shape[-1]), dtype, elements)
    blocks = q.reshape(*d.shape, dtype.block).astype(F32)
    return (d[..., None] * blocks).reshape(*raw.shape[:-1], elements)
