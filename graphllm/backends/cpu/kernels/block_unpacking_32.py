"""Weight formats with one scale for 32 elements; where their parts lie: `formats.py`."""

from __future__ import annotations

from dataclasses import dataclass

from ..simd.emitter import LANES, SIGN_BITS, VECTOR, Emit, Value
from .block_unpacking import Block32, Codes, halves_of, with_bit


class Q8(Block32):
    """VNNI multiplies unsigned by signed bytes, so there q + 128 is used; else the sign is."""

    def words(self, e: Emit, at: Value) -> list[Value]:
        words = [e.load(at, offset=VECTOR * j) for j in range(8)]
        return [e.b.xor(w, e.i32(SIGN_BITS)) for w in words] if e.isa.vnni else words

    def offset(self, e: Emit) -> int:
        return 128 if e.isa.vnni else 0

    def dot(self, e: Emit, words: list[Value], x: list[Value], total: Value) -> Value:
        if e.isa.vnni:
            return super().dot(e, words, x, total)
        return e.dot_signed_bytes(list(zip(words, x)), total)


class Nibbles(Block32):
    """Four bits of each q, and a vector of fifth ones where q goes up to 31."""

    def words(self, e: Emit, at: Value) -> list[Value]:
        words = halves_of(e, [e.load(at, offset=VECTOR * j) for j in range(4)])
        if self.largest == 15:
            return words
        fifth = e.load(at, offset=4 * VECTOR)
        return [with_bit(e, word, fifth, j, 4) for j, word in enumerate(words)]

    def offset(self, e: Emit) -> int:
        return 0 if self.least else (self.largest + 1) // 2


@dataclass(frozen=True, kw_only=True)
class Coded(Block32):
    """Four bits of each q, which number a value."""

    codes: Codes

    def words(self, e: Emit, at: Value) -> list[Value]:
        return self.codes.words(e, [e.load(at, offset=VECTOR * j) for j in range(4)])

    def offset(self, e: Emit) -> int:
        return self.codes.zero(e)

    def dot(self, e: Emit, words: list[Value], x: list[Value], total: Value) -> Value:
        if self.codes.signed(e):
            return e.dot_signed_bytes(list(zip(words, x)), total)
        return super().dot(e, words, x, total)


class Mx(Coded):
    """The scale is a power of two, a byte."""

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.load_e8m0_half(at, self.nbytes - LANES)]
