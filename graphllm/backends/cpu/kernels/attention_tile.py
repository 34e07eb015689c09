"""One tile of attention: rows that share keys, and the pieces of the keys that they see.

See attention.py for what a tile and a piece are. Everything here works in a thread's own memory.
"""

from __future__ import annotations

from typing import Any

from numba import float32, int64

from ..runtime.jit import args, as_f32, exact_helper, f32_bits, f32s, helper, i32s, i64s, load_i64
from ..simd.math import exp32, tanh32
from . import attention_vectors as vector
from .attention_vectors import PAD, PREFETCH_KEYS, READERS, S_ROW, SPLIT_KEYS, TILE_KEYS
from .softmax_vectors import softmax_row

NEVER, _ONE = float32(float("-inf")), f32_bits(1.0)
ROWS = 72  # of a tile at most: whole blocks of every height
_UNPACK = 3  # blocks of rows from which keys and values are unpacked once for all

# A thread's own memory: lists of addresses, numbers of each row, then scores, queries, totals, and
# a piece's keys or values unpacked.
_KEYS, _VALUES = 0, 8 * (SPLIT_KEYS + PREFETCH_KEYS + TILE_KEYS)
_LOW, _HIGH, _AT = (2 * _VALUES + 8 * ROWS * i for i in range(3))
ROW_MAX, ROW_SUM, OLD_FACTOR, NEW_FACTOR, _SPLIT_MAX, _SPLIT_SUM = (
    _AT + 8 * ROWS + 4 * ROWS * i for i in range(6)
)
_SCORES = (_SPLIT_SUM + 4 * ROWS + 63) // 64 * 64
_QUERIES = _SCORES + ROWS * S_ROW

# Words of the argument block: addresses, strides in bytes, sizes. TOKENS and SEQUENCES are the
# addresses of live values. PADDED_DEPTH and PADDED_WIDTH: DEPTH and WIDTH padded.
(
    Q, Q_ROW, K, K_ROW, V, V_ROW, K_HEAD, V_HEAD, Q_START, KV_LEN, TABLE, TABLE_WIDTH, SINKS,
    SLOPES, PREFIX_LEN, OUT, TOKENS, SEQUENCES, HEADS, KV_HEADS, DEPTH, WIDTH, PADDED_DEPTH,
    PADDED_WIDTH, SCALE,
    SOFTCAP, BLOCK, CAUSAL, WINDOW, SCRATCH, SCRATCH_BYTES, PARTIALS, MAX_SPLIT_TOKENS, SPLITS,
) = range(34)  # fmt: skip
WORDS = 34


@helper
def totals_address(p, own):
    """Where the rows' totals lie."""
    return own + _QUERIES + ROWS * args(p, WORDS)[PADDED_DEPTH] * 4


@helper
def _unpacked_address(p, own):
    """Where a piece's keys or values are unpacked."""
    return totals_address(p, own) + ROWS * args(p, WORDS)[PADDED_WIDTH] * 4


@exact_helper
def merge(top, total, new_top, new_total):
    """Two softmaxes as one: (largest, sum, factor of the old, factor of the new)."""
    if new_top == NEVER:
        return top, total, float32(1), float32(0)
    best = max(top, new_top)
    a, b = exp32(top - best), exp32(new_top - best)
    return best, total * a + new_total * b, a, b


@exact_helper
def _output_scale(top, total, sink, has_sink):
    """What the merged values are multiplied with in the end."""
    if has_sink:
        best = max(top, sink)
        scale = exp32(top - best)
        return scale / (total * scale + exp32(sink - best))
    return float32(1) / total if total != 0 else float32(0)


@helper
def _split_addresses(p, own, s, g, first, last):
    """Where the keys and values first..last of sequence s lie, in their places of the piece."""
    w = args(p, WORDS)
    k, v, row_k, row_v, block = w[K], w[V], w[K_ROW], w[V_ROW], w[BLOCK]
    table = i32s(w[TABLE] + s * w[TABLE_WIDTH] * 4)
    start = first // SPLIT_KEYS * SPLIT_KEYS
    keys, rows = i64s(own + _KEYS), i64s(own + _VALUES)
    head_k, head_v = w[K_HEAD] * g, w[V_HEAD] * g
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
    for i in range(high, high + TILE_KEYS):  # also read where a group of keys is not full
        keys[i] = keys[low]
    for i in range(PREFETCH_KEYS):  # these are only asked for: after the keys come the values
        keys[high + TILE_KEYS + i] = rows[min(low + i, high - 1)]
        rows[high + i] = rows[low]


@helper
def _transform_scores(p, own, row, head, start):
    """One row's scores of a piece, scaled, capped and sloped. The loops have the same length for
    every row, so that an element meets the same code wherever a tile begins."""
    w = args(p, WORDS)
    scale, cap = as_f32(w[SCALE]), as_f32(w[SOFTCAP])
    s = f32s(own + _SCORES + row * S_ROW)
    for i in range(SPLIT_KEYS):
        s[i] = s[i] * scale
    if cap > float32(0):
        for i in range(SPLIT_KEYS):
            s[i] = cap * tanh32(s[i] / cap)
    if w[SLOPES] != 0:
        slope, shift = f32s(w[SLOPES])[head], start - i64s(own + _AT)[row]
        for i in range(SPLIT_KEYS):
            s[i] = s[i] + slope * float32(i + shift)


@helper
def _softmax_scores(p, own, rows, head, heads, start, first, last):
    """Make the scores first..last of a piece weights, and merge each row's softmax with that of
    earlier pieces."""
    w = args(p, WORDS)
    bent = w[SOFTCAP] != 0 or w[SLOPES] != 0
    scale = _ONE if bent else w[SCALE]
    lows, highs = i64s(own + _LOW), i64s(own + _HIGH)
    tops, sums = f32s(own + ROW_MAX), f32s(own + ROW_SUM)
    old, new = f32s(own + OLD_FACTOR), f32s(own + NEW_FACTOR)
    for row in range(rows):
        if bent:
            _transform_scores(p, own, row, head + row % heads, start)
        low = min(max(lows[row] - start, first), last)
        high = min(max(highs[row] - start, low), last)
        softmax_row((
            own + _SCORES + row * S_ROW, first // 16, (last + 15) // 16 - first // 16, low, high,
            scale, own + _SPLIT_MAX + 4 * row, own + _SPLIT_SUM + 4 * row,
        ))  # fmt: skip
        top, total = f32s(own + _SPLIT_MAX)[row], f32s(own + _SPLIT_SUM)[row]
        tops[row], sums[row], old[row], new[row] = merge(tops[row], sums[row], top, total)


@helper
def count_tiles(p, per):
    """Tiles of all sequences, ``per`` tokens each, and the most pieces that a sequence sees."""
    w = args(p, WORDS)
    start, lengths = i32s(w[Q_START]), i32s(w[KV_LEN])
    count, most = int64(0), int64(0)
    for s in range(load_i64(w[SEQUENCES])):
        count += (start[s + 1] - start[s] + per - 1) // per
        low, _, _ = visible_keys(p, s, int64(start[s]))
        most = max(most, (lengths[s] + SPLIT_KEYS - 1) // SPLIT_KEYS - low // SPLIT_KEYS)
    return count, most


@helper
def locate_tile(p, tile, per):
    """The sequence of a tile, its first token and one after its last; (-1, 0, 0) if none has it."""
    w = args(p, WORDS)
    start = i32s(w[Q_START])
    for s in range(load_i64(w[SEQUENCES])):
        count = (start[s + 1] - start[s] + per - 1) // per
        if tile < count:
            first = start[s] + tile * per
            return int64(s), int64(first), min(int64(start[s + 1]), int64(first + per))
        tile -= count
    return int64(-1), int64(0), int64(0)


@helper
def visible_keys(p, s, token):
    """The keys that a token of sequence s sees: (first, one after the last, its own position)."""
    w = args(p, WORDS)
    length = int64(i32s(w[KV_LEN])[s])
    at = length - (int64(i32s(w[Q_START])[s + 1]) - token)
    low, high = int64(0), length
    if w[CAUSAL] != 0:
        prefix = int64(i32s(w[PREFIX_LEN])[s]) if w[PREFIX_LEN] != 0 else int64(0)
        high = min(length, prefix if at < prefix else at + 1)
    if w[WINDOW] > 0:
        low = max(low, at - w[WINDOW] + 1)
    return low, high, at


@helper
def _range(p, own, s, first, last, heads):
    """Note what each row of a tile sees; the keys that any of them sees, (first, one after)."""
    lows, highs, at = i64s(own + _LOW), i64s(own + _HIGH), i64s(own + _AT)
    low, high, row = int64(2**62), int64(0), int64(0)
    for token in range(first, last):
        a, b, position = visible_keys(p, s, token)
        low, high = min(low, a), max(high, b)
        for _ in range(heads):
            lows[row], highs[row], at[row] = a, b, position
            row += 1
    return low, high


@helper
def _load_queries(p, own, first, last, head, heads, padded):
    """Fill a tile's queries, zeros up to ``padded`` rows, and begin its totals."""
    w = args(p, WORDS)
    depth, deep = w[DEPTH], w[PADDED_DEPTH]
    row = int64(0)
    for token in range(first, last):
        for h in range(head, head + heads):
            source = f32s(w[Q] + token * w[Q_ROW] + h * depth * 4)
            target = f32s(own + _QUERIES + row * deep * 4)
            for i in range(depth):
                target[i] = source[i]
            for i in range(depth, deep):
                target[i] = float32(0)
            row += 1
    for i in range(row * deep, padded * deep):
        f32s(own + _QUERIES)[i] = float32(0)
    totals = f32s(totals_address(p, own))
    for i in range(padded * w[PADDED_WIDTH]):
        totals[i] = float32(0)
    for i in range(padded):
        f32s(own + ROW_MAX)[i], f32s(own + ROW_SUM)[i] = NEVER, float32(0)
        f32s(own + OLD_FACTOR)[i], f32s(own + NEW_FACTOR)[i] = float32(1), float32(0)


@helper
def finish_row(p, own, row, token, head, piece):
    """Write a row: its result, or the part of one piece for `_merge_splits` (piece >= 0)."""
    w = args(p, WORDS)
    width, wide = w[WIDTH], w[PADDED_WIDTH]
    source = f32s(totals_address(p, own) + row * wide * 4)
    top, total = f32s(own + ROW_MAX)[row], f32s(own + ROW_SUM)[row]
    if piece >= 0:
        part = f32s(partial_address(p, token, head, piece))
        for i in range(wide):
            part[i] = source[i]
        part[wide], part[wide + 1] = top, total
    else:
        sink = f32s(w[SINKS])[head] if w[SINKS] != 0 else float32(0)
        factor = _output_scale(top, total, sink, w[SINKS] != 0)
        out = f32s(w[OUT] + (token * w[HEADS] + head) * width * 4)
        for i in range(width):
            out[i] = source[i] * factor


@helper
def partial_address(p, token, head, piece):
    """Where the part of one piece waits: totals, largest, sum."""
    w = args(p, WORDS)
    return (
        w[PARTIALS] + ((token * w[HEADS] + head) * w[SPLITS] + piece) * (w[PADDED_WIDTH] + 16) * 4
    )


@helper
def shape_of_tile(p):
    """Heads that share a kv head, groups of at most ROWS of them, most tokens in a tile."""
    w = args(p, WORDS)
    shared = w[HEADS] // w[KV_HEADS]
    return shared, (shared + ROWS - 1) // ROWS, max(int64(1), ROWS // shared)


def _split_loops(k: str, v: str, height: int) -> Any:
    """Helpers for keys a..b of a piece: one for their scores, one for their values."""
    scores, unpacked_scores = vector.scores[k, height], vector.unpacked_scores[k, height]
    values, plain_values = vector.values[v, height], vector.values["f32", height]
    unpack, packed_k, packed_v = vector.unpack[v], k != "f32", v != "f32"
    unit_k, unit_v, unit = (READERS[kind].unit for kind in (k, v, "f32"))

    @helper
    def score(p, own, blocks, a, b):
        w = args(p, WORDS)
        q, q_row, skip = own + _QUERIES, w[PADDED_DEPTH] * 4, a // TILE_KEYS * TILE_KEYS
        groups, keys = (b - skip + TILE_KEYS - 1) // TILE_KEYS, own + _KEYS + skip * 8
        there, whole, rest = own + _SCORES + skip * 4, w[DEPTH] // unit_k, w[DEPTH] % unit_k
        if packed_k and blocks >= _UNPACK:
            room = _unpacked_address(p, own)
            unpacked_scores((q, q_row, blocks, keys, groups, whole, rest, there, room))
        else:
            scores((q, q_row, blocks, keys, groups, whole, rest, there))

    @helper
    def accumulate(p, own, blocks, a, b):
        w = args(p, WORDS)
        s, rows, total, t_row = (
            own + _SCORES,
            own + _VALUES,
            totals_address(p, own),
            w[PADDED_WIDTH] * 4,
        )
        whole, rest = w[WIDTH] // unit_v, w[WIDTH] % unit_v
        if packed_v and blocks >= _UNPACK:
            unpack((rows, a, b, whole, rest, _unpacked_address(p, own), t_row))
            for i in range(b - a):
                i64s(rows)[a + i] = _unpacked_address(p, own) + i * t_row
            plain_values((
                s, blocks, rows, a, b, w[PADDED_WIDTH] // unit, int64(0), total, t_row,
                own + OLD_FACTOR, own + NEW_FACTOR,
            ))  # fmt: skip
        else:
            values(
                (
                    s,
                    blocks,
                    rows,
                    a,
                    b,
                    whole,
                    rest,
                    total,
                    t_row,
                    own + OLD_FACTOR,
                    own + NEW_FACTOR,
                )
            )

    return score, accumulate


def make_tile(k: str, v: str, height: int) -> Any:
    score, accumulate = _split_loops(k, v, height)

    @helper
    def tile(p, own, unit, per, only):
        """One tile, ``per`` tokens, and all pieces; or the one that is ``only`` after the first."""
        w = args(p, WORDS)
        shared, subs, _ = shape_of_tile(p)
        s, first, last = locate_tile(p, unit // (w[KV_HEADS] * subs), per)
        g, sub = unit % (w[KV_HEADS] * subs) // subs, unit % subs
        head, heads = g * shared + sub * ROWS, min(shared - sub * ROWS, int64(ROWS))
        rows = (last - first) * heads
        blocks = (rows + height - 1) // height
        low, high = _range(p, own, s, first, last, heads)
        at, end = low // SPLIT_KEYS, (high + SPLIT_KEYS - 1) // SPLIT_KEYS
        if only >= 0:
            at, end = at + only, min(end, at + only + 1)
            if at >= end:
                return
        _load_queries(p, own, first, last, head, heads, blocks * height)
        for piece in range(at, end):
            start = piece * SPLIT_KEYS
            a, b = max(low - start, int64(0)), min(high - start, int64(SPLIT_KEYS))
            _split_addresses(p, own, s, g, start + a, start + b)
            score(p, own, blocks, a, b)
            _softmax_scores(p, own, rows, head, heads, start, a, b)
            accumulate(p, own, blocks, a, b)
        for row in range(rows):
            into = at if only >= 0 else int64(-1)
            finish_row(p, own, row, first + row // heads, head + row % heads, into)

    return tile


# ------------------------------------------------------------------------------------------ sizes


def padded(width: int) -> int:
    return -(-width // PAD) * PAD


def thread_scratch_bytes(depth: int, width: int) -> int:
    """A thread's memory: see the offsets above."""
    rows = ROWS * 4 * (padded(depth) + padded(width))
    return -(-(_QUERIES + rows + SPLIT_KEYS * 4 * max(padded(depth), padded(width))) // 64) * 64
