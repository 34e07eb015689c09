"""Code emitters of integer products of many tokens with AVX2; see `kernels.linear_microkernels`.

The activations of a chunk of columns are gathered once for several groups of weight rows, in the
form in which their products take the fewest instructions:

- Signed weights are multiplied in int16, by a widening product and an addition for two columns. A
  sign, a product of bytes, a widening product and an addition for four columns are as many
  instructions, but three of them need the two ports that multiply.
- Dots of a sub-block with a zero point start at minus the zero point times sums of activations in
  pairs. The sum of a whole sub-block then fits int16, and is widened and scaled once.

A token's record has its activations, then its scales, sums and starts (`_SCALES` and following).
"""

from __future__ import annotations

from ..formats import Block32, Block256, by_code
from ..kernels import linear_integer
from ..kernels.linear_blocks import pair_sums
from ..kernels.linear_integer import BLOCK32_PANEL, CHUNK, K_WORDS
from ..runtime.lazy_numba import ir
from .emitter import F32, F32S, I16, I32, I64, LANES, VECTOR, Emitter, Value
from .vectors import vector

TILE_TOKENS = 4  # of a tile
MOST_TOKENS = 128  # most tokens of a pass: their records stay in the L2 cache
_BLOCKS = CHUNK // 32
# In a record after the activations, by block of 32 or by super-block.
_SCALES, _SUMS, _STARTS, _META = 0, 32, 64, 128
_WIDE_BLOCK = BLOCK32_PANEL + 8 * VECTOR  # of the panel of signed weights
PANEL_BYTES = _BLOCKS * _WIDE_BLOCK  # bytes of the largest panel


def _activation_bytes(f: Block32 | Block256, e: Emitter) -> int:
    """Bytes of an activation in a record."""
    return 2 if f.signed(e.isa) else 1


def _record_bytes(f: Block32 | Block256, e: Emitter) -> int:
    return CHUNK * _activation_bytes(f, e) + _META


RECORD_BYTES = 2 * CHUNK + _META  # of the largest record


def _is_centred(f: Block32 | Block256, e: Emitter) -> bool:
    """Whether dots of sub-blocks start at minus the zero point times sums of activations."""
    return isinstance(f, Block256) and not f.minima and f.has_offsets(e)


# ----------------------------------------------------------------------------------- activations


def gather(
    e: Emitter, code: int, x: Value, k: Value, at: Value, blocks: Value, rows: Value,
    count: Value, records: Value,
) -> None:  # fmt: skip
    """Gather ``blocks`` blocks from column ``at`` on of ``count`` rows of ``k`` activations, at the
    offsets ``rows``, into records; whole tiles, so the last token may be repeated."""
    f = by_code(code)
    first, meta = e.b.sdiv(at, e.count(f.block)), CHUNK * _activation_bytes(f, e)
    scales = e.at(k, e.times(first, 4))
    sums = e.at(k, e.times(e.b.sdiv(k, e.count(f.block)), 4))
    sums = e.at(sums, e.times(first, 4 if f.block == 32 else 32))
    last = e.b.sub(count, e.count(1))
    with e.loop(e.times(_tiles(e, count), TILE_TOKENS)) as loop:
        token = e.b.select(e.b.icmp_signed("<", loop.index, last), loop.index, last)
        row = e.at(x, e.load(e.at(rows, e.times(token, 8)), I64))
        to = e.at(records, e.times(loop.index, _record_bytes(f, e)))
        q, d, s = (e.at(row, offset) for offset in (at, scales, sums))
        with e.loop(_BLOCKS if f.block == CHUNK else blocks) as each:
            _gather_values(e, f, q, to, each.index)
            if f.block == 32:
                _gather_block(e, f, d, s, e.at(to, meta), each.index)
        if isinstance(f, Block256):
            e.store(e.load(d, F32), to, meta + _SCALES)
            if f.minima:
                e.store(pair_sums(e, f, s), to, meta + _SUMS)
            if _is_centred(f, e):
                _gather_starts(e, f, q, e.at(to, meta + _STARTS))


def _tiles(e: Emitter, count: Value) -> Value:
    return e.b.sdiv(e.b.add(count, e.count(TILE_TOKENS - 1)), e.count(TILE_TOKENS))


def _gather_values(e: Emitter, f: Block32 | Block256, q: Value, to: Value, block: Value) -> None:
    """Copy 32 activations; as int16, those of even columns come first."""
    at, words = e.times(block, 32), vector(I16, 16)
    values = e.load(e.at(q, at), words)
    if not f.signed(e.isa):
        return e.store(values, e.at(to, at))
    eight = ir.Constant(words, [8] * words.count)
    for odd, moved in enumerate((e.b.shl(values, eight), values)):
        e.store(e.b.ashr(moved, eight), e.at(to, e.times(at, 2)), 32 * odd)


def _gather_block(e: Emitter, f: Block32, d: Value, s: Value, meta: Value, block: Value) -> None:
    """Copy the scale of a block of 32, and derive what its sum is needed for."""
    four = e.times(block, 4)
    scale, total, place = e.load(e.at(d, four), F32), e.load(e.at(s, four), I32), e.at(meta, four)
    e.store(scale, place, _SCALES)
    if f.has_minimum:
        e.store(e.mul(e.b.sitofp(total, F32), scale), place, _SUMS)
    if zero := f.zero_point(e):
        e.store(e.b.mul(total, I32(-zero)), place, _STARTS)


def _gather_starts(e: Emitter, f: Block256, q: Value, starts: Value) -> None:
    """Starts of the dots of a super-block: of the columns of each sub-block whose products are
    added in the low and in the high int16 of a lane, minus the zero point times the sum."""
    assert f.sub == 16, "the products of four words are added to a start"
    with e.loop(CHUNK // VECTOR) as loop:
        values = e.load(e.at(q, e.times(loop.index, VECTOR)))
        sums = e.multiply_bytes(e.i32(0x01010101 * f.offset), values, False)
        for apart in (1, 2):  # after that each of four lanes has their sum
            others = [lane ^ apart for lane in range(LANES)]
            sums = e.add_i16(sums, e.select_lanes(sums, others))
        first = ir.Constant(vector(I32, 4), [0, 4, 8, 12])
        found = e.negative_i16(sums)
        e.store(e.b.shuffle_vector(found, found, first), e.at(starts, e.times(loop.index, 16)))


# --------------------------------------------------------------------------------------- weights


def unpack(e: Emitter, code: int, w: Value, panel: Value, blocks: Value) -> None:
    """Unpack blocks of a group, at most `CHUNK` columns, to its panel."""
    f = by_code(code)
    if not f.signed(e.isa):
        return linear_integer.unpack(e, code, w, panel, blocks)
    if isinstance(f, Block256):
        return _unpack_scaled(e, f, w, panel)
    with e.loop(blocks) as loop:
        source = e.at(w, e.times(loop.index, f.nbytes))
        target = e.at(panel, e.times(loop.index, _WIDE_BLOCK))
        for j, word in f.words(e, source):
            for odd, values in enumerate(e.split_bytes(word)):
                e.store(values, target, VECTOR * (2 * j + odd))
        for j, factor in enumerate(f.factors(e, source), 16):
            e.store(factor, target, VECTOR * j)


def _unpack_scaled(e: Emitter, f: Block256, w: Value, panel: Value) -> None:
    """Multiply the weights of a super-block by the scales of its sub-blocks: six and eight bits."""
    scales = e.stack_buffer(VECTOR * (CHUNK // f.sub))
    for k in range(CHUNK // f.sub):
        four = f.scale_bytes(e, w, k // 4)
        e.store(e.byte_pairs(four, f.place(k), f.signed_scales), scales, VECTOR * k)
    per = f.chunk // f.sub
    with e.loop(f.block // f.chunk) as loop:
        source = e.at(w, f.words_at, e.times(loop.index, f.chunk_nbytes))
        target = e.at(panel, e.times(loop.index, f.chunk // 2 * VECTOR))
        at = e.at(scales, e.times(loop.index, per * VECTOR))
        for j, word in f.words(e, source):
            scale = e.load(at, offset=4 * j // f.sub * VECTOR)
            for odd, values in enumerate(e.split_bytes(word)):
                e.store(e.multiply_i16(values, scale), target, VECTOR * (2 * j + odd))
    for j, factor in enumerate(f.factors(e, w)):
        e.store(factor, panel, 2 * K_WORDS + VECTOR * j)


# -------------------------------------------------------------------------------------- products


def tiles(
    e: Emitter, code: int, panel: Value, blocks: Value, records: Value, count: Value, c: Value,
    ahead: Value,
) -> None:  # fmt: skip
    """Add the products of the panel of a group with ``count`` tokens to results at ``c``.

    Meanwhile, prefetch the chunk of columns at ``ahead``.
    """
    f, number = by_code(code), _tiles(e, count)
    size, lines = _record_bytes(f, e), CHUNK // f.block * f.nbytes // VECTOR
    each = e.b.sdiv(e.b.add(number, e.count(lines - 1)), number)
    with e.loop(number) as loop:
        e.prefetch_lines([ahead], loop.index, each, level=1)
        first = e.at(records, e.times(loop.index, TILE_TOKENS * size))
        rows = [e.at(first, size * t) for t in range(TILE_TOKENS)]
        to = e.at(c, e.times(loop.index, TILE_TOKENS * VECTOR))
        if isinstance(f, Block256):
            _tile_k(e, f, panel, rows, to)
        else:
            _tile_32(e, f, panel, blocks, rows, to)


def _add_dots(
    e: Emitter, f: Block32 | Block256, panel: Value, rows: list[Value], count: int, scale: Value,
    totals: Value, starts: list[Value] | None = None,
) -> None:  # fmt: skip
    """Add the dots of ``count`` vectors of bytes, times a pair of scales, to int32 at ``totals``.

    ``starts``: what the dots start at, in pairs; then the dot of all vectors fits int16.
    """
    terms = count if starts else e.i16_terms(f.largest, False)
    for first in range(0, count, terms):
        sums: list[Value | None] = [*starts] if starts else [None] * len(rows)
        for j in range(first, min(count, first + terms)):
            w = e.load(panel, offset=VECTOR * j)
            for t, (row, old) in enumerate(zip(rows, sums)):
                product = e.multiply_bytes(w, e.broadcast_i32(row, 4 * j), False)
                sums[t] = product if old is None else e.keep(e.add_i16(old, product))
        for t, found in enumerate(sums):
            total = e.dot_i16(found, scale, e.load(totals, offset=VECTOR * t))
            e.store(total, totals, VECTOR * t)


def _dots_i16(e: Emitter, panel: Value, rows: list[Value], totals: list[Value]) -> list[Value]:
    """``totals`` plus the products of 32 columns in int16."""
    for j in range(16):
        w, at = e.load(panel, offset=VECTOR * j), 4 * (j // 2) + 32 * (j % 2)
        totals = [
            e.keep(e.dot_i16(w, e.broadcast_i32(row, at), total))
            for row, total in zip(rows, totals)
        ]
    return totals


def _tile_32(
    e: Emitter, f: Block32, panel: Value, blocks: Value, rows: list[Value], c: Value
) -> None:
    signed, zero, size = f.signed(e.isa), f.zero_point(e), _activation_bytes(f, e)
    vectors, totals = 16 if signed else 8, e.stack_buffer(VECTOR * len(rows))
    with e.loop(blocks) as loop:
        at = e.at(panel, e.times(loop.index, _WIDE_BLOCK if signed else BLOCK32_PANEL))
        xs = [e.at(row, e.times(loop.index, 32 * size)) for row in rows]
        metas = [e.at(row, CHUNK * size, e.times(loop.index, 4)) for row in rows]
        dots = [e.i32(0)] * len(rows)
        if signed:
            dots = _dots_i16(e, at, xs, dots)
        else:
            for t, meta in enumerate(metas):
                begin = e.broadcast_i32(meta, _STARTS) if zero else e.i32(0)
                e.store(begin, totals, VECTOR * t)
            _add_dots(e, f, at, xs, 8, e.i32(0x00010001), totals)
        factors = [e.load(at, F32S, VECTOR * (vectors + j)) for j in range(1 + f.has_minimum)]
        for t, meta in enumerate(metas):
            dot = dots[t] if signed else e.load(totals, offset=VECTOR * t)
            value = e.mul(e.to_f32(dot), e.mul(factors[0], e.broadcast_f32(meta, _SCALES)))
            value = e.add(e.load(c, F32S, VECTOR * t), value)
            if f.has_minimum:
                value = e.add(value, e.mul(factors[1], e.broadcast_f32(meta, _SUMS)))
            e.store(value, c, VECTOR * t)


def _tile_k(e: Emitter, f: Block256, panel: Value, rows: list[Value], c: Value) -> None:
    size, totals = _activation_bytes(f, e), e.stack_buffer(VECTOR * len(rows))
    metas = [e.at(row, CHUNK * size) for row in rows]
    for t in range(len(rows)):
        e.store(e.i32(0), totals, VECTOR * t)
    with e.loop(_BLOCKS) as loop:
        moved = e.times(loop.index, 32 * size)
        at, xs = e.at(panel, e.times(moved, VECTOR // 4)), [e.at(row, moved) for row in rows]
        if f.signed(e.isa):
            old = [e.load(totals, offset=VECTOR * t) for t in range(len(rows))]
            for t, total in enumerate(_dots_i16(e, at, xs, old)):
                e.store(total, totals, VECTOR * t)
        else:
            _add_scaled_dots(e, f, panel, at, xs, metas, loop.index, totals)
    found = [e.load(totals, offset=VECTOR * t) for t in range(len(rows))]
    _finish_k(e, f, panel, found, metas, c)


def _add_scaled_dots(
    e: Emitter, f: Block256, panel: Value, at: Value, xs: list[Value], metas: list[Value],
    block: Value, totals: Value,
) -> None:  # fmt: skip
    """Add the scaled dots of 32 columns, whose words are at ``at``, to ``totals``."""
    subs, starts = 32 // f.sub, None
    for sub in range(subs):
        index = e.b.add(e.times(block, subs), e.count(sub))
        scale = e.load(e.at(panel, e.times(index, VECTOR)), offset=K_WORDS)
        if _is_centred(f, e):
            places = (e.at(meta, e.times(index, 4)) for meta in metas)
            starts = [e.broadcast_i32(place, _STARTS) for place in places]
        words, own = e.at(at, f.sub // 4 * sub * VECTOR), [e.at(x, f.sub * sub) for x in xs]
        _add_dots(e, f, words, own, f.sub // 4, scale, totals, starts)


def _finish_k(
    e: Emitter, f: Block256, panel: Value, totals: list[Value], metas: list[Value], c: Value
) -> None:
    """Add the contribution of a super-block to the results of a tile."""
    at = e.at(panel, 2 * K_WORDS)
    pairs: list[Value] = []
    if not f.signed(e.isa):
        at, each = e.at(panel, K_WORDS + VECTOR * (CHUNK // f.sub)), 128 // f.sub
        pairs = [e.load(at, offset=VECTOR * j) for j in range(each * f.minima)]
        at = e.at(at, VECTOR * each * f.has_offsets(e))
    factors = [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]
    for t, (total, meta) in enumerate(zip(totals, metas)):
        offset = None
        for j, pair in enumerate(pairs):
            offset = e.dot_i16(pair, e.broadcast_i32(meta, _SUMS + 4 * j), offset)
        value = e.mul(f.join(e, total, offset, factors), e.broadcast_f32(meta, _SCALES))
        e.store(e.add(e.load(c, F32S, VECTOR * t), value), c, VECTOR * t)


__all__ = ["MOST_TOKENS", "PANEL_BYTES", "RECORD_BYTES", "TILE_TOKENS", "gather", "tiles", "unpack"]
