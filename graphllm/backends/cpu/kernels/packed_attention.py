"""Bidirectional attention over packed sequences, for many short ones.

A tile has the queries of up to `QUERY_VECTORS` vectors of consecutive tokens, a lane for each, and
all heads in turn; heads are work items of their own where there are few tiles. It goes through the
keys of its sequence in splits, which begin at multiples of `_SPLIT_KEYS`, with an online softmax
(Milakov & Gimelshein 2018). So the result for a token depends on its sequence alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from .... import ops
from ....graph.dtype import F32
from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import isa
from ..runtime.jit import Kernel, as_f32, f32_bits, f32s, helper, i32s, kernel, load_i64, next_chunk
from ..runtime.lazy_numba import float32, int64
from ..simd.emitter import LANES, VECTOR
from .attention_tile import MINUS_INF, locate_tile, tile_count

QUERY_VECTORS = 2 if isa().avx512 else 1  # of a tile
_SPLIT_KEYS = 128  # whose weights fit the L1 cache beside the keys or the values
_PADDED_KEYS = _SPLIT_KEYS + 8  # the last tile of keys is whole
_ITEMS_PER_THREAD = 4
_QUERIES = QUERY_VECTORS * LANES  # most queries of a tile
# Byte offsets in a thread's scratch: maxima, sums and factors of the softmax, weights, queries.
_TOP, _TOTAL, _OLD = (4 * _QUERIES * i for i in range(3))
_WEIGHTS = 4 * _QUERIES * 3
_COLUMNS = _WEIGHTS + 4 * _QUERIES * _PADDED_KEYS


class PackedArgs(NamedTuple):
    """Argument block of packed attention. Strides are in bytes."""

    q: int
    q_stride: int
    k: int
    k_stride: int
    v: int
    v_stride: int
    q_start: int
    starts: int  # address of the live count of entries of q_start: sequences + 1
    out: int
    heads: int
    kv_heads: int
    depth: int  # elements of a query and of a key
    width: int  # elements of a value
    row_bytes: int  # of a result in scratch: whole vectors
    scale_bits: int  # of a float32
    scratch: int
    thread_scratch: int  # bytes of it for each thread
    position_bias: int  # 0: none
    reach: int  # of the bias: largest distance that it tells from larger ones
    window: int  # largest distance of a visible key; 0: any


_read = argument_reader(PackedArgs)


@helper
def _load_rest(p, local, q, count, lanes):
    """Transpose the columns of the queries that are no whole vector; see `load_queries`."""
    a = _read(p)
    for column in range(a.depth // LANES * LANES, a.depth):
        target = f32s(local + _COLUMNS + 4 * column * lanes)
        for lane in range(lanes):
            row = f32s(q + min(lane, count - 1) * a.q_stride)
            target[lane] = row[column] * as_f32(a.scale_bits)


@helper
def _reset(p, local, result, lanes):
    """Empty the softmax and the results of a tile."""
    for lane in range(lanes):
        f32s(local + _TOP)[lane], f32s(local + _TOTAL)[lane] = MINUS_INF, float32(0)
    totals = f32s(result)
    for i in range(lanes * (_read(p).row_bytes // 4)):
        totals[i] = float32(0)


@helper
def _adjust_scores(p, local, head, query, key, count, lanes):
    """Add the bias to the scores of keys from position ``key`` on, and hide those out of reach.

    ``query``: position of the first query.
    """
    a = _read(p)
    for j in range(count):
        scores = f32s(local + _WEIGHTS + 4 * j * lanes)
        if a.position_bias != 0:
            bias = f32s(a.position_bias + 4 * head * (2 * a.reach + 1))
            for lane in range(lanes):
                distance = key + j - query - lane
                scores[lane] += bias[a.reach + max(-a.reach, min(a.reach, distance))]
        if a.window != 0:
            for lane in range(lanes):
                if abs(key + j - query - lane) > a.window:
                    scores[lane] = MINUS_INF


@helper
def _finish(p, local, result, head, token, count):
    """Write the results of ``count`` queries from ``token`` on."""
    a = _read(p)
    for i in range(count):
        source = f32s(result + i * a.row_bytes)
        out = f32s(a.out + 4 * ((token + i) * a.heads + head) * a.width)
        factor = float32(1) / f32s(local + _TOTAL)[i]
        for c in range(a.width):
            out[c] = source[c] * factor


def _make_tile(vectors: int) -> Any:
    """Make the helper that computes one head of a tile of ``vectors`` of queries."""
    from ..simd import packed_attention as vector  # for encoders alone

    load, scores = vector.load_queries(vectors), vector.scores(vectors)
    softmax, add_values = vector.softmax(vectors), vector.add_values(vectors)
    result_rows = vector.RESULT_ROWS
    lanes = vectors * LANES

    @helper
    def tile(p, local, start, end, first, count, head):
        """``start``, ``end``: rows of the sequence; ``first``, ``count``: queries of the tile."""
        a = _read(p)
        group = head // (a.heads // a.kv_heads)
        q = a.q + first * a.q_stride + 4 * head * a.depth
        columns, weights = local + _COLUMNS, local + _WEIGHTS
        result = columns + 4 * lanes * a.depth
        blocks = (count + result_rows - 1) // result_rows
        load((q, a.q_stride, count, a.depth // LANES, a.scale_bits, columns))
        _load_rest(p, local, q, count, lanes)
        _reset(p, local, result, lanes)
        low, high = int64(0), end - start
        if a.window != 0:
            low = max(low, first - start - a.window) // _SPLIT_KEYS * _SPLIT_KEYS
            high = min(high, first - start + count + a.window)
        for key in range(low, high, _SPLIT_KEYS):
            size, row = min(high - key, _SPLIT_KEYS), start + key
            keys = a.k + row * a.k_stride + 4 * group * a.depth
            values = a.v + row * a.v_stride + 4 * group * a.width
            scores((columns, a.depth, keys, a.k_stride, size, weights))
            if a.position_bias != 0 or a.window != 0:
                _adjust_scores(p, local, head, first - start, key, size, lanes)
            softmax((weights, size, local + _TOP, local + _TOTAL, local + _OLD))
            units, rest = a.width // LANES, a.width % LANES
            add_values((
                weights, blocks, values, a.v_stride, size, units, rest, result, a.row_bytes,
                local + _OLD,
            ))  # fmt: skip
        _finish(p, local, result, head, first, count)

    return tile


@cache
def _attend() -> Kernel:
    tile, narrow, wide = _make_tile(QUERY_VECTORS), _make_tile(1), QUERY_VECTORS > 1

    @kernel(key=())
    def packed_attention(p, thread, threads):
        a = _read(p)
        local = a.scratch + thread * a.thread_scratch
        sequences, per = load_i64(a.starts) - 1, int64(_QUERIES)
        tiles, parts = tile_count(a.q_start, sequences, per), int64(1)
        while parts < a.heads and tiles * parts < _ITEMS_PER_THREAD * threads:
            parts += 1
        item = next_chunk(p)
        while item < tiles * parts:
            s, first, last = locate_tile(a.q_start, sequences, item // parts, per)
            start, end = int64(i32s(a.q_start)[s]), int64(i32s(a.q_start)[s + 1])
            part, count = item % parts, last - first
            for head in range(part * a.heads // parts, (part + 1) * a.heads // parts):
                if wide and count <= LANES:
                    narrow(p, local, start, end, first, count, head)
                else:
                    tile(p, local, start, end, first, count, head)
            item = next_chunk(p)

    return packed_attention


# ------------------------------------------------------------------------------------ registration


def _sizes(node: Tensor) -> tuple[int, int, int, int]:
    """Return heads, depth of a query, kv heads and width of a value."""
    q, _, v = node.sources[:3]
    return (*q.meta.inner, *v.meta.inner)  # type: ignore[return-value]


def _row_bytes(width: int) -> int:
    return -(-width // LANES) * VECTOR


def _thread_scratch(node: Tensor) -> int:
    _, depth, _, width = _sizes(node)
    return _COLUMNS + _QUERIES * (4 * depth + _row_bytes(width))


def _upcast(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """Queries, keys and values in float32."""
    rows, rest = node.sources[:3], node.src[3:]
    return (*(x if x.dtype == F32 else ops.cast(x, dtype=F32.name) for x in rows), *rest)


@BACKEND.kernel(
    "packed_attention",
    layout=dict.fromkeys(("q", "k", "v"), "rows"),
    scratch=lambda node, options: thread_count(options) * _thread_scratch(node),
    lower=_upcast,
)
def packed_attention(ctx: KernelContext) -> Launch:
    heads, depth, kv_heads, width = _sizes(ctx.node)
    bias = ctx.op("position_bias")
    block = PackedArgs(
        q=ctx.q.address,
        q_stride=ctx.q.row_stride,
        k=ctx.k.address,
        k_stride=ctx.k.row_stride,
        v=ctx.v.address,
        v_stride=ctx.v.row_stride,
        q_start=ctx.q_start.address,
        starts=ctx.live(ctx.q_start.meta.rows),
        out=ctx.out.address,
        heads=heads,
        kv_heads=kv_heads,
        depth=depth,
        width=width,
        row_bytes=_row_bytes(width),
        scale_bits=f32_bits(ctx.attrs["scale"]),
        scratch=ctx.scratch,
        thread_scratch=_thread_scratch(ctx.node),
        position_bias=ctx.address("position_bias"),
        reach=0 if bias is None else bias.meta.inner[0] // 2,
        window=ctx.attrs["window"],
    )
    return Launch(_attend(), block)
