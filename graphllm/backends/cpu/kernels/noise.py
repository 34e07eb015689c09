"""Gumbel noise of token ids, as `graphllm.ops.random_numbers` defines it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....ops.random_numbers import TOKEN, XTC
from ..runtime.jit import bits_f32, helper, inlined
from ..runtime.lazy_numba import float32, float64, int32, uint32, uint64
from ..simd.math import log64

MAX_NOISE = np.float32(22.9)  # above -log(-log(1 - 2^-33))
# An upper bound of -log(v), v in (0, 1], is (_OFFSET - bits of the float32 v) * _SLOPE, as log2 of
# a number is at least its exponent plus its fraction. With v = n 2^-31 and a margin for rounding:
_SLOPE = np.float32(np.log(2.0) * 2.0**-23)
_BOUND = np.float32(np.log(2.0) * (127 + 31) + 1e-3)


class NoiseKey(NamedTuple):
    """What the noise of a row depends on, besides the id."""

    seed: int
    position: int  # of the output
    sample: int  # index of the sample


@inlined
def philox4x32(seed, c0, c1, c2, c3):
    """Four words of Philox4x32-10 for a 64-bit key and 32-bit counters, each in a uint64."""
    low, shift = uint64(0xFFFFFFFF), uint64(32)
    k0, k1 = uint64(seed) & low, uint64(seed) >> shift
    for _ in range(10):
        even, odd = c0 * uint64(0xD2511F53), c2 * uint64(0xCD9E8D57)
        c0, c1 = (odd >> shift) ^ c1 ^ k0, odd & low
        c2, c3 = (even >> shift) ^ c3 ^ k1, even & low
        k0, k1 = (k0 + uint64(0x9E3779B9)) & low, (k1 + uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@helper
def fill_words(key, first, groups, words):
    """Write the words of the ids 4 * first .. 4 * (first + groups) - 1, uint32."""
    seed, count, index = key.seed, uint64(uint32(key.position)), uint64(uint32(key.sample))
    for i in range(groups):
        a, b, c, d = philox4x32(seed, uint64(first + i), count, index, uint64(TOKEN))
        words[4 * i], words[4 * i + 1] = uint32(a), uint32(b)
        words[4 * i + 2], words[4 * i + 3] = uint32(c), uint32(d)


@helper
def token_noise(key, token):
    """Gumbel noise of one id, float64."""
    count, index = uint64(uint32(key.position)), uint64(uint32(key.sample))
    a, b, c, d = philox4x32(key.seed, uint64(token // 4), count, index, uint64(TOKEN))
    word = token % 4
    return gumbel(uint32(a if word == 0 else b if word == 1 else c if word == 2 else d))


@helper
def xtc_number(key):
    """The number in (0, 1) that decides whether XTC applies, float64."""
    count, index = uint64(uint32(key.position)), uint64(uint32(key.sample))
    word, _, _, _ = philox4x32(key.seed, uint64(0), count, index, uint64(XTC))
    return (float64(uint32(word)) + 0.5) * 2.0**-32


@inlined
def gumbel(word):
    """-log(-log(u)) for u = (word + 1/2) 2^-32, float64."""
    return -log64(-log64((float64(word) + 0.5) * 2.0**-32))


@inlined
def noise_bound(word):
    """An upper bound of `gumbel`, float32, at most 0.7 above it where the noise is large.

    -log(u) is at least v = 1 - u, so -log(v) is a bound.
    """
    v = float32(int32((~word) >> uint32(1))) + float32(0.25)
    return _BOUND - float32(bits_f32(v)) * _SLOPE
