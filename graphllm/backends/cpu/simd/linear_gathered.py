"""Code emitters of integer products of many tokens with AVX2; see `kernels.linear_microkernels`.

The activations of a chunk of columns are gathered once for several groups of weight rows: see
`activation_records`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..formats import Block32, Block256, by_code
from ..kernels import linear_integer
from ..kernels.linear_integer import BLOCK32_PANEL, CHUNK, K_WORDS
from .activation_records import (
    META_SCALES,
    META_STARTS,
    META_SUMS,
    TILE_TOKENS,
    activation_bytes,
    is_centred,
    record_bytes,
    tiles_of,
)
from .emitter import F32S, VECTOR, Emitter, Value

MOST_TOKENS = 128  # most tokens of a pass: their records stay in the L2 cache
_BLOCKS = CHUNK // 32
_WIDE_BLOCK = BLOCK32_PANEL + 8 * VECTOR  # of the panel of signed weights
PANEL_BYTES = _BLOCKS * _WIDE_BLOCK  # bytes of the largest panel


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
    f, number = by_code(code), tiles_of(e, count)
    size, lines = record_bytes(f, e), CHUNK // f.block * f.nbytes // VECTOR
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


def dots_of(
    e: Emitter, f: Block32 | Block256, words: Iterable[tuple[int, Value]], rows: list[Value],
    scale: Value, starts: list[Value] | None,
) -> list[Value]:  # fmt: skip
    """Dots of the words (j, word j) of a block of 32 or a sub-block, unsigned bytes, times a pair
    of scales.

    ``starts``: what the dots start at, in pairs; then the dot of all words fits int16.
    """
    count = min(f.sub if isinstance(f, Block256) else f.block, 32) // 4
    terms = count if starts else e.i16_terms(f.largest, False)
    sums: list[Value | None] = [*starts] if starts else [None] * len(rows)
    dots: list[Value | None] = [None] * len(rows)
    for number, (j, word) in enumerate(words, 1):
        for t, (row, old) in enumerate(zip(rows, sums)):
            product = e.multiply_bytes(word, e.broadcast_i32(row, 4 * j), False)
            sums[t] = product if old is None else e.keep(e.add_i16(old, product))
        if number % terms == 0 or number == count:
            dots = [e.dot_i16(found, scale, dot) for found, dot in zip(sums, dots)]
            sums = [None] * len(rows)
    return dots


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
    signed, size, ones = f.signed(e.isa), activation_bytes(f, e), e.i32(0x00010001)
    with e.loop(blocks) as loop:
        at = e.at(panel, e.times(loop.index, _WIDE_BLOCK if signed else BLOCK32_PANEL))
        xs = [e.at(row, e.times(loop.index, 32 * size)) for row in rows]
        metas = [e.at(row, CHUNK * size) for row in rows]
        if signed:
            dots = _dots_i16(e, at, xs, [e.i32(0)] * len(rows))
        else:
            words = ((j, e.load(at, offset=VECTOR * j)) for j in range(8))
            dots = dots_of(e, f, words, xs, ones, starts_of(e, f, metas, loop.index))
        each = range(16 if signed else 8, (17 if signed else 9) + f.has_minimum)
        factors = [e.load(at, F32S, VECTOR * j) for j in each]
        add_blocks(e, f, loop.index, dots, factors, metas, c)


def starts_of(
    e: Emitter, f: Block32 | Block256, metas: list[Value], index: Value
) -> list[Value] | None:
    """Starts of the dots of block or sub-block ``index``; ``metas`` follow the activations of
    records."""
    if not is_centred(f, e):
        return None
    places = (e.at(meta, e.times(index, 4)) for meta in metas)
    return [e.broadcast_i32(place, META_STARTS) for place in places]


def add_blocks(
    e: Emitter, f: Block32, index: Value, dots: list[Value], factors: list[Value],
    metas: list[Value], c: Value,
) -> None:  # fmt: skip
    """Add the contribution of block ``index`` of 32 to a tile's results."""
    four = e.times(index, 4)
    for t, (dot, meta) in enumerate(zip(dots, metas)):
        place = e.at(meta, four)
        value = e.mul(e.to_f32(dot), e.mul(factors[0], e.broadcast_f32(place, META_SCALES)))
        value = e.add(e.load(c, F32S, VECTOR * t), value)
        if f.has_minimum:
            value = e.add(value, e.mul(factors[1], e.broadcast_f32(place, META_SUMS)))
        e.store(value, c, VECTOR * t)


def _tile_k(e: Emitter, f: Block256, panel: Value, rows: list[Value], c: Value) -> None:
    size, totals = activation_bytes(f, e), e.stack_buffer(VECTOR * len(rows))
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
    subs, count = 32 // f.sub, f.sub // 4
    for sub in range(subs):
        index = e.b.add(e.times(block, subs), e.count(sub))
        scale = e.load(e.at(panel, e.times(index, VECTOR)), offset=K_WORDS)
        words = ((j, e.load(at, offset=VECTOR * (count * sub + j))) for j in range(count))
        own = [e.at(x, f.sub * sub) for x in xs]
        dots = dots_of(e, f, words, own, scale, starts_of(e, f, metas, index))
        add_to_totals(e, dots, totals)


def add_to_totals(e: Emitter, dots: list[Value], totals: Value) -> None:
    """Add dots to int32 at ``totals``."""
    for t, dot in enumerate(dots):
        total = e.load(totals, offset=VECTOR * t, streamed=False)
        e.store(e.b.add(total, dot), totals, VECTOR * t)


def _finish_k(
    e: Emitter, f: Block256, panel: Value, totals: list[Value], metas: list[Value], c: Value
) -> None:
    """Add the contribution of a super-block, whose panel has its factors, to a tile's results."""
    at = e.at(panel, 2 * K_WORDS)
    pairs: list[Value] = []
    if not f.signed(e.isa):
        at, each = e.at(panel, K_WORDS + VECTOR * (CHUNK // f.sub)), 128 // f.sub
        pairs = [e.load(at, offset=VECTOR * j) for j in range(each * f.minima)]
        at = e.at(at, VECTOR * each * f.has_offsets(e))
    factors = [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]
    add_super_block(e, f, pairs, factors, totals, metas, c)


def add_super_block(
    e: Emitter, f: Block256, pairs: list[Value], factors: list[Value], totals: list[Value],
    metas: list[Value], c: Value,
) -> None:  # fmt: skip
    """Add the contribution of a super-block to a tile's results. ``pairs``: its offsets, if they
    are not in the starts of dots."""
    for t, (total, meta) in enumerate(zip(totals, metas)):
        offset = None
        for j, pair in enumerate(pairs):
            offset = e.dot_i16(pair, e.broadcast_i32(meta, META_SUMS + 4 * j), offset)
        value = e.mul(f.join(e, total, offset, factors), e.broadcast_f32(meta, META_SCALES))
        e.store(e.add(e.load(c, F32S, VECTOR * t), value), c, VECTOR * t)


__all__ = ["MOST_TOKENS", "PANEL_BYTES", "add_blocks", "add_super_block", "add_to_totals",
           "dots_of", "starts_of", "tiles", "unpack"]  # fmt: skip
