"""q4_0, q4_1, q5_0, q5_1 and q8_0 on the CPU: 32 integers with one scale.

A block of a tile: as many vectors of q as q has bits, d, m.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..runtime.isa import ISA
from ..simd.emitter import LANES, SIGN_BITS, Emitter, Value
from .bit_layout import EIGHT_BITS, FIVE_BITS, FOUR_BITS, byte_bits
from .encoder import BlockEncoder, runs_of_32
from .packed_format import Block32, Field, register

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

_RUN = 32


class SimpleBlock(Block32):
    """q, then the scales at the end of the block."""

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.chunks(rows, "q", 0)
        yield from self.scales(rows)

    def scales(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.scalar(rows, "d", self.factors_at())
        if self.has_minimum:
            yield from self.scalar(rows, "m", self.factors_at() + 32)


class Bytes(SimpleBlock):
    """int8. VNNI multiplies unsigned by signed bytes, so there q + 128 is packed."""

    layout = EIGHT_BITS

    def in_place_tokens(self, target: ISA) -> int:
        # A copy is aligned, and has float32 scales.
        return 64 if target.avx512 and target.vnni else 1 << 30

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        e = rows.e
        for offset, q in self.chunks(rows, "q", 0):
            yield Field(offset, e.b.xor(q, e.i32(SIGN_BITS)) if e.isa.vnni else q)
        yield from self.scales(rows)

    def zero_point(self, e: Emitter) -> int:
        return 128 if e.isa.vnni else 0

    def signed(self, target: ISA) -> bool:
        return not target.vnni


class Nibbles(SimpleBlock):
    """Four bits of each q."""

    layout = FOUR_BITS

    def zero_point(self, e: Emitter) -> int:
        return 0 if self.has_minimum else (self.largest + 1) // 2


class FiveBits(Nibbles):
    """Nibbles, and an int32 of fifth bits."""

    layout = FIVE_BITS

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        return self.scales(rows)

    def stored_words(self, rows: StoredRows) -> list[Value]:
        e, words = rows.e, rows.words(self.span("q"))
        (high,) = rows.words(self.span("high"))
        found = []
        for half in range(2):
            for j, word in enumerate(words):
                bits = e.mask(e.shr(high, 16 * half + 4 * j), 15)
                # The product puts bit i at 8 i, among others.
                apart = e.b.mul(bits, e.i32(0x00204081))
                fifth = byte_bits(e, apart, 0, 1, to=4)
                found.append(e.b.or_(byte_bits(e, word, 4 * half, 4), fifth))
        return found


# --------------------------------------------------------------------------------------- encoding


def _store_five_bits(e: BlockEncoder, low: Value, high: Value, at: Value, offset: int) -> None:
    """Fifth bits of 32 elements, then their nibbles."""
    for j, q in enumerate((low, high)):
        fifth = e.b.icmp_unsigned("!=", e.mask(q, 16), e.i32(0))
        e.store(e.flags(fifth), at, offset + 2 * j)
    e.store_nibbles(e.mask(low, 15), e.mask(high, 15), at, offset + 4)


def _centred(
    lowest: int, nbytes: int, e: BlockEncoder, vectors: Sequence[Value], at: Value
) -> Value:
    """q4_0 and q5_0: the value of largest magnitude becomes ``lowest``."""
    d = e.over(e.fold(vectors, _RUN, e.larger), lowest)
    inverse, half = e.inverse(d), e.to_half(d)
    store = e.store_nibbles if lowest == -8 else partial(_store_five_bits, e)
    for i, block in enumerate(runs_of_32(vectors)):
        e.store_half(half, i, at, nbytes * i)
        one, middle = e.lane(inverse, i), e.f32(0.5 - lowest)
        steps = (e.whole(e.add(e.mul(x, one), middle)) for x in block)
        low, high = (e.at_most(q, -2 * lowest - 1) for q in steps)
        store(low, high, at, nbytes * i + 2)
    return e.not_finite(vectors)


def _span(most: int, nbytes: int, e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    """q4_1 and q5_1: q in 0..most spans all values of the block."""
    least = e.fold(vectors, _RUN, e.lower)
    span = e.sub(e.fold(vectors, _RUN, e.higher), least)
    d = e.over(e.magnitude(span), most)
    inverse, halves = e.inverse(d), (e.to_half(d), e.to_half(least))
    store = e.store_nibbles if most == 15 else partial(_store_five_bits, e)
    for i, block in enumerate(runs_of_32(vectors)):
        for j, half in enumerate(halves):
            e.store_half(half, i, at, nbytes * i + 2 * j)
        one, base = e.lane(inverse, i), e.lane(least, i)
        steps = (e.whole(e.add(e.mul(e.sub(x, base), one), e.f32(0.5))) for x in block)
        low, high = (e.at_most(q, most) for q in steps)
        store(low, high, at, nbytes * i + 4)
    return e.not_finite(vectors)


def _bytes(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    d = e.over(e.magnitude(e.fold(vectors, _RUN, e.larger)), 127)
    inverse, half = e.inverse(d), e.to_half(d)
    for i, block in enumerate(runs_of_32(vectors)):
        e.store_half(half, i, at, 34 * i)
        one = e.lane(inverse, i)
        for j, x in enumerate(block):
            x = e.mul(x, one)
            q = e.whole(e.add(x, e.signed(e.f32(0.5), x)))  # halves away from zero
            e.store_bytes(q, at, 34 * i + 2 + LANES * j)
    return e.not_finite(vectors)


register(Bytes(name="q8_0", largest=255, encode=_bytes))
register(Nibbles(name="q4_0", largest=15, encode=partial(_centred, -8, 18)))
register(Nibbles(name="q4_1", largest=15, has_minimum=True, encode=partial(_span, 15, 20)))
register(FiveBits(name="q5_0", largest=31, encode=partial(_centred, -16, 22)))
register(FiveBits(name="q5_1", largest=31, has_minimum=True, encode=partial(_span, 31, 24)))
