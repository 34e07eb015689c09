"""Random numbers of sampling: Philox words, and Gumbel noise keyed by what it is for."""

from __future__ import annotations

import numpy as np

_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
TOKEN, XTC = 0, 1  # purposes: noise of a token, and whether XTC applies to a position


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """Return four random words for each counter, uint32 [..., 4].

    counter [..., 4], key [..., 2], unsigned 32-bit. Salmon et al. 2011 (Random123), section 3.3.
    """
    c0, c1, c2, c3 = (np.asarray(counter[..., i], np.uint64) for i in range(4))
    k0, k1 = (np.asarray(key[..., i], np.uint64) for i in range(2))
    for _ in range(rounds):
        even, odd = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]  # 64-bit products of 32-bit words
        c0, c1 = (odd >> np.uint64(32)) ^ c1 ^ k0, odd & _LOW
        c2, c3 = (even >> np.uint64(32)) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k + np.uint64(w) & _LOW for k, w in zip((k0, k1), _WEYL, strict=True))
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seed: int, count: int, index: int, items: int, purpose: int = TOKEN) -> np.ndarray:
    """Return a number in (0, 1) for each of ``items`` items -> float64 [items].

    The word of item i is word i % 4 of Philox4x32-10 with key (low, high half of the seed) and
    counter (i // 4, count, index, purpose); the number is (word + 1/2) 2^-32, which is exact.

    Args:
        seed: seed of the request, i64.
        count: output position, i32.
        index: index of the sample among the samples of the request, i32.
        items: number of items: ids of the vocabulary, for purpose `TOKEN`.
        purpose: what the numbers are for; numbers of different purposes are independent.
    """
    groups, bits = -(-items // 4), int(seed) & 0xFFFFFFFFFFFFFFFF
    key = np.array([bits & 0xFFFFFFFF, bits >> 32], np.uint64)
    counter = np.empty((groups, 4), np.uint64)
    counter[:, 0] = np.arange(groups)
    counter[:, 1:] = int(count) & 0xFFFFFFFF, int(index) & 0xFFFFFFFF, purpose
    return (philox4x32(counter, key).reshape(-1)[:items] + 0.5) * 2.0**-32


def gumbel(number: np.ndarray) -> np.ndarray:
    """Return standard Gumbel noise -log(-log(u)) for u in (0, 1), float64; at most 22.9."""
    return -np.log(-np.log(number))
