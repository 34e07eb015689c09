"""Repack integers of 4 and 8 bits with one scale per group into block formats.

x = scale * (q - zero), q unsigned. With the zero in the middle of the range that is q4_0 or, for
8 bits, q8_0, both exactly. Another zero of 4 bits makes q4_1, d * q + m with m = -zero * d, which
is rounded to float16: an error of at most zero * 2^-11 steps.
"""

from __future__ import annotations

import numpy as np

from ...formats import BLOCK_FORMATS
from ...formats.legacy import Q4_0, Q4_1, Q8_0
from ...graph.dtype import DType

Array = np.ndarray
_LOW, _HIGH = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
_FOUR = np.uint64(4)
STRIP = 64  # words: 4 times as fast as a whole tile of 1,024 columns and 128 rows


def block_dtype(bits: int, symmetric: bool) -> DType:
    """Return the block format of integers of 4 or 8 bits; those of 8 bits must be symmetric."""
    assert bits == 4 or (bits == 8 and symmetric)
    return Q8_0 if bits == 8 else Q4_0 if symmetric else Q4_1


def make_blocks(words: Array, d: Array, zeros: Array | None, dtype: DType) -> Array:
    """Return the blocks of a tile of rows.

    Args:
        words: uint32 [n, K * bits / 32], contiguous: unsigned integers, the first in the low bits.
        d: float16 [n, K / 32], the scale of each block.
        zeros: uint8 [n, K / 32], the zero point of each block; used for q4_1 only.
        dtype: A result of `block_dtype`, or another format of a scale and 16 bytes of nibbles.

    Returns:
        uint8 [n, row_bytes]. The offset of a block is infinite if zero * d overflows float16.
    """
    blocks = np.empty(d.size, BLOCK_FORMATS[dtype.name].layout)
    blocks["d"] = d.reshape(-1, 1)
    if dtype is Q8_0:
        blocks["q"] = (words.view(np.uint8) ^ np.uint8(128)).view(np.int8).reshape(-1, 32)
    else:
        blocks["q"] = _split_halves(words)
    if dtype is Q4_1:
        assert zeros is not None
        with np.errstate(over="ignore"):
            m = np.float32(0) - zeros.astype(np.float32) * d.astype(np.float32)
            blocks["m"] = m.reshape(-1, 1).astype(np.float16)
    return blocks.view(np.uint8).reshape(len(words), -1)


def to_float16(scales: Array) -> tuple[Array, int]:
    """Return float32 scales as float16, and how many of them are so small that they lose precision.

    Those that overflow become infinite.
    """
    with np.errstate(over="ignore", under="ignore"):
        d = scales.astype(np.float16)
        error = np.abs(d.astype(np.float32) - scales)
        return d, int((error > np.abs(scales) * np.float32(2**-11)).sum())


def _split_halves(words: Array) -> Array:
    """Reorder nibbles from neighbours in a byte to the order of a block: uint8 [blocks, 16].

    Byte j of a block of 32 holds element j in its low half and element j + 16 in its high half.
    """
    first, second = words.view(np.uint64).reshape(-1, 2).T
    q = np.empty((len(first), 8, 2), np.uint8)
    q[..., 0] = (first & _LOW | (second & _LOW) << _FOUR).view(np.uint8).reshape(-1, 8)
    q[..., 1] = (first >> _FOUR & _LOW | second & _HIGH).view(np.uint8).reshape(-1, 8)
    return q.reshape(-1, 16)


def unpack(words: Array, bits: int) -> Array:
    """Return uint32 [..., n] as the uint8 integers in it, [..., n * 32 / bits], low bits first."""
    if bits == 8:
        return words.view(np.uint8)
    pairs = words.view(np.uint8)
    return np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(*pairs.shape[:-1], -1)


def reorder(words: Array, order: Array, bits: int) -> Array:
    """Return rows of integers, uint32 [n, K * bits / 32], with their columns in another order."""
    codes = np.take(unpack(words, bits), order, axis=1)
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(codes).view(np.uint32)


def transpose(stored: Array) -> Array:
    """Return a contiguous transposed copy of a matrix, written `STRIP` columns at a time so that
    the lines read and written stay in the first cache."""
    made = np.empty(stored.shape[::-1], stored.dtype)
    for start in range(0, len(stored), STRIP):
        strip = slice(start, start + STRIP)
        made[:, strip] = stored[strip].T
    return made
