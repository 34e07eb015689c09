"""Attention over the paged cache, and the writes that fill it.

A tile is up to 16 rows: the query heads that share a kv head, of as many neighbouring tokens as
fit. It goes through the keys in pieces that begin at multiples of PIECE, whoever asks: each piece
has a softmax of its own, and the pieces are merged in order. So the result for a token does not
depend on the batch, on how a prompt was cut, or on threads. Few tokens leave too few tiles to go
round: then each piece is an item, whose part waits until a second kernel merges the parts.
"""

from __future__ import annotations

from typing import Any

from numba import float32, int64

from ...tensor import Tensor
from .. import Options
from . import BACKEND
from . import attention_ir as vector
from .attention_ir import AHEAD, PIECE, ROWS, S_ROW, TILE_KEYS, TILE_ROWS
from .device import Launch, Site, Spot
from .elementwise import share
from .isa import threads_for
from .jit import (
    Kernel,
    args,
    as_f32,
    exact_helper,
    f32_bits,
    f32s,
    helper,
    i32s,
    i64s,
    kernel,
    load_i64,
    next_chunk,
)
from .maths import exp32, tanh32

_NEVER = float32(float("-inf"))
_SPLIT = 16  # tiles of one token below which pieces are items

# A thread's own memory: lists of addresses, numbers of each row, then scores, queries and totals.
_KEYS, _VALUES = 0, 8 * (PIECE + AHEAD)
_LOW, _HIGH, _AT = (2 * _VALUES + 8 * ROWS * i for i in range(3))
_TOP, _SUM, _A, _B = (_AT + 8 * ROWS + 4 * ROWS * i for i in range(4))
_SCORES = (_B + 4 * ROWS + 63) // 64 * 64
_QUERIES = _SCORES + ROWS * S_ROW

# Words of the argument block: addresses, strides in bytes, sizes. TOKENS and SEQUENCES are the
# addresses of live values.
(
    Q, Q_ROW, K, K_ROW, V, V_ROW, Q_START, KV_LEN, TABLE, TABLE_WIDTH, SINKS, SLOPES, PREFIX_LEN,
    OUT, TOKENS, SEQUENCES, HEADS, KV_HEADS, DEPTH, WIDTH, SCALE, SOFTCAP, BLOCK, CAUSAL, WINDOW,
    OWN, OWN_SIZE, PARTS, SPLIT_TOKENS, PIECES,
) = range(30)  # fmt: skip
_WORDS = 30


@exact_helper
def _merge(top, total, new_top, new_total):
    """Two softmaxes as one: (largest, sum, factor of the old, factor of the new)."""
    if new_top == _NEVER:
        return top, total, float32(1), float32(0)
    best = max(top, new_top)
    a, b = exp32(top - best), exp32(new_top - best)
    return best, total * a + new_total * b, a, b


@exact_helper
def _finish(top, total, sink, has_sink):
    """What the merged values are multiplied with in the end."""
    if has_sink:
        best = max(top, sink)
        scale = exp32(top - best)
        return scale / (total * scale + exp32(sink - best))
    return float32(1) / total if total != 0 else float32(0)


@helper
def _piece_addresses(p, own, s, g, first, last):
    """Where the keys and values first..last of sequence s lie, in their places of the piece."""
    w = args(p, _WORDS)
    k, v, row_k, row_v, block = w[K], w[V], w[K_ROW], w[V_ROW], w[BLOCK]
    table = i32s(w[TABLE] + s * w[TABLE_WIDTH] * 4)
    start = first // PIECE * PIECE
    keys, rows = i64s(own + _KEYS), i64s(own + _VALUES)
    head_k, head_v = row_k // w[KV_HEADS] * g, row_v // w[KV_HEADS] * g
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
    for i in range(high, high + AHEAD):  # also read where a group of keys is not full
        keys[i] = keys[low]


@helper
def _soften(p, own, row, head, start):
    """One row's scores of a piece as weights; their largest and their sum. The loops have the same
    length for every row, so that an element meets the same code wherever a tile begins."""
    w = args(p, _WORDS)
    scale, cap = as_f32(w[SCALE]), as_f32(w[SOFTCAP])
    s = f32s(own + _SCORES + row * S_ROW)
    low, high = i64s(own + _LOW)[row] - start, i64s(own + _HIGH)[row] - start
    for i in range(PIECE):
        s[i] = s[i] * scale
    if cap > float32(0):
        for i in range(PIECE):
            s[i] = cap * tanh32(s[i] / cap)
    if w[SLOPES] != 0:
        slope, shift = f32s(w[SLOPES])[head], start - i64s(own + _AT)[row]
        for i in range(PIECE):
            s[i] = s[i] + slope * float32(i + shift)
    for i in range(PIECE):
        s[i] = s[i] if low <= i < high else _NEVER
    top = vector.largest((own + _SCORES + row * S_ROW, PIECE // 16))
    finite = top if top != _NEVER else float32(0)
    for i in range(PIECE):
        s[i] = exp32(s[i] - finite)
    total = vector.total((own + _SCORES + row * S_ROW, PIECE // 16))
    if total != total:  # NaN has no order, so it was not the largest
        top = finite
    return top, total


@helper
def _weigh(p, own, rows, head, heads, start):
    """Make a piece's scores weights, and merge each row's softmax with that of earlier pieces."""
    tops, sums = f32s(own + _TOP), f32s(own + _SUM)
    old, new = f32s(own + _A), f32s(own + _B)
    for row in range(rows):
        top, total = _soften(p, own, row, head + row % heads, start)
        tops[row], sums[row], old[row], new[row] = _merge(tops[row], sums[row], top, total)


@helper
def _tiles(p, per):
    """Tiles of all sequences, ``per`` tokens each, and the longest sequence's keys."""
    w = args(p, _WORDS)
    start, lengths = i32s(w[Q_START]), i32s(w[KV_LEN])
    count, longest = int64(0), int64(0)
    for s in range(load_i64(w[SEQUENCES])):
        count += (start[s + 1] - start[s] + per - 1) // per
        longest = max(longest, int64(lengths[s]))
    return count, longest


@helper
def _locate(p, tile, per):
    """The sequence of a tile, its first token and one after its last; (-1, 0, 0) if none has it."""
    w = args(p, _WORDS)
    start = i32s(w[Q_START])
    for s in range(load_i64(w[SEQUENCES])):
        count = (start[s + 1] - start[s] + per - 1) // per
        if tile < count:
            first = start[s] + tile * per
            return int64(s), int64(first), min(int64(start[s + 1]), int64(first + per))
        tile -= count
    return int64(-1), int64(0), int64(0)


@helper
def _visible(p, s, token):
    """The keys that a token of sequence s sees: (first, one after the last, its own position)."""
    w = args(p, _WORDS)
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
def _begin(p, own, s, first, last, head, heads, padded):
    """Fill a tile's queries and rows; the keys that any of them sees, (first, one after last)."""
    w = args(p, _WORDS)
    depth, wide = w[DEPTH], (w[DEPTH] + 15) // 16 * 16
    lows, highs, at = i64s(own + _LOW), i64s(own + _HIGH), i64s(own + _AT)
    low, high, row = int64(2**62), int64(0), int64(0)
    for token in range(first, last):
        a, b, position = _visible(p, s, token)
        low, high = min(low, a), max(high, b)
        for h in range(head, head + heads):
            source = f32s(w[Q] + token * w[Q_ROW] + h * depth * 4)
            target = f32s(own + _QUERIES + row * wide * 4)
            for i in range(depth):
                target[i] = source[i]
            for i in range(depth, wide):
                target[i] = float32(0)
            lows[row], highs[row], at[row] = a, b, position
            row += 1
    for i in range(row * wide, padded * wide):
        f32s(own + _QUERIES)[i] = float32(0)
    totals = f32s(own + _QUERIES + ROWS * wide * 4)
    for i in range(padded * ((w[WIDTH] + 15) // 16 * 16)):
        totals[i] = float32(0)
    for i in range(padded):
        f32s(own + _TOP)[i], f32s(own + _SUM)[i] = _NEVER, float32(0)
        f32s(own + _A)[i], f32s(own + _B)[i] = float32(1), float32(0)
    return low, high


@helper
def _end(p, own, row, token, head, piece):
    """Write a row: its result, or the part of one piece for `_join` (piece >= 0)."""
    w = args(p, _WORDS)
    width, wide = w[WIDTH], (w[WIDTH] + 15) // 16 * 16
    source = f32s(own + _QUERIES + ROWS * ((w[DEPTH] + 15) // 16 * 16) * 4 + row * wide * 4)
    top, total = f32s(own + _TOP)[row], f32s(own + _SUM)[row]
    if piece >= 0:
        part = f32s(w[PARTS] + ((token * w[HEADS] + head) * w[PIECES] + piece) * (wide + 16) * 4)
        for i in range(wide):
            part[i] = source[i]
        part[wide], part[wide + 1] = top, total
    else:
        sink = f32s(w[SINKS])[head] if w[SINKS] != 0 else float32(0)
        factor = _finish(top, total, sink, w[SINKS] != 0)
        out = f32s(w[OUT] + (token * w[HEADS] + head) * width * 4)
        for i in range(width):
            out[i] = source[i] * factor


@helper
def _shape(p):
    """Heads that share a kv head, groups of at most ROWS of them, tokens in a tile."""
    w = args(p, _WORDS)
    shared = w[HEADS] // w[KV_HEADS]
    return shared, (shared + ROWS - 1) // ROWS, max(int64(1), ROWS // shared)


def _tile(k_half: bool, v_half: bool) -> Any:
    scores, values = vector.scores[k_half], vector.values[v_half]

    @helper
    def tile(p, own, unit, only):
        """One tile and all pieces, or ``only`` one."""
        w = args(p, _WORDS)
        shared, subs, per = _shape(p)
        s, first, last = _locate(p, unit // (w[KV_HEADS] * subs), per)
        g, sub = unit % (w[KV_HEADS] * subs) // subs, unit % subs
        head, heads = g * shared + sub * ROWS, min(shared - sub * ROWS, int64(ROWS))
        rows = (last - first) * heads
        blocks = (rows + TILE_ROWS - 1) // TILE_ROWS
        low, high = _begin(p, own, s, first, last, head, heads, blocks * TILE_ROWS)
        q_row, t_row = (w[DEPTH] + 15) // 16 * 64, (w[WIDTH] + 15) // 16 * 64
        at, end = low // PIECE, (high + PIECE - 1) // PIECE
        if only >= 0:
            at, end = max(at, only), min(end, only + 1)
            if at >= end:
                return
        for piece in range(at, end):
            start = piece * PIECE
            a, b = max(low, start), min(high, start + PIECE)
            _piece_addresses(p, own, s, g, a, b)
            skip = (a - start) // TILE_KEYS
            groups = (b - start + TILE_KEYS - 1) // TILE_KEYS - skip
            scores((
                own + _QUERIES, q_row, blocks, own + _KEYS + skip * TILE_KEYS * 8, groups,
                w[DEPTH] // 16, w[DEPTH] % 16, own + _SCORES + skip * TILE_KEYS * 4,
            ))  # fmt: skip
            _weigh(p, own, rows, head, heads, start)
            values((
                own + _SCORES, blocks, own + _VALUES, a - start, b - start, w[WIDTH] // 16,
                w[WIDTH] % 16, own + _QUERIES + ROWS * q_row, t_row, own + _A, own + _B,
            ))  # fmt: skip
        for row in range(rows):
            _end(p, own, row, first + row // heads, head + row % heads, only)

    return tile


def _attend(k_half: bool, v_half: bool) -> Kernel:
    tile = _tile(k_half, v_half)

    @kernel(key=(k_half, v_half))
    def attend(p, thread, threads):
        w = args(p, _WORDS)
        own = w[OWN] + thread * w[OWN_SIZE]
        _, subs, per = _shape(p)
        count, longest = _tiles(p, per)
        units, pieces = count * w[KV_HEADS] * subs, int64(1)
        split = load_i64(w[TOKENS]) <= w[SPLIT_TOKENS]
        if split:
            pieces = (longest + PIECE - 1) // PIECE
        item = next_chunk(p)
        while item < units * pieces:
            # The last tiles of a prompt see the most keys: they come first.
            tile(p, own, units - 1 - item // pieces, item % pieces if split else int64(-1))
            item = next_chunk(p)

    return attend


@kernel
def _join(p, thread, threads):
    """Merge the parts of each token and head, if the step had so few that pieces were items."""
    w = args(p, _WORDS)
    tokens = load_i64(w[TOKENS])
    if tokens > w[SPLIT_TOKENS]:
        return
    own = w[OWN] + thread * w[OWN_SIZE]
    wide = (w[WIDTH] + 15) // 16 * 16
    total = own + _QUERIES + ROWS * ((w[DEPTH] + 15) // 16 * 16) * 4
    tops, sums, a, b = f32s(own + _TOP), f32s(own + _SUM), f32s(own + _A), f32s(own + _B)
    first, last = share(tokens * w[HEADS], thread, threads)
    for line in range(first, last):
        s, token, _ = _locate(p, line // w[HEADS], int64(1))
        if s < 0:
            continue
        low, high, _ = _visible(p, s, token)
        for i in range(wide):
            f32s(total)[i] = float32(0)
        tops[0], sums[0] = _NEVER, float32(0)
        for piece in range(low // PIECE, (high + PIECE - 1) // PIECE):
            part = (
                w[PARTS]
                + ((token * w[HEADS] + line % w[HEADS]) * w[PIECES] + piece) * (wide + 16) * 4
            )
            ends = f32s(part)
            merged = _merge(tops[0], sums[0], ends[wide], ends[wide + 1])
            tops[0], sums[0], a[0], b[0] = merged
            vector.merge_rows((total, part, wide // 16, own + _A, own + _B))
        _end(p, own, 0, token, line % w[HEADS], -1)


# ---------------------------------------------------------------------------------------- builders


def _padded(width: int) -> int:
    return -(-width // 16) * 16


def _own_nbytes(depth: int, width: int) -> int:
    """A thread's memory: see the offsets above."""
    return -(-(_QUERIES + ROWS * 4 * (_padded(depth) + _padded(width))) // 64) * 64


def _split_tokens(heads: int, kv_heads: int) -> int:
    """Up to how many tokens a step has pieces as items."""
    return max(1, _SPLIT // (kv_heads * -(-heads // kv_heads // ROWS)))


def _pieces(node: Tensor) -> int:
    return -(-int(node.src[5].meta.shape[1]) * node.attrs["block"] // PIECE)  # type: ignore[union-attr,arg-type]


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Heads, kv heads, depth of a query, width of a value."""
    q, _, v = node.sources[:3]
    return (*q.meta.inner, *v.meta.inner)  # type: ignore[return-value]


def scratch(node: Tensor, options: Options) -> int:
    """Bytes of workspace: every thread's memory, and the parts that wait to be merged."""
    heads, depth, kv_heads, width = _sizes(node)
    parts = _split_tokens(heads, kv_heads) * heads * _pieces(node) * (_padded(width) + 16) * 4
    return threads_for(options) * _own_nbytes(depth, width) + parts


_ATTEND = {(k, v): _attend(k, v) for k in (False, True) for v in (False, True)}


@BACKEND.kernel("attention", layout={"q": "rows"}, scratch=scratch)
def attention(site: Site) -> list[Launch]:
    return launches(site, site.out.address, site.scratch)


def launches(site: Site, result: int, room: int) -> list[Launch]:
    """Attention with its result [T, H, D] f32 at address ``result``, its workspace at ``room``."""
    heads, depth, kv_heads, width = _sizes(site.node)
    attrs, own = site.attrs, _own_nbytes(depth, width)
    q, k, v, table = site.q, site.k, site.v, site.table
    words = [q.address, q.row_stride, k.address, k.row_stride, v.address, v.row_stride]
    words += [site.q_start.address, site.kv_len.address, table.address, table.meta.shape[1]]
    words += [_address(site.op(name)) for name in ("sinks", "slopes", "prefix_len")]
    words += [result, site.live(q.meta.rows), site.live(site.kv_len.meta.rows)]
    words += [heads, kv_heads, depth, width, f32_bits(attrs["scale"]), f32_bits(attrs["softcap"])]
    words += [attrs["block"], int(attrs["causal"]), attrs["window"], room, own]
    words += [room + site.threads * own, _split_tokens(heads, kv_heads)]
    words.append(_pieces(site.node))
    return [Launch(_ATTEND[_is_half(k), _is_half(v)], words), Launch(_join, words)]


def _address(spot: Spot | None) -> int:
    return spot.address if spot is not None else 0


def _is_half(spot: Spot) -> bool:
    return spot.dtype.name == "f16"
