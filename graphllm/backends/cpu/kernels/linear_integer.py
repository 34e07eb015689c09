"""Code emitters of the integer microkernels; see `linear_microkernels`.

A panel holds at most `CHUNK` columns of a group: vectors of unsigned bytes of q, then factors (for
blocks of 32: after each block). A format that is multiplied as it is packed has no panels: in their
place are the addresses of the groups' packed blocks. The dot product of unsigned with signed bytes
starts at minus the format's offset times the sum of the activations, so that no subtraction is
needed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ..formats import Block32, Block256, by_code
from ..simd.emitter import F32, F32S, I16S, I32, I32S, I64, VECTOR, Emitter, Value

CHUNK = 256  # columns per update of c
_BLOCK32_PANEL = 10 * VECTOR  # 8 vectors of q, d, and m if the format has one
# A super-block's panel: bytes of q, then scales, corrections and offsets, factors.
_K_WORDS = 64 * VECTOR
PANEL = _K_WORDS + (16 + 8 + 2) * VECTOR
_IN_PLACE_AHEAD = 4096  # prefetch distance in bytes of tiles that read packed weights
_SUMS = 2 * VECTOR  # bytes of sums of a token and a super-block: initial dots, and pairs
_AS_PAIRS = (0, 1, 4, 5), (2, 3, 6, 7)  # indices of paired sums; see `Block256.offsets`


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
        target = e.at(panel, e.times(loop.index, _BLOCK32_PANEL))
        for j, word in enumerate([*f.integers(e, source), *f.factors(e, source)]):
            e.store(word, target, VECTOR * j)


def _unpack_k(e: Emitter, f: Block256, w: Value, panel: Value) -> None:
    for k, words in f.sub_blocks(e, w):
        for j, word in enumerate(words):
            e.store(word, panel, VECTOR * (k * f.sub // 4 + j))
    for j, vector in enumerate([vector for kind in _factors_k(e, f, w) for vector in kind]):
        e.store(vector, panel, _K_WORDS + VECTOR * j)


def _factors_k(e: Emitter, f: Block256, w: Value) -> tuple[list[Value], ...]:
    """Prepared scales, corrections, offsets and factors of a super-block."""
    scales = [e.prepare_scale(scale, f.fits_i16(e)) for scale in f.scales(e, w)]
    corrections = f.corrections(e, w) if f.has_corrections(e) else []
    offsets = f.offsets(e, w) if f.has_offsets(e) else []
    return scales, corrections, offsets, f.factors(e, w)


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
        return _tile_32(e, f, rows, panels, blocks, q, d, s, c, None)
    if e.isa.vnni:  # prefetching in the loop would slow its dots down
        e.prefetch_lines(following, e.count(0), e.times(lines, CHUNK // f.block))
    return _tile_32(e, f, rows, panels, blocks, q, d, s, c, prefetch)


def fused(
    e: Emitter, code: int, w: Value, blocks: Value, q: Value, d: Value, s: Value, c: Value
) -> None:
    f = by_code(code)
    acc = e.variable(e.load(c, F32S))
    sums_at = e.stack_buffer(_SUMS)
    sums = 4 if f.block == 32 else 32  # bytes of sums a block
    with e.loop(blocks) as loop:
        i = loop.index
        block, x = e.at(w, e.times(i, f.nbytes)), e.at(q, e.times(i, f.block))
        at_d, at_s = e.at(d, e.times(i, 4)), e.at(s, e.times(i, sums))
        if isinstance(f, Block256):
            e.set(acc, _fused_k(e, f, e.get(acc), block, x, at_d, at_s, sums_at))
        else:
            e.set(acc, _fused_32(e, f, e.get(acc), block, x, at_d, at_s))
    e.store(e.get(acc), c)


def _whole_dots(
    e: Emitter, f: Block32 | Block256, panels: list[Value], count: int, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """As `_dots`, each dot as a whole."""
    words = [[e.load(panel, offset=VECTOR * j) for j in range(count)] for panel in panels]
    dots = []
    for row, totals in zip(rows, begin):
        x = [e.broadcast_i32(row, 4 * j) for j in range(count)]
        pairs = [list(zip(each, x)) for each in words]
        if isinstance(f, Block256):
            dots.append([f.dot(e, *each) for each in zip(pairs, scales, totals)])
        else:
            dots.append([f.dot(e, *each) for each in zip(pairs, totals)])
    return dots


def _dots(
    e: Emitter, f: Block32 | Block256, panels: list[Value], count: int, rows: list[Value],
    begin: list[list[Value]], scales: list[Value],
) -> list[list[Value]]:  # fmt: skip
    """Dots [token][group] of ``count`` vectors of each panel times scales, added to ``begin``.

    Vectors are the outer loop: each is loaded once for all tokens, and consecutive instructions are
    independent. With VNNI the scales are not applied.
    """
    dots, sums = [[*each] for each in begin], [[None] * len(panels) for _ in rows]
    terms = e.i16_terms(f.largest, f.signed(e))
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
                product = e.multiply_bytes(word, x, f.signed(e))
                parts[g] = product if j % terms == 0 else e.add_i16(parts[g], product)
        if terms and (j % terms == terms - 1 or j == count - 1):
            for found, parts in zip(dots, sums):
                found[:] = [e.dot_i16(*each) for each in zip(parts, scales, found)]
    return dots


# ------------------------------------------------------------------------------------ blocks of 32


def _dot_start_32(e: Emitter, f: Block32, s: Value) -> Value:
    """Initial value of a dot: minus the offset times the sum of the activations at ``s``."""
    if not f.zero_point(e):
        return e.i32(0)
    return e.splat(e.b.mul(e.load(s, I32), I32(-f.zero_point(e))))


def _add_32(
    e: Emitter, f: Block32, acc: Value, dot: Value, factors: list[Value], d: Value, s: Value
) -> Value:
    """acc + dot * (scale * activation scale), and if the format has an m, then
    + m * (sum of activations * activation scale)."""
    acc = e.add(acc, e.mul(e.to_f32(dot), e.mul(factors[0], e.broadcast_f32(d))))
    if not f.has_minimum:
        return acc
    total = e.mul(e.b.sitofp(e.load(s, I32), F32), e.load(d, F32))
    return e.add(acc, e.mul(factors[1], e.splat(total)))


def _fused_32(
    e: Emitter, f: Block32, acc: Value, block: Value, x: Value, d: Value, s: Value
) -> Value:
    with e.prefetching():
        words, factors = f.integers(e, block), f.factors(e, block)
    pairs = [(word, e.broadcast_i32(x, 4 * j)) for j, word in enumerate(words)]
    dot = f.dot(e, pairs, _dot_start_32(e, f, s))
    return _add_32(e, f, acc, dot, factors, d, s)


def _tile_32(
    e: Emitter, f: Block32, rows: list[Value], panels: list[Value], blocks: Value, q: Value,
    d: Value, s: Value, c: Value, prefetch: Callable[[Value], None] | None,
) -> None:  # fmt: skip
    """``prefetch``: emits the prefetches of an iteration; None if the weights are read in place."""
    count, in_place = len(panels), prefetch is None
    accs = [e.variable(e.load(c, F32S, VECTOR * i)) for i in range(len(rows) * count)]
    with e.loop(blocks) as loop:
        if prefetch is not None and not e.isa.vnni:
            prefetch(loop.index)
        step = e.times(loop.index, f.nbytes if in_place else _BLOCK32_PANEL)
        at, four = [e.at(panel, step) for panel in panels], e.times(loop.index, 4)
        xs = [e.at(q, e.times(loop.index, 32), row) for row in rows]
        ds, ss = ([e.at(plane, four, row) for row in rows] for plane in (d, s))
        begin = [[_dot_start_32(e, f, sums)] * count for sums in ss]
        with e.prefetching(_IN_PLACE_AHEAD) if in_place else nullcontext():
            dots = _dots(e, f, at, 8, xs, begin, [e.i32(0x00010001)] * count)
            each = range(8, 9 + f.has_minimum)
            factors = [
                f.factors(e, panel) if in_place else [e.load(panel, F32S, VECTOR * j) for j in each]
                for panel in at
            ]
        for i, acc in enumerate(accs):
            t, g = divmod(i, count)
            e.set(acc, _add_32(e, f, e.get(acc), dots[t][g], factors[g], ds[t], ss[t]))
    for i, acc in enumerate(accs):
        e.store(e.get(acc), c, VECTOR * i)


# ------------------------------------------------------------------------------------ super-blocks


def _sums_k(e: Emitter, f: Block256, s: Value, sums_at: Value) -> None:
    """Prepare the sums of a token over 16 activations each, int16 at ``s``, in `_SUMS` bytes."""
    sums = e.b.sext(e.load(s, I16S), I32S)
    if f.sub == 32:
        sums = e.b.add(e.select_lanes(sums, range(0, 16, 2)), e.select_lanes(sums, range(1, 16, 2)))
        low, high = (e.select_lanes(sums, which) for which in _AS_PAIRS)
        e.store(e.pack_i16(low, high), sums_at, VECTOR)
    if f.zero_point(e):
        e.store(e.b.mul(sums, e.i32(-f.zero_point(e))), sums_at)


def _dot_start_k(e: Emitter, f: Block256, sums_at: Value) -> Value:
    """Initial value of a sub-block's dot, from its place in the sums."""
    return e.broadcast_i32(sums_at) if f.zero_point(e) else e.i32(0)


def _add_offsets(
    e: Emitter, pairs: list[Value], s: Value, sums_at: Value, total: Value | None = None
) -> Value | None:
    """``total`` plus offsets or corrections (see `Block256`) times the corresponding sums."""
    at = s if len(pairs) == 8 else e.at(sums_at, VECTOR)
    for j, pair in enumerate(pairs):
        total = e.dot_i16(pair, e.broadcast_i32(at, 4 * j), total)
    return total


def _fused_k(
    e: Emitter, f: Block256, acc: Value, block: Value, x: Value, d: Value, s: Value, sums_at: Value
) -> Value:
    """acc plus the contribution of a super-block."""
    _sums_k(e, f, s, sums_at)
    total = None
    with e.prefetching():
        scales, corrections, offsets, factors = _factors_k(e, f, block)
        for k, words in f.sub_blocks(e, block):
            pairs = [(word, e.broadcast_i32(x, k * f.sub + 4 * j)) for j, word in enumerate(words)]
            if e.isa.vnni:
                dot = e.dot_bytes(pairs, f.largest, _dot_start_k(e, f, e.at(sums_at, 4 * k)))
                total = e.add_scaled(dot, scales[k], total, f.fits_i16(e))
            else:
                total = f.dot(e, pairs, scales[k], total)
    total = _add_offsets(e, corrections, s, sums_at, total)
    contribution = f.join(e, total, _add_offsets(e, offsets, s, sums_at), factors)
    return e.add(acc, e.mul(contribution, e.broadcast_f32(d)))


def _tile_k(
    e: Emitter, f: Block256, rows: list[Value], panels: list[Value], q: Value, d: Value, s: Value,
    c: Value, prefetch: Callable[[Value], None],
) -> None:  # fmt: skip
    count, per, subs = len(panels), f.sub // 4, CHUNK // f.sub
    sums_at = e.stack_buffer(_SUMS * len(rows))
    sums_of = [e.at(sums_at, _SUMS * t) for t in range(len(rows))]
    for row, place in zip(rows, sums_of):
        _sums_k(e, f, e.at(s, row), place)
    totals = [[e.variable(e.i32(0)) for _ in panels] for _ in rows]
    with e.loop(subs) as loop:
        prefetch(loop.index)
        at = [e.at(panel, e.times(loop.index, VECTOR * per)) for panel in panels]
        one = e.times(loop.index, VECTOR)
        scales = [e.load(e.at(panel, one), offset=_K_WORDS) for panel in panels]
        xs = [e.at(q, e.times(loop.index, f.sub), row) for row in rows]
        if e.isa.vnni:
            four = e.times(loop.index, 4)
            begin = [[_dot_start_k(e, f, e.at(place, four))] * count for place in sums_of]
            for total, dots in zip(totals, _dots(e, f, at, per, xs, begin, scales)):
                for one, dot, scale in zip(total, dots, scales):
                    e.set(one, e.add_scaled(dot, scale, e.get(one), f.fits_i16(e)))
        else:
            begin = [[e.get(one) for one in total] for total in totals]
            for total, dots in zip(totals, _dots(e, f, at, per, xs, begin, scales)):
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
    at = e.at(panel, _K_WORDS + VECTOR * (CHUNK // f.sub))
    each = 128 // f.sub  # vectors of corrections and of offsets
    corrections = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_corrections(e))]
    at = e.at(at, VECTOR * len(corrections))
    offsets = [e.load(at, offset=VECTOR * j) for j in range(each * f.has_offsets(e))]
    at = e.at(at, VECTOR * len(offsets))
    factors = [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]
    total = _add_offsets(e, corrections, s, sums_at, total)
    contribution = f.join(e, total, _add_offsets(e, offsets, s, sums_at), factors)
    e.store(e.add(e.load(c, F32S), e.mul(contribution, e.broadcast_f32(d))), c)


__all__ = ["CHUNK", "PANEL", "fused", "tile", "token_rows", "unpack"]
