"""Code emitters of the integer microkernels for several tokens; see `linear_microkernels`.

A panel holds at most `CHUNK` columns of a group: vectors of unsigned bytes of q, then factors (for
blocks of 32: after each block). A format that is multiplied as it is packed has no panels: in their
place are the addresses of the groups' packed blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain

from ..formats import Block32, Block256, by_code
from ..simd.emitter import F32S, I64, VECTOR, Emitter, Value
from .linear_blocks import (
    SUMS_BYTES,
    add_32,
    add_offsets,
    dot_start_32,
    dot_start_k,
    factors_of,
    prepare_sums,
    scales_of,
)

CHUNK = 256  # columns per update of c
BLOCK32_PANEL = 10 * VECTOR  # 8 vectors of q, d, and m if the format has one
# A super-block's panel: bytes of q, then scales, corrections and offsets, factors.
K_WORDS = 64 * VECTOR
PANEL = K_WORDS + (16 + 8 + 2) * VECTOR


def token_rows(e: Emitter, tokens: int, left: Value, rows: Value) -> list[Value]:
    """Load the byte offset of each token's row from ``rows``; missing tokens use the first row."""
    found = [e.load(rows, I64)]
    for t in range(1, tokens):
        exists = e.b.icmp_signed("<", e.count(t), left)
        found.append(e.load(e.at(rows, e.b.select(exists, e.count(8 * t), e.count(0))), I64))
    return found


def unpack(e: Emitter, code: int, w: Value, panel: Value, blocks: Value) -> None:
    f = by_code(code)
    if isinstance(f, Block256):
        return _unpack_k(e, f, w, panel)
    with e.loop(blocks) as loop:
        source = e.at(w, e.times(loop.index, f.nbytes))
        target = e.at(panel, e.times(loop.index, BLOCK32_PANEL))
        for j, word in [*f.words(e, source), *enumerate(f.factors(e, source), 8)]:
            e.store(word, target, VECTOR * j)


def _unpack_k(e: Emitter, f: Block256, w: Value, panel: Value) -> None:
    with e.loop(f.block // f.chunk) as loop:
        source = e.at(w, f.words_at, e.times(loop.index, f.chunk_nbytes))
        target = e.at(panel, e.times(loop.index, f.chunk // 4 * VECTOR))
        for j, word in f.words(e, source):
            e.store(word, target, VECTOR * j)
    factors = (each for kind in factors_of(e, f, w) for each in kind)
    for j, each in enumerate(chain(scales_of(e, f, w), factors)):
        e.store(each, panel, K_WORDS + VECTOR * j)


def tile(
    e: Emitter, code: int, in_place: int, groups: int, tokens: int, left: Value, panel: Value,
    blocks: Value, q: Value, d: Value, s: Value, offsets: Value, c: Value, ahead: Value,
    step: Value, lines: Value,
) -> None:  # fmt: skip
    f = by_code(code)
    rows = token_rows(e, tokens, left, offsets)
    if in_place:
        panels = [e.load(panel, I64, 8 * g) for g in range(groups)]
    else:
        panels = [e.at(panel, PANEL * g) for g in range(groups)]
    following = [e.at(ahead, e.times(step, g)) for g in range(groups)]

    def prefetch(index: Value) -> None:
        e.prefetch_lines(following, index, lines)

    if isinstance(f, Block256):
        return _tile_k(e, f, rows, panels, q, d, s, c, prefetch)
    if in_place:
        return _tile_32(e, f, rows, panels, blocks, q, d, s, c, e.b.sub(ahead, panels[0]))
    if e.isa.vnni:  # prefetching in the loop would slow its dots down
        e.prefetch_lines(following, e.count(0), e.times(lines, CHUNK // f.block))
    return _tile_32(e, f, rows, panels, blocks, q, d, s, c, prefetch)


def _whole_dots(
    e: Emitter, f: Block32 | Block256, panels: list[Value], count: int, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """As `word_dots`, each dot as a whole."""
    words = [[e.load(panel, offset=VECTOR * j) for j in range(count)] for panel in panels]
    dots = []
    for row, totals in zip(rows, begin):
        x = [e.broadcast_i32(row, 4 * j) for j in range(count)]
        pairs = [list(zip(each, x)) for each in words]
        if isinstance(f, Block256):
            sums = [f.dot(e, each, None) for each in pairs]
            dots.append([e.add_scaled(*each) for each in zip(sums, scales, totals)])
        else:
            dots.append([f.dot(e, *each) for each in zip(pairs, totals)])
    return dots


def word_dots(
    e: Emitter, f: Block32 | Block256, panels: list[Value], count: int, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """Dots [token][group] of ``count`` vectors of each panel times scales, added to ``begin``.

    Vectors are the outer loop: each is loaded once for all tokens, and consecutive instructions are
    independent. With VNNI the scales are not applied.
    """
    dots, sums = [[*each] for each in begin], [[None] * len(panels) for _ in rows]
    terms = e.i16_terms(f.largest, f.signed(e.isa))
    if not e.isa.vnni and not terms:
        return _whole_dots(e, f, panels, count, rows, begin, scales)
    for j in range(count):
        words = [e.load(panel, offset=VECTOR * j) for panel in panels]
        for row, found, parts in zip(rows, dots, sums):
            x = e.broadcast_i32(row, 4 * j)
            if e.isa.vnni:
                found[:] = [e.dot_bytes([(word, x)], 255, old) for word, old in zip(words, found)]
                continue
            for g, word in enumerate(words):
                product = e.multiply_bytes(word, x, f.signed(e.isa))
                old = parts[g]
                parts[g] = product if j % terms == 0 else e.keep(e.add_i16(old, product))
        if terms and (j % terms == terms - 1 or j == count - 1):
            for found, parts in zip(dots, sums):
                found[:] = [e.keep(e.dot_i16(*each)) for each in zip(parts, scales, found)]
    return dots


# ------------------------------------------------------------------------------------ blocks of 32


def _tile_32(
    e: Emitter, f: Block32, rows: list[Value], panels: list[Value], blocks: Value, q: Value,
    d: Value, s: Value, c: Value, prefetch: Callable[[Value], None] | Value,
) -> None:  # fmt: skip
    """``prefetch``: emits the prefetches of an iteration. For weights that are read in place:
    distance of what is prefetched with each load."""
    count, in_place = len(panels), not callable(prefetch)
    accs = [e.variable(e.load(c, F32S, VECTOR * i)) for i in range(len(rows) * count)]
    with e.loop(blocks) as loop:
        if callable(prefetch) and not e.isa.vnni:
            prefetch(loop.index)
        step = e.times(loop.index, f.nbytes if in_place else BLOCK32_PANEL)
        at, four = [e.at(panel, step) for panel in panels], e.times(loop.index, 4)
        xs = [e.at(q, e.times(loop.index, 32), row) for row in rows]
        ds, ss = ([e.at(plane, four, row) for row in rows] for plane in (d, s))
        begin = [[dot_start_32(e, f, sums)] * count for sums in ss]
        with nullcontext() if callable(prefetch) else e.prefetching(prefetch):
            dots = word_dots(e, f, at, 8, xs, begin, [e.i32(0x00010001)] * count)
            each = range(8, 9 + f.has_minimum)
            factors = [
                f.factors(e, panel) if in_place else [e.load(panel, F32S, VECTOR * j) for j in each]
                for panel in at
            ]
        for i, acc in enumerate(accs):
            t, g = divmod(i, count)
            e.set(acc, add_32(e, f, e.get(acc), dots[t][g], factors[g], ds[t], ss[t]))
    for i, acc in enumerate(accs):
        e.store(e.get(acc), c, VECTOR * i)


# ------------------------------------------------------------------------------------ super-blocks


def _tile_k(
    e: Emitter, f: Block256, rows: list[Value], panels: list[Value], q: Value, d: Value, s: Value,
    c: Value, prefetch: Callable[[Value], None],
) -> None:  # fmt: skip
    count, per, subs = len(panels), f.sub // 4, CHUNK // f.sub
    sums_at = e.stack_buffer(SUMS_BYTES * len(rows))
    sums_of = [e.at(sums_at, SUMS_BYTES * t) for t in range(len(rows))]
    for row, place in zip(rows, sums_of):
        prepare_sums(e, f, e.at(s, row), place)
    totals = [[e.variable(e.i32(0)) for _ in panels] for _ in rows]
    with e.loop(subs) as loop:
        prefetch(loop.index)
        at = [e.at(panel, e.times(loop.index, VECTOR * per)) for panel in panels]
        one = e.times(loop.index, VECTOR)
        scales = [e.load(e.at(panel, one), offset=K_WORDS) for panel in panels]
        xs = [e.at(q, e.times(loop.index, f.sub), row) for row in rows]
        if e.isa.vnni:
            four = e.times(loop.index, 4)
            begin = [[dot_start_k(e, f, e.at(place, four))] * count for place in sums_of]
            for total, dots in zip(totals, word_dots(e, f, at, per, xs, begin, scales)):
                for one, dot, scale in zip(total, dots, scales):
                    e.set(one, e.add_scaled(dot, scale, e.get(one), f.fits_i16(e)))
        else:
            begin = [[e.get(one) for one in total] for total in totals]
            for total, dots in zip(totals, word_dots(e, f, at, per, xs, begin, scales)):
                for one, dot in zip(total, dots):
                    e.set(one, dot)
    for g, panel in enumerate(panels):
        for t, row in enumerate(rows):
            place = e.at(c, VECTOR * (t * count + g))
            at_d, at_s = e.at(d, row), e.at(s, row)
            _add_k(e, f, panel, e.get(totals[t][g]), at_d, at_s, sums_of[t], place)


def _add_k(
    e: Emitter,
    f: Block256,
    panel: Value,
    total: Value,
    d: Value,
    s: Value,
    sums_at: Value,
    c: Value,
) -> None:
    """Add the contribution of a super-block to 16 results at ``c``; the panel has its factors."""
    at = e.at(panel, K_WORDS + VECTOR * (CHUNK // f.sub))
    each = 128 // f.sub  # vectors of corrections and of offsets
    corrections = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_corrections(e))]
    at = e.at(at, VECTOR * len(corrections))
    offsets = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_offsets(e))]
    at = e.at(at, VECTOR * len(offsets))
    factors = [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]
    total = add_offsets(e, corrections, s, sums_at, total)
    contribution = f.join(e, total, add_offsets(e, offsets, s, sums_at), factors)
    e.store(e.add(e.load(c, F32S), e.mul(contribution, e.broadcast_f32(d))), c)


__all__ = ["BLOCK32_PANEL", "CHUNK", "K_WORDS", "PANEL", "tile", "token_rows",
           "unpack", "word_dots"]  # fmt: skip
