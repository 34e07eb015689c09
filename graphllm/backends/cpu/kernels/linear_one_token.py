"""Code emitters of the integer microkernels for one token; see `linear_microkernels`.

Each weight goes from memory into a register and is multiplied there. On AVX2, whose 16 registers
hold 8 vectors of 16 lanes, instructions limit the speed, so few vectors are live at a time: words
are multiplied as they are unpacked, and a super-block is a loop over its chunks, whose code the
compiler schedules by itself. The scales of a super-block are prepared before, on the stack.
"""

from __future__ import annotations

from ..formats import Block32, Block256, by_code
from ..simd.emitter import F32S, VECTOR, Emitter, Value
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

_ROOM = SUMS_BYTES + 16 * VECTOR  # bytes of sums and scales of a super-block
_UNROLL = {1: 4, 3: 2}  # chunks in an iteration of the loop over a super-block, by their vectors


def fused(
    e: Emitter, code: int, w: Value, blocks: Value, q: Value, d: Value, s: Value, c: Value
) -> None:
    f = by_code(code)
    acc = e.variable(e.load(c, F32S))
    room = e.stack_buffer(_ROOM)
    sums = 4 if f.block == 32 else 32  # bytes of sums a block
    with e.loop(blocks) as loop:
        i = loop.index
        block, x = e.at(w, e.times(i, f.nbytes)), e.at(q, e.times(i, f.block))
        at_d, at_s = e.at(d, e.times(i, 4)), e.at(s, e.times(i, sums))
        if isinstance(f, Block256):
            e.set(acc, _fused_k(e, f, e.get(acc), block, x, at_d, at_s, room))
        else:
            e.set(acc, _fused_32(e, f, e.get(acc), block, x, at_d, at_s))
    e.store(e.get(acc), c)


def iterations(f: Block32 | Block256) -> int:
    """Iterations of the loop over a super-block; 1 for blocks of 32, which have no loop."""
    return f.block // (f.chunk * _UNROLL.get(f.layout.vectors, 1))


class _ShortSums:
    """Sums of byte products in int16, one for each sub-block of ``words`` words."""

    def __init__(self, e: Emitter, f: Block32 | Block256, words: int) -> None:
        self.e, self.f, self.words = e, f, words
        self.terms = e.i16_terms(f.largest, f.signed(e.isa))
        self._open: dict[int, tuple[Value | None, int]] = {}

    def add(self, k: int, word: Value, x: Value) -> Value | None:
        """Add a word of sub-block k times activations. Returns the sum since the last one returned
        if it has to be widened: one more could overflow, or the sub-block is complete."""
        if self.f.signed(self.e.isa) and self.f.symmetric:
            product = self.e.multiply_by_magnitude(word, x)
        else:
            product = self.e.multiply_bytes(word, x, self.f.signed(self.e.isa))
        part, count = self._open.get(k, (None, 0))
        part, count = product if part is None else self.e.add_i16(part, product), count + 1
        whole = count % self.terms == 0 or count == self.words
        self._open[k] = None if whole else part, count
        return part if whole else None


def _fused_32(
    e: Emitter, f: Block32, acc: Value, block: Value, x: Value, d: Value, s: Value
) -> Value:
    dot = e.variable(dot_start_32(e, f, s))
    with e.prefetching():
        dot_words(e, f, block, x, [dot])
        factors = f.factors(e, block)
    return add_32(e, f, acc, e.get(dot), factors, d, s)


def dot_words(e: Emitter, f: Block32, block: Value, x: Value, sums: list[Value]) -> None:
    """Add the products of a block of 32 and activations to variables, to each in turn."""
    short = _ShortSums(e, f, 8)
    for j, word in f.words(e, block):
        one, total = e.broadcast_i32(x, 4 * j), sums[j % len(sums)]
        if not short.terms:
            e.set(total, f.dot(e, [(word, one)], e.get(total)))
        elif (part := short.add(0, word, one)) is not None:
            e.set(total, e.dot_i16(part, e.i32(0x00010001), e.get(total)))


def _fused_k(
    e: Emitter, f: Block256, acc: Value, block: Value, x: Value, d: Value, s: Value, room: Value
) -> Value:
    """acc plus the contribution of a super-block. ``room``: `_ROOM` bytes."""
    sums_at, scales_at = room, e.at(room, SUMS_BYTES)
    prepare_sums(e, f, s, sums_at)
    total = e.variable(e.i32(0))
    with e.prefetching():
        for k, scale in enumerate(scales_of(e, f, block)):
            e.store(scale, scales_at, VECTOR * k)
        count = iterations(f)
        unroll = f.block // f.chunk // count
        with e.loop(count) as loop:
            index, subs = e.times(loop.index, unroll), f.chunk // f.sub
            at = e.at(block, f.words_at, e.times(index, f.chunk_nbytes))
            values = e.at(x, e.times(index, f.chunk))
            scales = e.at(scales_at, e.times(index, subs * VECTOR))
            starts = e.at(sums_at, e.times(index, subs * 4))
            for c in range(unroll):
                places = (
                    e.at(at, c * f.chunk_nbytes), e.at(values, c * f.chunk),
                    e.at(scales, c * subs * VECTOR), e.at(starts, c * subs * 4),
                )  # fmt: skip
                e.set(total, _fused_chunk(e, f, *places, e.get(total)))
        corrections, offsets, factors = factors_of(e, f, block)
    total = add_offsets(e, corrections, s, sums_at, e.get(total))
    contribution = f.join(e, total, add_offsets(e, offsets, s, sums_at), factors)
    return e.add(acc, e.mul(contribution, e.broadcast_f32(d)))


def _fused_chunk(
    e: Emitter, f: Block256, at: Value, x: Value, scales_at: Value, starts_at: Value, total: Value
) -> Value:
    """``total`` plus scales times dots of the sub-blocks of a chunk."""
    short = _ShortSums(e, f, f.sub // 4)
    dots: dict[int, tuple[Value, int]] = {}
    for j, word in f.words(e, at):
        k, one = 4 * j // f.sub, e.broadcast_i32(x, 4 * j)
        if short.terms:
            if (part := short.add(k, word, one)) is not None:
                total = e.dot_i16(part, e.load(scales_at, offset=VECTOR * k, streamed=False), total)
            continue
        dot, count = dots.get(k) or (dot_start_k(e, f, e.at(starts_at, 4 * k)), 0)
        dots[k] = f.dot(e, [(word, one)], dot), count + 1
        if 4 * (count + 1) == f.sub:
            scale = e.load(scales_at, offset=VECTOR * k, streamed=False)
            total = e.add_scaled(dots[k][0], scale, total, f.fits_i16(e))
    return total
