"""Bit fields of blocks: NumPy functions that unpack and pack integers of fewer than eight bits."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
_BIT_SHIFTS = np.arange(8, dtype=np.uint8)[:, None]


def nibbles(raw: Array) -> Array:
    """[..., k] bytes as uint8 [..., 2k]: the low halves of all bytes, then their high halves."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def pack_nibbles(q: Array) -> Array:
    """Inverse of `nibbles`: uint8 [..., 2k] below 16 as [..., k] bytes."""
    low, high = np.split(q, 2, axis=-1)
    return low | high << 4


def fifth_bits(raw: Array) -> Array:
    """[n, 4] bytes as uint8 [n, 32], 0 or 16: the fifth bits of elements that have nibbles."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def pack_fifth_bits(q: Array) -> Array:
    """Inverse of `fifth_bits`: the fifth bits of uint8 [n, 32] as [n, 4] bytes."""
    return np.packbits(q >> 4, axis=-1, bitorder="little")


def bits(raw: Array) -> Array:
    """[n, k] bytes as uint8 [n, 8, k]: the lowest bits of all bytes, then the next bits, ..."""
    return raw[:, None, :] >> _BIT_SHIFTS & 1


def pack_bits(q: Array) -> Array:
    """Inverse of `bits`."""
    return np.bitwise_or.reduce(q << _BIT_SHIFTS, axis=1)


def bit_pairs(raw: Array) -> Array:
    """[n, 64] bytes as uint8 [n, 2, 4, 32]: of each half, the lowest bit pairs of all bytes, then
    the next pairs, ..."""
    return raw.reshape(-1, 2, 1, 32) >> _PAIR_SHIFTS & 3


def pack_bit_pairs(q: Array) -> Array:
    """Inverse of `bit_pairs`, from any shape with as many elements: uint8 [n, 64]."""
    return np.bitwise_or.reduce(q.reshape(-1, 2, 4, 32) << _PAIR_SHIFTS, axis=2).reshape(-1, 64)


def byte_pairs(raw: Array) -> Array:
    """[n, k] bytes as uint8 [n, 4, k]: the lowest bit pairs of all bytes, then the next, ..."""
    return raw[:, None, :] >> _PAIR_SHIFTS & 3


def pack_byte_pairs(q: Array) -> Array:
    """Inverse of `byte_pairs`."""
    return np.bitwise_or.reduce(q << _PAIR_SHIFTS, axis=1)
