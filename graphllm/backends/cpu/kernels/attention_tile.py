"""One tile of attention: rows that share keys, and the splits of the keys that they see.

See attention.py for what a tile and a split are. The helpers work in the scratch ``local`` of a
thread (see attention_arguments.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..runtime.jit import as_f32, exact_helper, f32_bits, f32s, helper, i32s, i64s, load_i64
from ..runtime.lazy_numba import float32, int64
from ..simd.math import exp32, tanh32
from . import attention_vectors as vector
from .attention_arguments import (  # fmt: skip
    FIRST_KEY,
    KEYS,
    LAST_KEY,
    NEW_FACTOR,
    OLD_FACTOR,
    POSITION,
    QUERIES,
    ROW_MAX,
    ROW_SUM,
    ROWS,
    SCORES,
    SPLIT_MAX,
    SPLIT_SUM,
    VALUES,
    partial_address,
    read_attention,
    totals_address,
    unpacked_address,
)
from .attention_vectors import PREFETCH_KEYS, S_ROW, SPLIT_KEYS, TILE_KEYS, softmax_row
from .pool_elements import READERS

MINUS_INF, _ONE_BITS = np.float32(float("-inf")), f32_bits(1.0)
_UNPACK_BLOCKS = 3  # tiles of at least 3 blocks of rows unpack keys and values once for all rows


@exact_helper
def merge(top, total, new_top, new_total):
    """Merge two softmaxes: (maximum, sum, factor of the old values, factor of the new values)."""
    if new_top == MINUS_INF:
        return top, total, float32(1), float32(0)
    if top == MINUS_INF:  # the first split; the factors below would be exactly these
        return new_top, new_total, float32(0), float32(1)
    best = max(top, new_top)
    old, new = exp32(top - best), exp32(new_top - best)
    return best, total * old + new_total * new, old, new


@exact_helper
def _output_scale(top, total, sink, has_sink):
    """Factor that normalizes the merged values."""
    if has_sink:
        best = max(top, sink)
        scale = exp32(top - best)
        return scale / (total * scale + exp32(sink - best))
    return float32(1) / total if total != 0 else float32(0)


@helper
def _split_addresses(p, local, s, g, first, last):
    """Write the addresses of keys and values ``first`` to ``last`` of sequence s, kv head g."""
    a = read_attention(p)
    k, v, row_k, row_v, block = a.k, a.v, a.k_stride, a.v_stride, a.block
    table = i32s(a.table + s * a.table_width * 4)
    start = first // SPLIT_KEYS * SPLIT_KEYS
    keys, rows = i64s(local + KEYS), i64s(local + VALUES)
    head_k, head_v = a.k_head_stride * g, a.v_head_stride * g
    j = first
    while j < last:
        slot = int64(table[j // block]) * block + j % block
        end = min(last, (j // block + 1) * block)
        for i in range(j, end):
            keys[i - start] = k + head_k + (slot + i - j) * row_k
            rows[i - start] = v + head_v + (slot + i - j) * row_v
        j = end
    low, high = first - start, last - start
    for i in range(low // TILE_KEYS * TILE_KEYS, low):
        keys[i] = keys[low]
    for i in range(high, high + TILE_KEYS):  # read if the last group of keys is not full
        keys[i] = keys[low]
    for i in range(PREFETCH_KEYS):  # only prefetched: values follow the keys
        keys[high + TILE_KEYS + i] = rows[min(low + i, high - 1)]
        rows[high + i] = rows[low]


@helper
def _transform_scores(p, local, row, head, start):
    """Scale and cap the scores of one row, and add its biases.

    The loops have the same length for every row, so that the same code computes an element
    wherever a tile begins.
    """
    a = read_attention(p)
    scale, cap = as_f32(a.scale_bits), a.softcap
    s = f32s(local + SCORES + row * S_ROW)
    for i in range(SPLIT_KEYS):
        s[i] = s[i] * scale
    if cap > float32(0):
        for i in range(SPLIT_KEYS):
            s[i] = cap * tanh32(s[i] / cap)
    if a.slopes != 0:
        slope, shift = f32s(a.slopes)[head], start - i64s(local + POSITION)[row]
        for i in range(SPLIT_KEYS):
            s[i] = s[i] + slope * float32(i + shift)
    if a.position_bias != 0:
        reach, shift = a.bias_reach, start - i64s(local + POSITION)[row]
        bias = f32s(a.position_bias + head * (2 * reach + 1) * 4)
        for i in range(SPLIT_KEYS):
            s[i] = s[i] + bias[reach + max(-reach, min(reach, i + shift))]


@helper
def _softmax_scores(p, local, rows, head, heads, start, first, last):
    """Turn scores ``first`` to ``last`` of a split into weights, and merge each row's softmax with
    that of earlier splits."""
    a = read_attention(p)
    transformed = a.softcap != 0 or a.slopes != 0 or a.position_bias != 0
    scale = _ONE_BITS if transformed else a.scale_bits
    lows, highs = i64s(local + FIRST_KEY), i64s(local + LAST_KEY)
    tops, sums = f32s(local + ROW_MAX), f32s(local + ROW_SUM)
    old, new = f32s(local + OLD_FACTOR), f32s(local + NEW_FACTOR)
    for row in range(rows):
        if transformed:
            _transform_scores(p, local, row, head + row % heads, start)
        low = min(max(lows[row] - start, first), last)
        high = min(max(highs[row] - start, low), last)
        softmax_row((
            local + SCORES + row * S_ROW, first // 16, (last + 15) // 16 - first // 16, low, high,
            scale, local + SPLIT_MAX + 4 * row, local + SPLIT_SUM + 4 * row,
        ))  # fmt: skip
        top, total = f32s(local + SPLIT_MAX)[row], f32s(local + SPLIT_SUM)[row]
        tops[row], sums[row], old[row], new[row] = merge(tops[row], sums[row], top, total)


@helper
def tile_count(q_start, sequences, per):
    """Number of tiles of ``per`` tokens in all sequences."""
    start, count = i32s(q_start), int64(0)
    for s in range(sequences):
        count += (start[s + 1] - start[s] + per - 1) // per
    return count


@helper
def most_splits(p):
    """Most splits that a sequence sees."""
    a = read_attention(p)
    most = int64(0)
    for s in range(load_i64(a.starts) - 1):
        low, _, _ = visible_keys(p, s, int64(i32s(a.q_start)[s]))
        splits = (i32s(a.kv_len)[s] + SPLIT_KEYS - 1) // SPLIT_KEYS
        most = max(most, splits - low // SPLIT_KEYS)
    return most


@helper
def locate_tile(q_start, sequences, tile, per):
    """Return the sequence of a tile and its range of tokens, or (-1, 0, 0) if there is none."""
    start = i32s(q_start)
    for s in range(sequences):
        count = (start[s + 1] - start[s] + per - 1) // per
        if tile < count:
            first = start[s] + tile * per
            return int64(s), int64(first), min(int64(start[s + 1]), int64(first + per))
        tile -= count
    return int64(-1), int64(0), int64(0)


@helper
def visible_keys(p, s, token):
    """Return the range of keys that a token of sequence s sees, and the token's position."""
    a = read_attention(p)
    length = int64(i32s(a.kv_len)[s])
    at = length - (int64(i32s(a.q_start)[s + 1]) - token)
    low, high = int64(0), length
    if a.causal != 0:
        prefix = int64(i32s(a.prefix_len)[s]) if a.prefix_len != 0 else int64(0)
        high = min(length, prefix if at < prefix else at + 1)
    if a.window > 0:
        low = max(low, at - a.window + 1)
    if a.skip_prefix != 0:
        low = max(low, int64(i32s(a.prefix_len)[s]))
    return low, high, at


@helper
def _write_key_ranges(p, local, s, first, last, heads):
    """Write the range of visible keys of each row of a tile; returns the union of the ranges."""
    lows, highs, at = i64s(local + FIRST_KEY), i64s(local + LAST_KEY), i64s(local + POSITION)
    low, high, row = int64(2**62), int64(0), int64(0)
    for token in range(first, last):
        row_low, row_high, position = visible_keys(p, s, token)
        low, high = min(low, row_low), max(high, row_high)
        for _ in range(heads):
            lows[row], highs[row], at[row] = row_low, row_high, position
            row += 1
    return low, high


@helper
def _load_queries(p, local, first, last, head, heads, padded):
    """Copy the queries of a tile, zero-padded to ``padded`` rows, and reset its totals."""
    a = read_attention(p)
    depth, padded_depth = a.depth, a.padded_depth
    row = int64(0)
    for token in range(first, last):
        for h in range(head, head + heads):
            source = f32s(a.q + token * a.q_stride + h * depth * 4)
            target = f32s(local + QUERIES + row * padded_depth * 4)
            for i in range(depth):
                target[i] = source[i]
            for i in range(depth, padded_depth):
                target[i] = float32(0)
            row += 1
    for i in range(row * padded_depth, padded * padded_depth):
        f32s(local + QUERIES)[i] = float32(0)
    totals = f32s(totals_address(p, local))
    for i in range(padded * a.padded_width):
        totals[i] = float32(0)
    for i in range(padded):
        f32s(local + ROW_MAX)[i], f32s(local + ROW_SUM)[i] = MINUS_INF, float32(0)
        f32s(local + OLD_FACTOR)[i], f32s(local + NEW_FACTOR)[i] = float32(1), float32(0)


@helper
def finish_row(p, local, row, token, head, split):
    """Write the result of a row, or of one split for `_merge_splits` if ``split`` >= 0."""
    a = read_attention(p)
    width, padded_width = a.width, a.padded_width
    source = f32s(totals_address(p, local) + row * padded_width * 4)
    top, total = f32s(local + ROW_MAX)[row], f32s(local + ROW_SUM)[row]
    if split >= 0:
        part = f32s(partial_address(p, token, head, split))
        for i in range(padded_width):
            part[i] = source[i]
        part[padded_width], part[padded_width + 1] = top, total
    else:
        sink = f32s(a.sinks)[head] if a.sinks != 0 else float32(0)
        factor = _output_scale(top, total, sink, a.sinks != 0)
        out = f32s(a.out + (token * a.heads + head) * width * 4)
        for i in range(width):
            out[i] = source[i] * factor


@helper
def shape_of_tile(p):
    """Return heads per kv head, their subgroups of at most ROWS, and the most tokens of a tile."""
    a = read_attention(p)
    shared = a.heads // a.kv_heads
    return shared, (shared + ROWS - 1) // ROWS, max(int64(1), ROWS // shared)


def _split_loops(k: str, v: str, height: int) -> tuple[Any, Any]:
    """Make helpers for keys first..last of a split: their scores, and the sum of their values."""
    scores, unpacked_scores = vector.scores[k, height], vector.unpacked_scores[k, height]
    values, f32_values = vector.values[v, height], vector.values["f32", height]
    unpack, packed_k, packed_v = vector.unpack[v], k != "f32", v != "f32"
    unit_k, unit_v, unit = (READERS[kind].unit for kind in (k, v, "f32"))

    @helper
    def score(p, local, blocks, first, last):
        a = read_attention(p)
        q, q_stride, skip = local + QUERIES, a.padded_depth * 4, first // TILE_KEYS * TILE_KEYS
        groups, keys = (last - skip + TILE_KEYS - 1) // TILE_KEYS, local + KEYS + skip * 8
        out, units, rest = local + SCORES + skip * 4, a.depth // unit_k, a.depth % unit_k
        if packed_k and blocks >= _UNPACK_BLOCKS:
            unpacked = unpacked_address(p, local)
            unpacked_scores((q, q_stride, blocks, keys, groups, units, rest, out, unpacked))
        else:
            scores((q, q_stride, blocks, keys, groups, units, rest, out))

    @helper
    def accumulate(p, local, blocks, first, last):
        a = read_attention(p)
        s, rows, total = local + SCORES, local + VALUES, totals_address(p, local)
        stride, units, rest = a.padded_width * 4, a.width // unit_v, a.width % unit_v
        old, new = local + OLD_FACTOR, local + NEW_FACTOR
        if packed_v and blocks >= _UNPACK_BLOCKS:
            unpack((rows, first, last, units, rest, unpacked_address(p, local), stride))
            for i in range(last - first):
                i64s(rows)[first + i] = unpacked_address(p, local) + i * stride
            units = a.padded_width // unit
            f32_values((s, blocks, rows, first, last, units, int64(0), total, stride, old, new))
        else:
            values((s, blocks, rows, first, last, units, rest, total, stride, old, new))

    return score, accumulate


def make_tile(k: str, v: str, height: int) -> Any:
    """Make the helper that computes one tile, for the dtypes of the pools and a block height."""
    score, accumulate = _split_loops(k, v, height)

    @helper
    def tile(p, local, unit, per, only):
        """Compute a tile of ``per`` tokens over all splits, or over split ``only`` if not -1."""
        a = read_attention(p)
        shared, subgroups, _ = shape_of_tile(p)
        sequences, which = load_i64(a.starts) - 1, unit // (a.kv_heads * subgroups)
        s, first, last = locate_tile(a.q_start, sequences, which, per)
        g, sub = unit % (a.kv_heads * subgroups) // subgroups, unit % subgroups
        head, heads = g * shared + sub * ROWS, min(shared - sub * ROWS, int64(ROWS))
        rows = (last - first) * heads
        blocks = (rows + height - 1) // height
        low, high = _write_key_ranges(p, local, s, first, last, heads)
        at, end = low // SPLIT_KEYS, (high + SPLIT_KEYS - 1) // SPLIT_KEYS
        if only >= 0:
            at, end = at + only, min(end, at + only + 1)
            if at >= end:
                return
        _load_queries(p, local, first, last, head, heads, blocks * height)
        for split in range(at, end):
            start = split * SPLIT_KEYS
            key, key_end = max(low - start, int64(0)), min(high - start, int64(SPLIT_KEYS))
            _split_addresses(p, local, s, g, start + key, start + key_end)
            score(p, local, blocks, key, key_end)
            _softmax_scores(p, local, rows, head, heads, start, key, key_end)
            accumulate(p, local, blocks, key, key_end)
        for row in range(rows):
            into = at if only >= 0 else int64(-1)
            finish_row(p, local, row, first + row // heads, head + row % heads, into)

    return tile
