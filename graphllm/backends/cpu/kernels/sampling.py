"""sample: temperature, top-k, top-p and min-p without sorting the vocabulary.

The k largest logits are in blocks whose maximum (see argmax.py) reaches the k-th largest block
maximum, so most logits are never looked at. NaN counts as the largest logit, so the largest key of
a row shows whether a token can be chosen.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import float64, int32, int64, uint32, uint64

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import thread_count
from ..runtime.jit import f32s, f64s, helper, i32s, i64s, kernel, load_i64, next_chunk
from ..simd.math import exp64
from .argmax import (  # fmt: skip
    BLOCK,
    MAX_KEY,
    MIN_KEY,
    block_maxima_nan_greatest,
    first_index,
    largest_key,
    maxima_nbytes,
    row_arguments,
    sort_key,
)

_INF = int32(0x7F800000)  # key of +inf
_MINUS_INF = int32(-0x7F800000)
_SORT_LIMIT = 4096  # survivors up to which top_p sorts


@helper
def _philox(seed, counter):
    """First word of Philox4x32-10 with key ``seed`` and counter (counter, 0, 0, 0), below 2^32."""
    low, shift = uint64(0xFFFFFFFF), uint64(32)
    k0, k1 = uint64(seed) & low, uint64(seed) >> shift
    c0, c1, c2, c3 = uint64(uint32(counter)), uint64(0), uint64(0), uint64(0)
    for _ in range(10):
        even, odd = c0 * uint64(0xD2511F53), c2 * uint64(0xCD9E8D57)
        c0, c1 = (odd >> shift) ^ c1 ^ k0, odd & low
        c2, c3 = (even >> shift) ^ c3 ^ k1, even & low
        k0, k1 = (k0 + uint64(0x9E3779B9)) & low, (k1 + uint64(0xBB67AE85)) & low
    return c0


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


@helper
def _top_k(bits, width, maxima, blocks, k, ids, keys):
    """Write indices and keys of the k largest in index order; returns their count."""
    least = _kth_largest(maxima, blocks, k) if k <= blocks else MIN_KEY
    count = 0
    for b in range(blocks):
        if maxima[b] >= least:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                key = sort_key(bits[i], MAX_KEY)
                if key >= least:
                    ids[count], keys[count] = i, key
                    count += 1
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
def _softmax_weights(logits, ids, keys, count, peak, temperature, weights):
    """Write exp((logit - max) / temperature) of each survivor."""
    for i in range(count):
        gap = (float64(logits[ids[i]]) - peak) / temperature
        weights[i] = exp64(gap) if keys[i] > _MINUS_INF else 0.0


@helper
def _sort_descending(order, keys, count):
    """Shell sort of survivors, descending; their positions go to the low halves of ``order``."""
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
def _cut_sorted(keys, weights, count, top_p, order):
    """Return (key, position) of the last survivor that top_p keeps."""
    _sort_descending(order, keys, count)
    total = 0.0
    for i in range(count):
        total += weights[order[i] & 0xFFFFFFFF]
    reached, at = 0.0, int64(0)
    for i in range(count):
        at = order[i] & 0xFFFFFFFF
        reached += weights[at]
        if reached >= top_p * total:
            break
    return keys[at], at


@helper
def _cut_searched(keys, weights, count, top_p):
    """As `_cut_sorted`, by bisection on the key, which is faster for many survivors."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    low, high = int64(MIN_KEY), int64(2**31 - 1)
    while low < high:  # the largest key such that keys from it on reach top_p
        middle = (low + high + 1) >> 1
        mass = 0.0
        for i in range(count):
            mass += weights[i] if int64(keys[i]) >= middle else 0.0
        if mass >= top_p * total:
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
            if mass >= top_p * total:
                break
    return int32(low), last


@helper
def _filter(keys, ids, weights, count, top_p, min_p, order):
    """Apply top_p, then min_p, in index order; returns the count of survivors."""
    cut, last = MIN_KEY, count
    if top_p < 1:
        if count <= _SORT_LIMIT:
            cut, last = _cut_sorted(keys, weights, count, top_p, order)
        else:
            cut, last = _cut_searched(keys, weights, count, top_p)
    kept = 0
    for i in range(count):
        inside = keys[i] > cut or (keys[i] == cut and i <= last)
        if inside and (min_p <= 0 or weights[i] >= min_p):
            ids[kept], keys[kept] = ids[i], keys[i]
            kept += 1
    return max(kept, 1)


@helper
def _choose(weights, ids, count, number):
    """The survivor at the fraction ``number`` of the cumulated weights."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    reached = 0.0
    for i in range(count):
        reached += weights[i]
        if reached > number * total:
            return ids[i]
    return ids[count - 1]


class SampleArgs(NamedTuple):
    """Argument block of `sample`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int
    scratch: int
    thread_scratch: int  # bytes of it for each thread
    temperature: int  # this and the following: a value per row
    top_k: int
    top_p: int
    min_p: int
    seed: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count


_read_sample = argument_reader(SampleArgs)


@kernel
def _sample(p, thread, threads):
    a = _read_sample(p)
    width, blocks, y = a.width, a.blocks, i32s(a.y)
    own = a.scratch + thread * a.thread_scratch
    weights, order = f64s(own), i64s(own + width * 8)
    own += (width + _SORT_LIMIT) * 8
    keys, ids = i32s(own), i32s(own + width * 4)
    rows = load_i64(a.rows)
    row = next_chunk(p)
    while row < rows:
        at = a.logits + row * a.logits_stride
        logits, bits, maxima = f32s(at), i32s(at), i32s(a.maxima + row * blocks * 4)
        top = largest_key(maxima, blocks)
        if top >= _INF or top == _MINUS_INF:  # NaN, +inf, or -inf everywhere
            y[row] = -1
            row = next_chunk(p)
            continue
        best = first_index(bits, width, maxima, blocks, top, MAX_KEY)
        temperature = f32s(a.temperature)[row]
        if not temperature > 0:
            y[row] = best
            row = next_chunk(p)
            continue
        peak, k = float64(logits[best]), int64(i32s(a.top_k)[row])
        top_p, min_p = float64(f32s(a.top_p)[row]), float64(f32s(a.min_p)[row])
        count = width
        if 0 < k < width:
            count = _top_k(bits, width, maxima, blocks, k, ids, keys)
        else:
            for i in range(width):
                ids[i], keys[i] = i, sort_key(bits[i], MAX_KEY)
        if top_p < 1 or min_p > 0:
            _softmax_weights(logits, ids, keys, count, peak, 1.0, weights)
            count = _filter(keys, ids, weights, count, top_p, min_p, order)
        _softmax_weights(logits, ids, keys, count, peak, float64(temperature), weights)
        number = float64(_philox(i64s(a.seed)[row], i32s(a.count)[row]) >> uint64(8)) * 2.0**-24
        y[row] = _choose(weights, ids, count, number)
        row = next_chunk(p)


def _thread_nbytes(width: int) -> int:
    """Bytes of weights, order, keys and ids of one thread."""
    return -(-(width * 16 + _SORT_LIMIT * 8) // 64) * 64


def _scratch(node: Tensor, options: Options) -> int:
    width = int(node.sources[0].shape[1])  # type: ignore[arg-type]
    return maxima_nbytes(node) + thread_count(options) * _thread_nbytes(width)


@BACKEND.kernel("sample", layout={"logits": "rows"}, scratch=_scratch)
def sample(ctx: KernelContext) -> list[Launch]:
    rows = row_arguments(ctx, "logits")
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "count")
    block = SampleArgs(
        *rows,
        scratch=ctx.scratch + maxima_nbytes(ctx.node),
        thread_scratch=_thread_nbytes(rows.width),
        **{name: ctx.need(name).address for name in names},
    )
    return [Launch(block_maxima_nan_greatest, rows), Launch(_sample, block)]
