"""Code emitters of the microkernels of row formats; see `linear_microkernels`.

int8 weights are multiplied as they are packed, by int8 activations: int32 sums over whole rows,
which `finish` scales once. e4m3 weights are upcast to float32, and so are all row formats if the
activations are float32.
"""

from __future__ import annotations

from ..formats import by_code
from ..formats.row_formats import STEP, upcast_e4m3
from ..simd import amx
from ..simd.amx import TILE_BYTES, TILE_ROWS, TileShape
from ..simd.emitter import F32S, I8S, I32, I64, LANES, VECTOR, Emitter, Value
from .linear_integer import stored_words, token_rows, word_dots
from .linear_one_token import dot_words

_AHEAD = 4096  # distance in bytes at which tiles prefetch weights
_ONES = 0x00010001  # a pair of int16
_CHAINS = 4  # independent sums of a row, so that a dot need not wait for the one before it


# ----------------------------------------------------------------------------------- int8 products


def tile(
    e: Emitter, code: int, groups: int, tokens: int, left: Value, panel: Value, blocks: Value,
    q: Value, offsets: Value, c: Value,
) -> None:  # fmt: skip
    """c, int32, += packed blocks of groups, whose addresses are at ``panel``, times activations."""
    f, rows = by_code(code), token_rows(e, tokens, left, offsets)
    panels = [e.load(panel, I64, 8 * g) for g in range(groups)]
    totals = [e.variable(e.load(c, offset=VECTOR * i)) for i in range(tokens * groups)]
    with e.loop(blocks) as loop, e.prefetching(e.count(_AHEAD)):
        at = [e.at(each, e.times(loop.index, f.nbytes)) for each in panels]
        xs = [e.at(q, e.times(loop.index, f.block), row) for row in rows]
        begin = [[e.get(total) for total in totals[t * groups :][:groups]] for t in range(tokens)]
        words = stored_words(e, at, f.block // 4)
        found = word_dots(e, f, words, f.block // 4, xs, begin, [e.i32(_ONES)] * groups)
        for i, total in enumerate(totals):
            e.set(total, found[i // groups][i % groups])
    for i, total in enumerate(totals):
        e.store(e.get(total), c, VECTOR * i)


def fused(e: Emitter, code: int, w: Value, blocks: Value, x: Value, c: Value) -> None:
    """c, int32, += packed blocks of a group times one token's activations."""
    f = by_code(code)
    totals = [e.variable(e.i32(0)) for _ in range(_CHAINS)]
    with e.loop(blocks) as loop, e.prefetching():
        at, q = e.at(w, e.times(loop.index, f.nbytes)), e.at(x, e.times(loop.index, f.block))
        dot_words(e, f, at, q, totals)
    total = e.load(c)
    for each in totals:
        total = e.b.add(total, e.get(each))
    e.store(total, c)


def finish(
    e: Emitter, code: int, groups: int, scales: Value, x: Value, k: Value, rows: Value,
    count: Value, c: Value, token_bytes: Value, group_bytes: Value,
) -> None:  # fmt: skip
    """Replace int32 sums at ``c`` by results: float32(sum) * (scale of the row * of the token).

    ``scales``: address of the addresses of the groups' scales.
    """
    f = by_code(code)
    factors = [e.load(e.load(scales, I64, 8 * g), F32S) for g in range(groups)]
    with e.loop(count) as loop:
        token = e.at(x, e.load(e.at(rows, e.times(loop.index, 8)), I64), k)
        d, zero = e.broadcast_f32(token), f.zero_point(e)
        more = e.splat(e.b.mul(e.load(token, I32, 4), I32(zero))) if zero else e.i32(0)
        for g, factor in enumerate(factors):
            at = e.at(c, e.b.mul(loop.index, token_bytes), e.b.mul(group_bytes, e.count(g)))
            total = e.to_f32(e.b.sub(e.load(at), more))
            e.store(e.mul(total, e.mul(factor, d)), at)


# ------------------------------------------------------------------------------------ AMX products

AMX_COLUMNS = 512  # columns of a chunk
AMX_TILES = AMX_COLUMNS // STEP * TILE_BYTES  # bytes of 16 tokens' activations
_C, _A, _B = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


def configure(e: Emitter) -> None:
    amx.configure(e, [TileShape(TILE_ROWS, VECTOR)] * 8)


def gather(e: Emitter, x: Value, steps: Value, rows: Value, count: Value, tiles: Value) -> None:
    """Copy steps of 64 columns of ``count`` rows of activations to tiles of 16 tokens."""
    with e.loop(count) as loop:
        source = e.at(x, e.load(e.at(rows, e.times(loop.index, 8)), I64))
        tile = e.b.sdiv(loop.index, e.count(TILE_ROWS))
        row = e.b.sub(loop.index, e.times(tile, TILE_ROWS))
        to = e.at(tiles, e.times(tile, AMX_TILES), e.times(row, VECTOR))
        with e.loop(steps) as step:
            value = e.load(e.at(source, e.times(step.index, VECTOR)))
            e.store(value, e.at(to, e.times(step.index, TILE_BYTES)))


def tiles(
    e: Emitter, first: Value, second: Value, steps: Value, activations: Value, count: Value,
    c: Value, group_bytes: Value, ahead: Value, ahead_step: Value,
) -> None:  # fmt: skip
    """c, int32, += packed columns of two groups times the activations of ``count`` tokens.

    Meanwhile, prefetch the chunks at ``ahead`` and ``ahead_step`` bytes after it.
    """
    token_tiles = e.b.sdiv(e.b.add(count, e.count(TILE_ROWS - 1)), e.count(TILE_ROWS))
    pairs = e.b.ashr(token_tiles, e.count(1))
    lines = e.b.sdiv(e.times(steps, TILE_BYTES // VECTOR), e.b.add(pairs, e.count(1)))

    def products(index: Value, both: int) -> None:
        a = e.at(activations, e.times(index, AMX_TILES))
        at = e.at(c, e.times(index, TILE_BYTES))
        places = [
            (i, g, e.at(at, TILE_BYTES * i, e.b.mul(group_bytes, e.count(g))))
            for i in range(both)
            for g in range(2)
        ]
        for i, g, place in places:
            amx.load(e, _C[2 * i + g], place)
        with e.loop(steps) as loop:
            moved = e.times(loop.index, TILE_BYTES)
            for i in range(both):
                amx.load(e, _A[i], e.at(a, moved, AMX_TILES * i))
            for g, panel in enumerate((first, second)):
                amx.load(e, _B[g], e.at(panel, moved))
                for i in range(both):
                    amx.dot(e, _C[2 * i + g], _A[i], _B[g], True)
        for i, g, place in places:
            amx.store(e, _C[2 * i + g], place)

    with e.loop(pairs) as loop:
        start = e.at(ahead, e.times(e.b.mul(loop.index, lines), VECTOR))
        with e.loop(lines) as line:
            for place in (start, e.at(start, ahead_step)):
                e.prefetch(e.at(place, e.times(line.index, VECTOR)), level=2)
        products(e.times(loop.index, 2), 2)
    done = e.times(pairs, 2)
    with e.b.if_then(e.b.icmp_signed("<", done, token_tiles)):
        products(done, 1)


# ---------------------------------------------------------------------------------- float products


def unpack(e: Emitter, code: int, w: Value, scales: Value, panel: Value, blocks: Value) -> None:
    """Upcast packed blocks of a group to f32 [k][16], times the 16 scales."""
    f = by_code(code)
    d = e.mul(e.load(scales, F32S), e.f32(f.unit))
    with e.loop(blocks) as loop:
        source = e.at(w, e.times(loop.index, f.nbytes))
        target = e.at(panel, e.times(loop.index, f.block * VECTOR))
        for k, value in f.values(e, source):
            e.store(e.mul(value, d), target, VECTOR * k)


def fused_float(
    e: Emitter, code: int, w: Value, scales: Value, blocks: Value, x: Value, c: Value
) -> None:
    """c += packed blocks of a group times one token's float activations."""
    f = by_code(code)
    d = e.mul(e.load(scales, F32S), e.f32(f.unit))
    acc = e.variable(e.f32(0.0))
    with e.loop(blocks) as loop, e.prefetching():
        source, row = e.at(w, e.times(loop.index, f.nbytes)), e.at(x, e.times(loop.index, 128))
        for k, value in f.values(e, source):
            one = e.broadcast_f32(row, 4 * k)
            e.set(acc, e.madd(e.mul(value, d), one, e.get(acc)))
    e.store(e.add(e.load(c, F32S), e.get(acc)), c)


def upcast_activations(e: Emitter, q: Value, d: Value, to: Value, columns: Value) -> None:
    """Upcast e4m3 activations at ``q`` to float32, times the scale at ``d``."""
    factor = e.mul(e.broadcast_f32(d), e.f32(256.0))
    with e.loop(e.b.sdiv(columns, e.count(LANES))) as loop:
        value = upcast_e4m3(e, e.load(e.at(q, e.times(loop.index, LANES)), I8S))
        e.store(e.mul(value, factor), e.at(to, e.times(loop.index, VECTOR)))
