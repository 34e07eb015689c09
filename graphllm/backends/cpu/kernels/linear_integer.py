"""Code emitters of the integer microkernels for several tokens; see `linear_microkernels`.

A panel holds at most `CHUNK` columns of a group: vectors of unsigned bytes of q, then factors (for
blocks of 32: after each block). Packed blocks are also multiplied in place, as they are unpacked,
if a format gains by it for so many tokens; in the place of panels are then the addresses of the
groups' blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    if in_place:
        distance = e.b.sub(ahead, panels[0])
        if isinstance(f, Block256):
            return _tile_k_in_place(e, f, rows, panels, q, d, s, c, distance)
        return _tile_32(e, f, rows, panels, blocks, q, d, s, c, distance)
    if isinstance(f, Block256):
        return _tile_k(e, f, rows, panels, q, d, s, c, prefetch)
    if e.isa.vnni:  # prefetching in the loop would slow its dots down
        e.prefetch_lines(following, e.count(0), e.times(lines, CHUNK // f.block))
    return _tile_32(e, f, rows, panels, blocks, q, d, s, c, prefetch)


Words = Iterable[tuple[int, list[Value]]]  # number of a word, and that word of each group


def stored_words(e: Emitter, panels: list[Value], count: int) -> Words:
    """The words of panels, loaded when they are asked for."""
    return ((j, [e.load(panel, offset=VECTOR * j) for panel in panels]) for j in range(count))


def _unpacked_words(e: Emitter, f: Block32 | Block256, blocks: list[Value]) -> Words:
    """The words of packed blocks or chunks, unpacked when they are asked for."""
    for words in zip(*(f.words(e, block) for block in blocks)):
        yield words[0][0], [word for _, word in words]


def _whole_dots(
    e: Emitter, f: Block32 | Block256, words: Words, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """As `word_dots`, each dot as a whole."""
    numbers, found = zip(*words)
    dots = []
    for row, totals in zip(rows, begin):
        x = [e.broadcast_i32(row, 4 * j) for j in numbers]
        pairs = [list(zip(each, x)) for each in zip(*found)]
        if isinstance(f, Block256):
            sums = [f.dot(e, each, None) for each in pairs]
            dots.append([e.add_scaled(*each) for each in zip(sums, scales, totals)])
        else:
            dots.append([f.dot(e, *each) for each in zip(pairs, totals)])
    return dots


def word_dots(
    e: Emitter, f: Block32 | Block256, words: Words, count: int, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """Dots [token][group] of ``count`` words times scales, added to ``begin``.

    Words are the outer loop: each is loaded once for all tokens, and consecutive instructions are
    independent. With VNNI the scales are not applied.
    """
    dots, sums = [[*each] for each in begin], [[None] * len(scales) for _ in rows]
    terms = e.i16_terms(f.largest, f.signed(e.isa))
    if not e.isa.vnni and not terms:
        return _whole_dots(e, f, words, rows, begin, scales)
    for number, (j, word) in enumerate(words):
        if e.isa.vnni:
            _add_products(e, word, rows, 4 * j, dots)
            continue
        for row, parts in zip(rows, sums):
            x = e.broadcast_i32(row, 4 * j)
            for g, one in enumerate(word):
                product = e.multiply_bytes(one, x, f.signed(e.isa))
                old = parts[g]
                parts[g] = product if number % terms == 0 else e.keep(e.add_i16(old, product))
        if number % terms == terms - 1 or number == count - 1:
            for found, parts in zip(dots, sums):
                found[:] = [e.keep(e.dot_i16(*each)) for each in zip(parts, scales, found)]
    return dots


def _add_products(
    e: Emitter, word: list[Value], rows: list[Value], at: int, dots: list[list[Value]]
) -> None:
    """Add the products of a word of each group with the activations ``at`` bytes on in each row to
    dots [token][group], by VNNI."""
    for row, found in zip(rows, dots):
        x = e.broadcast_i32(row, at)
        found[:] = [e.dot_bytes([(one, x)], 255, old) for one, old in zip(word, found)]


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
            words = _unpacked_words(e, f, at) if in_place else stored_words(e, at, 8)
            dots = word_dots(e, f, words, 8, xs, begin, [e.i32(0x00010001)] * count)
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


def _prepared_sums(e: Emitter, f: Block256, s: Value, rows: list[Value]) -> list[Value]:
    """Prepare each token's sums on the stack; return their places."""
    sums_at = e.stack_buffer(SUMS_BYTES * len(rows))
    places = [e.at(sums_at, SUMS_BYTES * t) for t in range(len(rows))]
    for row, place in zip(rows, places):
        prepare_sums(e, f, e.at(s, row), place)
    return places


def _tile_k(
    e: Emitter, f: Block256, rows: list[Value], panels: list[Value], q: Value, d: Value, s: Value,
    c: Value, prefetch: Callable[[Value], None],
) -> None:  # fmt: skip
    count, per, subs = len(panels), f.sub // 4, CHUNK // f.sub
    sums_of = _prepared_sums(e, f, s, rows)
    totals = [[e.variable(e.i32(0)) for _ in panels] for _ in rows]
    with e.loop(subs) as loop:
        prefetch(loop.index)
        at = [e.at(panel, e.times(loop.index, VECTOR * per)) for panel in panels]
        one = e.times(loop.index, VECTOR)
        scales = [e.load(e.at(panel, one), offset=K_WORDS) for panel in panels]
        xs = [e.at(q, e.times(loop.index, f.sub), row) for row in rows]
        words = stored_words(e, at, per)
        if e.isa.vnni:
            four = e.times(loop.index, 4)
            begin = [[dot_start_k(e, f, e.at(place, four))] * count for place in sums_of]
            for total, dots in zip(totals, word_dots(e, f, words, per, xs, begin, scales)):
                for one, dot, scale in zip(total, dots, scales):
                    e.set(one, e.add_scaled(dot, scale, e.get(one), f.fits_i16(e)))
        else:
            begin = [[e.get(one) for one in total] for total in totals]
            for total, dots in zip(totals, word_dots(e, f, words, per, xs, begin, scales)):
                for one, dot in zip(total, dots):
                    e.set(one, dot)
    _add_k(e, f, [_stored_factors(e, f, panel) for panel in panels], totals, rows, d, s, sums_of, c)


def _tile_k_in_place(
    e: Emitter, f: Block256, rows: list[Value], blocks: list[Value], q: Value, d: Value, s: Value,
    c: Value, distance: Value,
) -> None:  # fmt: skip
    """`_tile_k` by VNNI, of packed super-blocks, whose words are multiplied as they are unpacked.
    Each load prefetches what is ``distance`` bytes on."""
    count, subs = len(blocks), CHUNK // f.sub
    sums_of = _prepared_sums(e, f, s, rows)
    totals = [[e.variable(e.i32(0)) for _ in blocks] for _ in rows]
    scales_at = e.stack_buffer(VECTOR * subs * count)
    with e.prefetching(distance):
        for g, block in enumerate(blocks):
            for k, scale in enumerate(scales_of(e, f, block)):
                e.store(scale, scales_at, VECTOR * (k * count + g))
        with e.loop(f.block // f.chunk) as loop:
            first = e.times(loop.index, f.chunk // f.sub)
            scales = e.at(scales_at, e.times(first, VECTOR * count))
            at = [e.at(block, f.words_at, e.times(loop.index, f.chunk_nbytes)) for block in blocks]
            xs = [e.at(q, e.times(loop.index, f.chunk), row) for row in rows]
            starts = [e.at(place, e.times(first, 4)) for place in sums_of]
            _add_chunk(e, f, at, xs, starts, scales, totals)
        factors = [factors_of(e, f, block) for block in blocks]
    _add_k(e, f, factors, totals, rows, d, s, sums_of, c)


def _add_chunk(
    e: Emitter, f: Block256, blocks: list[Value], xs: list[Value], starts: list[Value],
    scales: Value, totals: list[list[Value]],
) -> None:  # fmt: skip
    """Add scales times dots of the sub-blocks of a packed chunk to ``totals``."""
    count = len(blocks)
    dots: dict[int, list[list[Value]]] = {}
    left = dict.fromkeys(range(f.chunk // f.sub), f.sub // 4)  # words of each sub-block
    for j, word in _unpacked_words(e, f, blocks):
        k = 4 * j // f.sub
        if k not in dots:
            dots[k] = [[dot_start_k(e, f, e.at(start, 4 * k))] * count for start in starts]
        _add_products(e, word, xs, 4 * j, dots[k])
        left[k] -= 1
        if left[k]:
            continue
        for g in range(count):
            scale = e.load(scales, offset=VECTOR * (k * count + g), streamed=False)
            for total, found in zip(totals, dots[k]):
                e.set(total[g], e.add_scaled(found[g], scale, e.get(total[g]), f.fits_i16(e)))


def _stored_factors(e: Emitter, f: Block256, panel: Value) -> tuple[list[Value], ...]:
    """`factors_of` a panel."""
    at = e.at(panel, K_WORDS + VECTOR * (CHUNK // f.sub))
    each = 128 // f.sub  # vectors of corrections and of offsets
    corrections = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_corrections(e))]
    at = e.at(at, VECTOR * len(corrections))
    offsets = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_offsets(e))]
    at = e.at(at, VECTOR * len(offsets))
    return corrections, offsets, [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]


def _add_k(
    e: Emitter, f: Block256, factors: list[tuple[list[Value], ...]], totals: list[list[Value]],
    rows: list[Value], d: Value, s: Value, sums_of: list[Value], c: Value,
) -> None:  # fmt: skip
    """Add the contributions of a super-block of each group, whose factors are given, to results."""
    for g, (corrections, offsets, own) in enumerate(factors):
        for t, (row, sums_at) in enumerate(zip(rows, sums_of)):
            to, at_s = e.at(c, VECTOR * (t * len(factors) + g)), e.at(s, row)
            total = add_offsets(e, corrections, at_s, sums_at, e.get(totals[t][g]))
            contribution = f.join(e, total, add_offsets(e, offsets, at_s, sums_at), own)
            value = e.mul(contribution, e.broadcast_f32(e.at(d, row)))
            e.store(e.add(e.load(to, F32S), value), to)


__all__ = ["BLOCK32_PANEL", "CHUNK", "K_WORDS", "PANEL", "stored_words", "tile", "token_rows",
           "unpack", "word_dots"]  # fmt: skip
