"""Lists of candidate ids of a row, without sorting the vocabulary: the k largest logits, the
largest that have a share of the probability, and where such a list is cut.

The k largest logits are in blocks whose maximum (see argmax.py) reaches the k-th largest block
maximum, so most logits are never looked at. A bitmap of allowed ids is read where logits are.
"""

from __future__ import annotations

import numpy as np

from ..runtime.jit import bits_f32, helper, inlined
from ..runtime.lazy_numba import float32, float64, int32, int64
from ..simd.math import exp64, log64
from .argmax import BLOCK, MAX_KEY, MIN_KEY, largest_key, sort_key, value_of_key

INF = np.int32(0x7F800000)  # key of +inf
MINUS_INF = np.int32(-0x7F800000)
SORT_LIMIT = 4096  # candidates up to which top_p sorts
FIRST_LIMIT = 1024.0  # weights below the rest divided by it are no candidates at first
NEGLIGIBLE = -60.0  # logits so far below the peak: 2^20 of their weights are below 2^-66


@helper
def _kth_largest(keys, count, k):
    """The k-th largest of ``count`` keys, by bisection."""
    low, high = int64(MIN_KEY), int64(2**31 - 1)
    while low < high:
        middle = (low + high + 1) >> 1
        reached = 0
        for i in range(count):
            reached += 1 if int64(keys[i]) >= middle else 0
        if reached >= k:
            low = middle
        else:
            high = middle - 1
    return int32(low)


@inlined
def allows(mask, i):
    """Whether a bitmap of 32-bit words has bit ``i``."""
    return (mask[i >> 5] >> int32(i & 31)) & int32(1) != int32(0)


@helper
def largest_keys(bits, width, maxima, blocks, k, ids, keys, masked, mask):
    """Write indices and keys of the k largest in index order; returns their count.

    If ``masked``, only of the ids that the bitmap ``mask`` allows, which may be fewer than k.
    """
    least = _kth_largest(maxima, blocks, k) if k <= blocks else MIN_KEY
    count = 0
    for b in range(blocks):
        if maxima[b] >= least and not (masked and maxima[b] == MINUS_INF):
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                key = sort_key(bits[i], MAX_KEY)
                if key >= least and (not masked or allows(mask, i)):
                    ids[count], keys[count] = i, key
                    count += 1
    if count <= k:
        return count
    least = _kth_largest(keys, count, k)
    ties = k  # how many keys equal to the k-th are kept
    for i in range(count):
        ties -= 1 if keys[i] > least else 0
    kept = 0
    for i in range(count):
        equal = keys[i] == least
        if keys[i] > least or (equal and ties > 0):
            ties -= 1 if equal else 0
            ids[kept], keys[kept] = ids[i], keys[i]
            kept += 1
    return kept


@helper
def softmax_weights(logits, ids, keys, count, peak, weights):
    """Write exp(logit - max) of each candidate."""
    for i in range(count):
        weights[i] = exp64(float64(logits[ids[i]]) - peak) if keys[i] > MINUS_INF else 0.0


@helper
def _sum_weights(logits, bits, width, maxima, blocks, peak, masked, mask, weights):
    """Sum of exp(logit - peak) of all ids, or of those that a bitmap allows.

    Blocks whose weights cannot change a float64 of at least 1, that of the peak, are left out.
    """
    total = 0.0
    for b in range(blocks):
        if maxima[b] == MINUS_INF or float64(value_of_key(maxima[b])) - peak < NEGLIGIBLE:
            continue
        first = b * BLOCK
        count = min(BLOCK, width - first)
        for i in range(count):
            kept = sort_key(bits[first + i], MAX_KEY) > MINUS_INF
            weights[i] = exp64(float64(logits[first + i]) - peak) if kept else 0.0
        if masked:
            for i in range(count):
                weights[i] = weights[i] if allows(mask, first + i) else 0.0
        for i in range(count):
            total += weights[i]
    return total


@helper
def _keys_from(bits, width, maxima, blocks, least, ids, keys, masked, mask):
    """Write ids and keys of the keys of at least ``least`` in index order; returns their count."""
    count = 0
    for b in range(blocks):
        if maxima[b] >= least:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                key = sort_key(bits[i], MAX_KEY)
                if key >= least and (not masked or allows(mask, i)):
                    ids[count], keys[count] = i, key
                    count += 1
    return count


@helper
def likely_keys(logits, bits, width, maxima, blocks, peak, share, ids, keys, weights, masked, mask):
    """Write ids, keys and weights of the largest logits that together have a share of the weight.

    Ids with less than (1 - share) / width of all weight cannot be among them. Mostly a higher limit
    leaves enough, and few ids, so it is tried first. Returns the count, and the weight of all
    other ids.
    """
    total = _sum_weights(logits, bits, width, maxima, blocks, peak, masked, mask, weights)
    rest = (1 - share) * total
    lowest = rest / (2 * width)  # half of the bound, so that rounding does not matter
    limit = max(lowest, rest / FIRST_LIMIT)
    while True:
        floor = float32(peak + log64(limit))
        least = sort_key(bits_f32(floor), MAX_KEY)
        count = _keys_from(bits, width, maxima, blocks, least, ids, keys, masked, mask)
        softmax_weights(logits, ids, keys, count, peak, weights)
        mass = 0.0
        for i in range(count):
            mass += weights[i]
        if mass > share * total or limit <= lowest:
            return count, max(0.0, total - mass)
        limit = max(lowest, limit / 16)


@helper
def sort_descending(order, keys, count):
    """Shell sort of candidates, descending; their positions go to the low halves of ``order``."""
    for i in range(count):
        order[i] = ((int64(-1) - int64(keys[i])) << 32) | i
    gap = 1
    while gap < count // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            item, j = order[i], i
            while j >= gap and order[j - gap] > item:
                order[j] = order[j - gap]
                j -= gap
            order[j] = item
        gap //= 3


@helper
def _cut_sorted(keys, weights, count, share, excluded, order):
    """See `mass_cut`."""
    sort_descending(order, keys, count)
    total = excluded
    for i in range(count):
        total += weights[order[i] & 0xFFFFFFFF]
    reached, at = 0.0, int64(0)
    for i in range(count):
        at = order[i] & 0xFFFFFFFF
        reached += weights[at]
        if reached >= share * total:
            break
    return keys[at], at


@helper
def _cut_searched(keys, weights, count, share, excluded):
    """As `_cut_sorted`, by bisection on the key, which is faster for many candidates."""
    total = excluded
    for i in range(count):
        total += weights[i]
    low, high = int64(MIN_KEY), int64(largest_key(keys, count))
    while low < high:  # the largest key such that keys from it on reach the share
        middle = (low + high + 1) >> 1
        mass = 0.0
        for i in range(count):
            mass += weights[i] if int64(keys[i]) >= middle else 0.0
        if mass >= share * total:
            low = middle
        else:
            high = middle - 1
    mass = 0.0
    for i in range(count):
        mass += weights[i] if int64(keys[i]) > low else 0.0
    last = int64(0)
    for i in range(count):
        if int64(keys[i]) == low:
            last = i
            mass += weights[i]
            if mass >= share * total:
                break
    return int32(low), last


@helper
def mass_cut(keys, weights, count, share, excluded, order):
    """Return (key, position) of the last of the largest keys whose weights reach ``share``.

    The share is of the candidates' weights and ``excluded``, the weight of what is no candidate.
    """
    if count <= SORT_LIMIT:
        return _cut_sorted(keys, weights, count, share, excluded, order)
    return _cut_searched(keys, weights, count, share, excluded)
