"""Attention over the paged cache.

A tile has up to ROWS rows: the query heads that share a kv head, of as many consecutive tokens as
fit. It goes through the keys in splits that begin at multiples of SPLIT_KEYS of the sequence. Each
split has a softmax of its own, and splits are merged in order, so the result for a token does not
depend on the batch, on how a prompt was chunked, or on threads. Few tokens give too few tiles for
all threads: then each split is a work item, whose result is kept in scratch until a second kernel
merges the splits with the same arithmetic.
"""

from __future__ import annotations

from functools import cache

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import Kernel, f32_bits, f32s, kernel, load_i64, next_chunk
from ..runtime.lazy_numba import float32, int64
from .attention_arguments import (  # fmt: skip
    NEW_FACTOR,
    OLD_FACTOR,
    ROW_MAX,
    ROW_SUM,
    ROWS,
    AttentionArgs,
    padded,
    partial_address,
    read_attention,
    thread_scratch_bytes,
    totals_address,
)
from .attention_tile import (  # fmt: skip
    MINUS_INF,
    finish_row,
    locate_tile,
    make_tile,
    merge,
    most_splits,
    shape_of_tile,
    tile_count,
    visible_keys,
)
from .attention_vectors import BLOCK_ROWS, SPLIT_KEYS, merge_rows
from .elementwise import thread_range

_MIN_TILES = 16  # steps of fewer tiles are split
_ITEMS_PER_THREAD = 4  # work items per thread to aim for


@cache
def _attend(k: str, v: str, height: int) -> Kernel:
    tile = make_tile(k, v, height)

    @kernel(key=(k, v, height))
    def attend(p, thread, threads):
        a = read_attention(p)
        local = a.scratch + thread * a.thread_scratch
        _, subgroups, per = shape_of_tile(p)
        groups, enough = a.kv_heads * subgroups, _ITEMS_PER_THREAD * threads
        sequences, splits = load_i64(a.starts) - 1, most_splits(p)
        count = tile_count(a.q_start, sequences, per)
        if load_i64(a.tokens) <= a.max_split_tokens:
            # If there are enough work items, one item handles all heads of a split in order, which
            # reads memory sequentially.
            inner = groups if count * splits >= enough else int64(1)
            outer = count * groups // inner
            item = next_chunk(p)
            while item < outer * splits:
                for i in range(inner):
                    tile(p, local, item // splits * inner + i, per, item % splits)
                item = next_chunk(p)
        else:
            while per > 1 and count * groups < enough:
                per = (per + 1) // 2
                count = tile_count(a.q_start, sequences, per)
            item = next_chunk(p)
            while item < count * groups:
                # The last tiles of a prompt see the most keys, so they start first.
                tile(p, local, count * groups - 1 - item, per, int64(-1))
                item = next_chunk(p)

    return attend


@kernel
def _merge_splits(p, thread, threads):
    """Merge the splits of each token and head, if the step has so few tokens that it is split."""
    a = read_attention(p)
    tokens = load_i64(a.tokens)
    if tokens > a.max_split_tokens:
        return
    local = a.scratch + thread * a.thread_scratch
    width, total = a.padded_width, totals_address(p, local)
    tops, sums = f32s(local + ROW_MAX), f32s(local + ROW_SUM)
    old, new = f32s(local + OLD_FACTOR), f32s(local + NEW_FACTOR)
    first, last = thread_range(tokens * a.heads, thread, threads)
    for line in range(first, last):
        s, token, _ = locate_tile(a.q_start, load_i64(a.starts) - 1, line // a.heads, int64(1))
        if s < 0:
            continue
        low, high, _ = visible_keys(p, s, token)
        for i in range(width):
            f32s(total)[i] = float32(0)
        tops[0], sums[0] = MINUS_INF, float32(0)
        for split in range(low // SPLIT_KEYS, (high + SPLIT_KEYS - 1) // SPLIT_KEYS):
            part = partial_address(p, token, line % a.heads, split)
            ends = f32s(part)
            merged = merge(tops[0], sums[0], ends[width], ends[width + 1])
            tops[0], sums[0], old[0], new[0] = merged
            merge_rows((total, part, width // 16, local + OLD_FACTOR, local + NEW_FACTOR))
        finish_row(p, local, 0, token, line % a.heads, -1)


# ---------------------------------------------------------------------------------------- builders


def _block_rows(shared: int) -> int:
    """Block height that leaves the fewest rows empty; the largest of those."""
    return min(BLOCK_ROWS, key=lambda height: (-shared % height, -height))


def _max_split_tokens(heads: int, kv_heads: int) -> int:
    """Largest number of tokens of a step whose splits are work items."""
    return max(1, _MIN_TILES // (kv_heads * -(-heads // kv_heads // ROWS)))


def _table_splits(node: Tensor) -> int:
    """Most splits of a sequence whose keys a block table lists."""
    return -(-int(node.src[5].meta.shape[1]) * node.attrs["block"] // SPLIT_KEYS)  # type: ignore[union-attr,arg-type]


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Return heads, depth of a query, kv heads and width of a value."""
    q, _, v = node.sources[:3]
    return (*q.meta.inner, *v.meta.inner)  # type: ignore[return-value]


def scratch(node: Tensor, options: Options) -> int:
    """Bytes of the scratch of all threads, and of the results of splits."""
    heads, depth, kv_heads, width = _sizes(node)
    splits = _max_split_tokens(heads, kv_heads) * heads * _table_splits(node)
    parts = splits * (padded(width) + 16) * 4
    return thread_count(options) * thread_scratch_bytes(depth, width) + parts


LAYOUT = dict.fromkeys(("q", "k", "v"), "rows")  # rows of tokens, and of cache slots


@BACKEND.kernel("attention", layout=LAYOUT, scratch=scratch)
def attention(ctx: KernelContext) -> list[Launch]:
    return launches(ctx, ctx.out.address, ctx.scratch)


def launches(ctx: KernelContext, out: int, scratch: int) -> list[Launch]:
    """Launch attention over the operands of the step.

    Args:
        ctx: the step.
        out: address of the result, f32 [T, H, D].
        scratch: address of the workspace.
    """
    heads, depth, kv_heads, width = _sizes(ctx.node)
    q, k, v = ctx.q, ctx.k, ctx.v
    thread_scratch = thread_scratch_bytes(depth, width)
    bias = ctx.op("position_bias")
    block = AttentionArgs(
        q=q.address,
        q_stride=q.row_stride,
        k=k.address,
        k_stride=k.row_stride,
        v=v.address,
        v_stride=v.row_stride,
        k_head_stride=k.dtype.row_nbytes(depth),
        v_head_stride=v.dtype.row_nbytes(width),
        q_start=ctx.q_start.address,
        out=out,
        tokens=ctx.live(q.meta.rows),
        starts=ctx.live(ctx.q_start.meta.rows),
        heads=heads,
        kv_heads=kv_heads,
        depth=depth,
        width=width,
        padded_depth=padded(depth),
        padded_width=padded(width),
        scale_bits=f32_bits(ctx.attrs["scale"]),
        scratch=scratch,
        thread_scratch=thread_scratch,
        partials=scratch + ctx.threads * thread_scratch,
        max_split_tokens=_max_split_tokens(heads, kv_heads),
        splits=_table_splits(ctx.node),
        kv_len=ctx.kv_len.address,
        table=ctx.table.address,
        table_width=ctx.table.meta.shape[1],
        block=ctx.attrs["block"],
        causal=int(ctx.attrs["causal"]),
        window=ctx.attrs["window"],
        softcap=ctx.attrs["softcap"],
        sinks=ctx.address("sinks"),
        slopes=ctx.address("slopes"),
        prefix_len=ctx.address("prefix_len"),
        skip_prefix=int(ctx.attrs["skip_prefix"]),
        position_bias=ctx.address("position_bias"),
        bias_reach=0 if bias is None else bias.meta.inner[0] // 2,
    )
    attend = _attend(k.dtype.name, v.dtype.name, _block_rows(heads // kv_heads))
    return [Launch(attend, block), Launch(_merge_splits, block)]
