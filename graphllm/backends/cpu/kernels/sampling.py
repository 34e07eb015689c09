"""argmax, sample and penalise, without a sort of the vocabulary.

Logits are compared as integers (`sort_key`), which vectorises and settles what NaN and -0 mean. To
`sample` NaN is the largest, so that a row's largest key says whether an id can be chosen. A
first kernel finds the largest key of every 64 logits, with the whole team. From those the second
one, a row to a thread, reads nearly everything: the largest logit lies in the block that shows it,
and the k largest lie in blocks that reach the k-th largest block maximum.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int32, int64, uint32, uint64

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import thread_count
from ..runtime.jit import (
    args,
    f32s,
    f64s,
    helper,
    i32s,
    i64s,
    inlined,
    kernel,
    load_i64,
    next_chunk,
)
from ..simd.math import exp64
from .elementwise import thread_range

BLOCK = 64
_LEAST, _MOST = int32(-(2**31)), int32(2**31 - 1)
_INF = int32(0x7F800000)  # the key of +inf
_MINUS_INF = int32(-0x7F800000)
_SORTED = 4096  # survivors that are worth sorting for top_p


@inlined
def sort_key(bits, nan):
    """An int32 that orders as the float32 with these bits; -0 equals 0; NaN becomes ``nan``."""
    size = bits & int32(0x7FFFFFFF)
    key = int32(0) - size if bits < int32(0) else size
    return nan if size > int32(0x7F800000) else key


@helper
def _block_maxima(p, thread, threads, nan):
    """The largest key of each block of each row."""
    x, stride, rows_at, width, tops, count = args(p, 6)
    first, last = thread_range(load_i64(rows_at) * count, thread, threads)
    out = i32s(tops)
    for item in range(first, last):
        row, start = item // count, item % count * BLOCK
        bits = i32s(x + row * stride + start * 4)
        top = _LEAST
        for i in range(min(BLOCK, width - start)):
            top = max(top, sort_key(bits[i], nan))
        out[item] = top


@kernel
def _blocks_nan_last(p, thread, threads):
    _block_maxima(p, thread, threads, _LEAST)


@kernel
def _blocks_nan_first(p, thread, threads):
    _block_maxima(p, thread, threads, _MOST)


@helper
def largest_key(keys, count):
    top = _LEAST
    for i in range(count):
        top = max(top, keys[i])
    return top


@helper
def _first_index(bits, width, tops, count, top, nan):
    """The lowest index of those whose key is ``top``, the largest of a row."""
    for b in range(count):
        if tops[b] == top:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                if sort_key(bits[i], nan) == top:
                    return i
    return int64(0)


@kernel
def _argmax(p, thread, threads):
    x, stride, rows_at, width, tops, count, y = args(p, 7)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    for row in range(first, last):
        mine = i32s(tops + row * count * 4)
        top = largest_key(mine, count)
        i32s(y)[row] = _first_index(i32s(x + row * stride), width, mine, count, top, _LEAST)


# ------------------------------------------------------------------------------------------- draws


@helper
def _philox(seed, counter):
    """The first word of Philox4x32-10 for (seed; counter, 0, 0, 0), uint64 below 2^32."""
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
    """The k-th largest of ``count`` keys: the largest value that k of them reach."""
    low, high = int64(_LEAST), int64(2**31 - 1)
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
def _top_k(bits, width, tops, blocks, k, ids, keys):
    """Indices and keys of the k largest, in index order; their count."""
    least = _kth_largest(tops, blocks, k) if k <= blocks else _LEAST
    count = 0
    for b in range(blocks):
        if tops[b] >= least:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                key = sort_key(bits[i], _MOST)
                if key >= least:
                    ids[count], keys[count] = i, key
                    count += 1
    least = _kth_largest(keys, count, k)
    level = k  # how many of those equal to the k-th may stay
    for i in range(count):
        level -= 1 if keys[i] > least else 0
    kept = 0
    for i in range(count):
        equal = keys[i] == least
        if keys[i] > least or (equal and level > 0):
            level -= 1 if equal else 0
            ids[kept], keys[kept] = ids[i], keys[i]
            kept += 1
    return kept


@helper
def _softmax_weights(logits, ids, keys, count, peak, temperature, weights):
    """exp((logit - max) / temperature) of each survivor."""
    for i in range(count):
        gap = (float64(logits[ids[i]]) - peak) / temperature
        weights[i] = exp64(gap) if keys[i] > _MINUS_INF else 0.0


@helper
def _sort_descending(order, keys, count):
    """Positions of the survivors, largest first, in the low halves of ``order``. Shell's sort."""
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
    """The last survivor that top_p keeps, as (key, position)."""
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
    """The same by bisection on the key: for so many survivors that a sort would take longer."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    low, high = int64(_LEAST), int64(2**31 - 1)
    while low < high:  # the largest key whose survivors reach the sum
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
    """Keep what top_p and then min_p keep, in index order; the count of survivors."""
    cut, last = _LEAST, count
    if top_p < 1:
        if count <= _SORTED:
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
    """The survivor at ``number`` of the way through the summed weights."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    reached = 0.0
    for i in range(count):
        reached += weights[i]
        if reached > number * total:
            return ids[i]
    return ids[count - 1]


@kernel
def _sample(p, thread, threads):
    x, stride, rows_at, width, tops, blocks, y, work, each = args(p, 9)
    temperatures, ks, ps, mins, seeds, counts = args(p + 72, 6)
    own = work + thread * each
    weights, order = f64s(own), i64s(own + width * 8)
    keys, ids = i32s(own + (width + _SORTED) * 8), i32s(own + (width + _SORTED) * 8 + width * 4)
    rows = load_i64(rows_at)
    row = next_chunk(p)
    while row < rows:
        logits, bits = f32s(x + row * stride), i32s(x + row * stride)
        mine = i32s(tops + row * blocks * 4)
        top = largest_key(mine, blocks)
        if top >= _INF or top == _MINUS_INF:  # NaN, +inf or nothing but -inf
            i32s(y)[row] = -1
            row = next_chunk(p)
            continue
        best = _first_index(bits, width, mine, blocks, top, _MOST)
        if not f32s(temperatures)[row] > 0:
            i32s(y)[row] = best
            row = next_chunk(p)
            continue
        peak, k, top_p = float64(logits[best]), int64(i32s(ks)[row]), float64(f32s(ps)[row])
        count = width
        if 0 < k < width:
            count = _top_k(bits, width, mine, blocks, k, ids, keys)
        else:
            for i in range(width):
                ids[i], keys[i] = i, sort_key(bits[i], _MOST)
        least = float64(f32s(mins)[row])
        if top_p < 1 or least > 0:
            _softmax_weights(logits, ids, keys, count, peak, 1.0, weights)
            count = _filter(keys, ids, weights, count, top_p, least, order)
        _softmax_weights(logits, ids, keys, count, peak, float64(f32s(temperatures)[row]), weights)
        number = float64(_philox(i64s(seeds)[row], i32s(counts)[row]) >> uint64(8)) * 2.0**-24
        i32s(y)[row] = _choose(weights, ids, count, number)
        row = next_chunk(p)


# --------------------------------------------------------------------------------------- penalties


@helper
def _occurrences(ids, first, count):
    """How often ``ids[first]`` stands from there on; 0 where it has come before."""
    token, times = ids[first], 0
    for i in range(first):
        if ids[i] == token:
            return 0
    for i in range(first, count):
        times += 1 if ids[i] == token else 0
    return times


@kernel
def _penalise(p, thread, threads):
    x, stride, rows_at, width, y, history, ring, stop, stops = args(p, 9)
    counts, repeats, presences, frequencies, least = args(p + 72, 5)
    # Threads share out the columns, so that none waits for another.
    first, last = thread_range(width, thread, threads)
    for row in range(load_i64(rows_at)):
        source, target = f32s(x + row * stride), f32s(y + row * width * 4)
        for i in range(first, last):
            target[i] = source[i]
        past, repeat = i32s(history + row * ring * 4), f32s(repeats)[row]
        for i in range(ring):
            if first <= past[i] < last:
                times = _occurrences(past, i, ring)
                if times > 0:
                    value = target[past[i]]
                    value = value / repeat if value > float32(0) else value * repeat
                    less = f32s(presences)[row] + float32(times) * f32s(frequencies)[row]
                    target[past[i]] = value - less
        if i32s(counts)[row] < i32s(least)[row]:
            for i in range(stops):
                if first <= i32s(stop)[i] < last:
                    target[i32s(stop)[i]] -= float32(np.inf)  # NaN stays, +inf becomes NaN


# ---------------------------------------------------------------------------------------- builders


def _count(width: int) -> int:
    return -(-width // BLOCK)


def _tops_nbytes(node: Tensor) -> int:
    rows, width = node.sources[0].meta.bound().shape
    return -(-rows * _count(width) * 4 // 64) * 64  # type: ignore[operator,arg-type]


def _each_nbytes(width: int) -> int:
    """One thread's weights, order, keys and ids."""
    return -(-(width * 16 + _SORTED * 8) // 64) * 64


def _sample_scratch(node: Tensor, options: Options) -> int:
    width = int(node.sources[0].shape[1])  # type: ignore[arg-type]
    return _tops_nbytes(node) + thread_count(options) * _each_nbytes(width)


def _words(ctx: KernelContext, name: str) -> list[int]:
    ref = ctx.need(name)
    (width,) = ref.meta.inner
    rows = ctx.live(ref.meta.rows)
    return [ref.address, ref.row_stride, rows, width, ctx.scratch, _count(width)]


@BACKEND.kernel("argmax", layout={"x": "rows"}, scratch=lambda node, options: _tops_nbytes(node))
def argmax(ctx: KernelContext) -> list[Launch]:
    words = _words(ctx, "x")
    return [Launch(_blocks_nan_last, words), Launch(_argmax, [*words, ctx.out.address])]


@BACKEND.kernel("sample", layout={"logits": "rows"}, scratch=_sample_scratch)
def sample(ctx: KernelContext) -> list[Launch]:
    words = _words(ctx, "logits")
    own = ctx.scratch + _tops_nbytes(ctx.node)
    draw = [*words, ctx.out.address, own, _each_nbytes(words[3])]
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "count"):
        draw.append(ctx.need(name).address)
    return [Launch(_blocks_nan_first, words), Launch(_sample, draw)]


@BACKEND.kernel("penalise", layout={"logits": "rows"})
def penalise(ctx: KernelContext) -> Launch:
    logits, history = ctx.need("logits"), ctx.need("history")
    (width,) = logits.meta.inner
    words = [logits.address, logits.row_stride, ctx.live(logits.meta.rows), width]
    words += [ctx.out.address, history.address, *history.meta.inner]
    words += [ctx.need("stop").address, int(ctx.stop.meta.shape[0])]
    for name in ("count", "repeat", "presence", "frequency", "min_tokens"):
        words.append(ctx.need(name).address)
    return Launch(_penalise, words)
