"""Block formats as NumPy formulas: dequantise, quantise, and quantised activations.

This is the definition that every kernel is tested against, so it favours plainness over speed. The
weight formats are GGUF's, bit for bit; `graphllm.formats.gguf_blocks` has a formula for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..errors import GraphError, ModelFileError
from ..graph.dtype import A8_32, A8_256, DType
from .gguf_blocks import DEQUANTISE, QUANTISE, SCALES

F32 = np.float32
Array = np.ndarray

# Blocks whose largest magnitude is below this are stored as zero: above it neither d nor 127 / amax
# leaves the normal float32 range, so flush-to-zero hardware computes the same bits.
ACT_TINY = F32(2.0**-100)

_CHECKED = 4 << 20  # bytes of blocks whose scales are looked at in one go
_CHECKERS = 8  # threads at most: memory is what they wait for

FORMATS = tuple(DEQUANTISE)  # the block formats of weights that can be read
WEIGHT_FORMATS = ("f32", "f16", "bf16", *FORMATS)  # of matrices


def dequantise(raw: Array, dtype: DType) -> Array:
    """uint8 [..., row_bytes] of ``dtype`` as float32 [..., elements].

    Bit-equal to ggml's scalar code. GraphError when the bytes are not whole blocks or the format
    has no formula here.
    """
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % dtype.nbytes:
        raise GraphError(f"{raw.dtype} {raw.shape} is not whole {dtype} blocks of {dtype.nbytes} B")
    if dtype.name == "bf16":  # bit shift instead of ml_dtypes: keeps NaN payloads, and is faster
        return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(F32)
    if dtype.numpy is not None:
        return np.ascontiguousarray(raw).view(dtype.numpy.newbyteorder("<")).astype(F32)
    if dtype.name not in DEQUANTISE:
        known = ", ".join(DEQUANTISE)
        raise GraphError(f"no dequantise formula for {dtype}; known: {known}")
    blocks = np.ascontiguousarray(raw).reshape(-1, dtype.nbytes)
    count = raw.shape[-1] // dtype.nbytes * dtype.block
    with np.errstate(all="ignore"):  # any bit pattern is a valid input, inf and NaN scales too
        return DEQUANTISE[dtype.name](blocks).reshape(*raw.shape[:-1], count)


def check_scales(raw: Array, dtype: DType) -> None:
    """ModelFileError names the first row of uint8 [rows, row_bytes] in which a block's scale is
    infinite or NaN. Plain dtypes have none."""
    if dtype.name not in SCALES or not raw.size:
        return
    rows = max(1, _CHECKED // raw.shape[1])  # at a time, so that the answers stay in a cache
    starts = range(0, raw.shape[0], rows)

    def first_bad(start: int) -> int | None:
        blocks = raw[start : start + rows].reshape(-1, raw.shape[1] // dtype.nbytes, dtype.nbytes)
        bad = [_endless(blocks, *scale) for scale in SCALES[dtype.name]]
        found = [start + int(each.any(-1).argmax()) for each in bad if each.any()]
        return min(found, default=None)

    with ThreadPoolExecutor(min(_CHECKERS, len(starts))) as pool:
        for row in pool.map(first_bad, starts):
            if row is not None:
                raise endless_scale(row, dtype)


def endless_scale(row: int, dtype: DType) -> ModelFileError:
    """The error for a row in which a block's scale is infinite or NaN."""
    return ModelFileError(f"row {row} has an infinite or NaN {dtype} scale")


def _endless(blocks: Array, offset: int, size: int) -> Array:
    """Whether the scale there is infinite or NaN, by its last byte: bool [rows, blocks]."""
    every = np.uint8(0xFF if size == 1 else 0x7C)  # bits of an exponent
    return blocks[..., offset + size - 1] & every == every


@dataclass(frozen=True, eq=False)
class Blocks:
    """An array in a file's own bytes: ``raw`` uint8 [rows, ..., row_bytes], ``elements`` of the
    last axis in each of these rows.

    Works for plain dtypes too. GraphError when the bytes do not fit the elements.
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
        """The chosen rows: a view for a slice, a copy for an array of row numbers or a mask; with
        more than two axes, for a number the view without axis 0."""
        return Blocks(self.raw[rows], self.dtype, self.elements)

    def rows(self) -> Array:
        """The bytes as uint8 [rows, n], all axes but the first in one."""
        return self.raw.reshape(len(self), math.prod(self.raw.shape[1:]))

    def dequantise(self) -> Array:
        """float32 [rows, ..., elements]."""
        return dequantise(self.raw, self.dtype)

    def tiles(self, max_bytes: int = 16 << 20) -> Iterator[tuple[int, Array]]:
        """Of a matrix (first row, float32 [n, elements]), each at most ``max_bytes`` or a row."""
        step = max(1, max_bytes // (4 * max(1, self.elements)))
        for start in range(0, len(self), step):
            yield start, self[start : start + step].dequantise()


def _act_check(dtype: DType, elements: int) -> int:
    """Elements a sum: 32 or 16. GraphError for another dtype or a ragged row."""
    if dtype not in (A8_32, A8_256):
        raise GraphError(f"{dtype} is not an activation format; known: a8_32, a8_256")
    dtype.row_nbytes(elements)
    return 32 if dtype == A8_32 else 16


def quantise_act(x: Array, dtype: DType) -> Array:
    """float32 [..., K] as quantised activations, uint8 [..., row_bytes]; GraphError if K is ragged.

    For each block of 32 (a8_32) or 256 (a8_256), every operation rounding once to float32, with no
    fused multiply-add and no reciprocal estimates::

        amax    = max |x|
        inverse = 127 / amax
        d       = amax / 127
        q       = int8(clip(round_half_even(x * inverse), -127, 127))
        sum     = exact integer sum of q over each 32 (int32, a8_32) or each 16 (int16, a8_256)

    When amax < 2**-100 (zero included): d = 0 and q = 0. When any x is NaN or infinite: d = NaN and
    q = 0, so that the block reads back as NaN. Both cases can be told from the maximum, as an
    unsigned integer, of the bits of |x|. Layout of a row: K int8, K/block float32 d, the sums.
    """
    shape, elements = x.shape[:-1], x.shape[-1]
    per_sum = _act_check(dtype, elements)
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
    """The three planes of quantised activations, as views where possible.

    Returns q int8 [T, K], d float32 [T, K/block] and the sums (a8_32: int32 [T, K/32]; a8_256:
    int16 [T, K/16]). GraphError when ``raw`` is not uint8 [T, row_bytes].
    """
    _act_check(dtype, elements)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != dtype.row_nbytes(elements):
        raise GraphError(f"{raw.dtype} {list(raw.shape)} does not hold {elements} {dtype} elements")
    scales_end = elements + elements // dtype.block * 4
    q = raw[:, :elements].view(np.int8)
    d = raw[:, elements:scales_end].view("<f4")
    return q, d, raw[:, scales_end:].view("<i4" if dtype == A8_32 else "<i2")


def dequantise_act(raw: Array, dtype: DType, elements: int) -> Array:
    """Quantised activations as float32 [..., K]: d * q, rounded once."""
    q, d, _ = split_act(raw.reshape(-1, raw.shape[-1]), dtype, elements)
    blocks = q.reshape(*d.shape, dtype.block).astype(F32)
    return (d[..., None] * blocks).reshape(*raw.shape[:-1], elements)


def quantise(x: Array, dtype: DType) -> Array:
    """Finite float32 [rows, K] in ``dtype``'s bytes, uint8 [rows, row_bytes].

    q8_0, q4_0, q4_1, q5_0, q5_1 and mxfp4 follow ggml's reference quantisers; the others are valid
    but plainer than ggml's, which search for the best scales. f32, f16 and bf16 round to nearest
    even. GraphError for other formats, ragged rows, and values that are not finite.
    """
    x = np.ascontiguousarray(x, dtype=F32)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise GraphError(f"quantise needs a finite matrix [rows, K], got shape {list(x.shape)}")
    want = dtype.row_nbytes(x.shape[1])
    if dtype.name in ("f32", "f16", "bf16"):
        return x.astype(dtype.numpy).view(np.uint8)
    if dtype.name not in QUANTISE:
        raise GraphError(f"no quantiser for {dtype}; known: {', '.join(QUANTISE)}")
    with np.errstate(all="ignore"):  # numbers next to nothing, and scales beyond float16
        return QUANTISE[dtype.name](x.reshape(-1, dtype.block)).reshape(x.shape[0], want)
