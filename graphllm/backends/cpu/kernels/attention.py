"""Attention over the paged cache.

A tile is up to ROWS rows: the query heads that share a kv head, of as many neighbouring tokens as
fit. It goes through the keys in pieces that begin at multiples of SPLIT_KEYS, whoever asks: each
piece has a softmax of its own, and the pieces are merged in order. So the result for a token does
not depend on the batch, on how a prompt was cut, or on threads. Few tokens leave too few tiles for
all threads: then each piece is an item of its own, whose part waits in scratch until a second
kernel merges the parts, with the same arithmetic.
"""

from __future__ import annotations

from functools import cache

from numba import float32, int64

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import thread_count
from ..runtime.jit import Kernel, args, f32_bits, f32s, kernel, load_i64, next_chunk
from .attention_tile import (  # fmt: skip
    HEADS,
    KV_HEADS,
    MAX_SPLIT_TOKENS,
    NEVER,
    NEW_FACTOR,
    OLD_FACTOR,
    PADDED_WIDTH,
    ROW_MAX,
    ROW_SUM,
    ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    TOKENS,
    WORDS,
    count_tiles,
    finish_row,
    locate_tile,
    make_tile,
    merge,
    padded,
    partial_address,
    shape_of_tile,
    thread_scratch_bytes,
    totals_address,
    visible_keys,
)
from .attention_vectors import BLOCK_ROWS, SPLIT_KEYS, merge_rows
from .elementwise import thread_range

_SPLIT = 16  # tiles of one token below which pieces are items
_ENOUGH = 4  # items a thread


@cache
def _attend(k: str, v: str, height: int) -> Kernel:
    tile = make_tile(k, v, height)

    @kernel(key=(k, v, height))
    def attend(p, thread, threads):
        w = args(p, WORDS)
        own = w[SCRATCH] + thread * w[SCRATCH_BYTES]
        _, subs, per = shape_of_tile(p)
        groups, enough = w[KV_HEADS] * subs, _ENOUGH * threads
        count, most = count_tiles(p, per)
        if load_i64(w[TOKENS]) <= w[MAX_SPLIT_TOKENS]:
            # All heads of a piece, one after another, read its memory in order: if there is enough
            # to share out.
            inner = groups if count * most >= enough else int64(1)
            outer = count * groups // inner
            item = next_chunk(p)
            while item < outer * most:
                for i in range(inner):
                    tile(p, own, item // most * inner + i, per, item % most)
                item = next_chunk(p)
        else:
            while per > 1 and count * groups < enough:
                per = (per + 1) // 2
                count, most = count_tiles(p, per)
            item = next_chunk(p)
            while item < count * groups:
                # The last tiles of a prompt see the most keys: they come first.
                tile(p, own, count * groups - 1 - item, per, int64(-1))
                item = next_chunk(p)

    return attend


@kernel
def _merge_splits(p, thread, threads):
    """Merge the parts of each token and head, if the step had so few that pieces were items."""
    w = args(p, WORDS)
    tokens = load_i64(w[TOKENS])
    if tokens > w[MAX_SPLIT_TOKENS]:
        return
    own = w[SCRATCH] + thread * w[SCRATCH_BYTES]
    wide, total = w[PADDED_WIDTH], totals_address(p, own)
    tops, sums, a, b = (
        f32s(own + ROW_MAX),
        f32s(own + ROW_SUM),
        f32s(own + OLD_FACTOR),
        f32s(own + NEW_FACTOR),
    )
    first, last = thread_range(tokens * w[HEADS], thread, threads)
    for line in range(first, last):
        s, token, _ = locate_tile(p, line // w[HEADS], int64(1))
        if s < 0:
            continue
        low, high, _ = visible_keys(p, s, token)
        for i in range(wide):
            f32s(total)[i] = float32(0)
        tops[0], sums[0] = NEVER, float32(0)
        for piece in range(low // SPLIT_KEYS, (high + SPLIT_KEYS - 1) // SPLIT_KEYS):
            part = partial_address(p, token, line % w[HEADS], piece)
            ends = f32s(part)
            merged = merge(tops[0], sums[0], ends[wide], ends[wide + 1])
            tops[0], sums[0], a[0], b[0] = merged
            merge_rows((total, part, wide // 16, own + OLD_FACTOR, own + NEW_FACTOR))
        finish_row(p, own, 0, token, line % w[HEADS], -1)


# ---------------------------------------------------------------------------------------- builders


def _block_rows(shared: int) -> int:
    """Rows that a tile's block has: those that leave the fewest empty, and then the most."""
    return min(BLOCK_ROWS, key=lambda height: (-shared % height, -height))


def _split_tokens(heads: int, kv_heads: int) -> int:
    """Up to how many tokens a step has pieces as items."""
    return max(1, _SPLIT // (kv_heads * -(-heads // kv_heads // ROWS)))


def _max_splits(node: Tensor) -> int:
    return -(-int(node.src[5].meta.shape[1]) * node.attrs["block"] // SPLIT_KEYS)  # type: ignore[union-attr,arg-type]


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Heads, kv heads, depth of a query, width of a value."""
    q, _, v = node.sources[:3]
    return (*q.meta.inner, *v.meta.inner)  # type: ignore[return-value]


def scratch(node: Tensor, options: Options) -> int:
    """Bytes of workspace: every thread's memory, and the parts that wait to be merged."""
    heads, depth, kv_heads, width = _sizes(node)
    parts = _split_tokens(heads, kv_heads) * heads * _max_splits(node) * (padded(width) + 16) * 4
    return thread_count(options) * thread_scratch_bytes(depth, width) + parts


LAYOUT = dict.fromkeys(("q", "k", "v"), "rows")  # of a token, of a slot


@BACKEND.kernel("attention", layout=LAYOUT, scratch=scratch)
def attention(ctx: KernelContext) -> list[Launch]:
    return launches(ctx, ctx.out.address, ctx.scratch)


def launches(ctx: KernelContext, result: int, room: int) -> list[Launch]:
    """Attention over the step's operands: the result [T, H, D] f32 goes to address ``result``, and
    ``room`` is that of the workspace."""
    heads, depth, kv_heads, width = _sizes(ctx.node)
    attrs, own = ctx.attrs, thread_scratch_bytes(depth, width)
    q, k, v, table = ctx.q, ctx.k, ctx.v, ctx.table
    words = [q.address, q.row_stride, k.address, k.row_stride, v.address, v.row_stride]
    words += [k.dtype.row_nbytes(depth), v.dtype.row_nbytes(width)]
    words += [ctx.q_start.address, ctx.kv_len.address, table.address, table.meta.shape[1]]
    words += [ctx.address(name) for name in ("sinks", "slopes", "prefix_len")]
    words += [result, ctx.live(q.meta.rows), ctx.live(ctx.kv_len.meta.rows)]
    words += [heads, kv_heads, depth, width, padded(depth), padded(width)]
    words += [f32_bits(attrs["scale"]), f32_bits(attrs["softcap"])]
    words += [attrs["block"], int(attrs["causal"]), attrs["window"], room, own]
    words += [room + ctx.threads * own, _split_tokens(heads, kv_heads)]
    words.append(_max_splits(ctx.node))
    attend = _attend(k.dtype.name, v.dtype.name, _block_rows(heads // kv_heads))
    return [Launch(attend, words), Launch(_merge_splits, words)]
