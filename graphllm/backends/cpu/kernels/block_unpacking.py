"""What a weight format has to say to the microkernels, in the shapes that formats have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..simd.emitter import Emit, Value

HALVES = 32  # bytes of 16 float16
NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True)
class Format:
    """A weight format. ``code`` names it to intrinsics, which take integers only."""

    name: str
    code: int
    block: int  # elements of a row
    nbytes: int  # bytes of a block of 16 rows

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        """(k, element k of each row as f32x16) of one block."""
        raise NotImplementedError


@dataclass(frozen=True)
class Plain(Format):
    """Elements as they are; a block is one k."""

    load: str  # the method of Emit that reads them

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, getattr(e, self.load)(at)


@dataclass(frozen=True)
class Block32(Format):
    """Integers with one scale for 32 elements: x = d (q - offset), or x = d q + m."""

    largest: int  # of q, where it is unsigned
    least: bool = False  # has an m; then the offset is 0

    def words(self, e: Emit, at: Value) -> list[Value]:
        """Eight vectors of q, elements 4 j .. 4 j + 3 in vector j."""
        raise NotImplementedError

    def offset(self, e: Emit) -> int:
        raise NotImplementedError

    def factors(self, e: Emit, at: Value) -> list[Value]:
        """d, and m where there is one, f32x16."""
        count = 2 if self.least else 1
        return [e.load_f16(at, self.nbytes - HALVES * (count - i)) for i in range(count)]

    def dot(self, e: Emit, words: list[Value], x: list[Value], total: Value) -> Value:
        """``total`` plus the sum of q times activations in each lane."""
        return e.dot_bytes(list(zip(words, x)), self.largest, total)

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        (d, *m), offset = self.factors(e, at), self.offset(e)
        for j, word in enumerate(self.words(e, at)):
            for i in range(4):
                q = e.byte(word, i) if offset or m else e.signed_byte(word, i)
                q = e.b.sub(q, e.i32(offset)) if offset else q
                x = e.mul(e.to_f32(q), d)
                yield 4 * j + i, e.add(x, m[0]) if m else x


@dataclass(frozen=True)
class BlockK(Format):
    """256 elements with a scale each ``sub``: x = d scale q - (what does not depend on q)."""

    sub: int
    largest: int
    minima: ClassVar[bool]  # whether what does not depend on q has factors of its own

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        """(sub-block, its vectors of q), each once, in the order that loads least."""
        raise NotImplementedError

    def scales(self, e: Emit, at: Value) -> list[Value]:
        """The integer scales of the sub-blocks."""
        raise NotImplementedError

    def centre(self, e: Emit) -> int:
        """What dots with VNNI take away from q, by beginning at so many sums of activations less:
        for less work later, or for dots that fit int16."""
        return 0

    def narrow(self, e: Emit) -> bool:
        """Whether the dot of a sub-block fits int16 and is to be scaled as such."""
        most = max(self.largest - self.centre(e), self.centre(e))
        return e.isa.vnni and self.sub * most * 127 < 1 << 15

    def lifted(self, e: Emit) -> bool:
        """Whether there are lifts."""
        return self.minima and self.centre(e) != 0

    def lifts(self, e: Emit, at: Value) -> list[Value]:
        """Pairs as `offsets`; their share makes up for the centre where the format has none."""
        raise NotImplementedError

    def offset(self, e: Emit) -> bool:
        """Whether there are offsets."""
        return self.minima or self.centre(e) == 0

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        """Vectors of int16 pairs that go with pairs of sums of activations: with sub-blocks of 16,
        eight (sums 0 1, 2 3, ...); with sub-blocks of 32, four (sums 0 2, 1 3, 4 6, 5 7)."""
        raise NotImplementedError

    def factors(self, e: Emit, at: Value) -> list[Value]:
        """Float scales, f32x16."""
        raise NotImplementedError

    def join(self, e: Emit, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        """The block's share of the result, without the activation's scale, as f32x16.

        ``total``: sum of scale * q * activation; ``offset``: sum of `offsets` * activation sums,
        if there are any.
        """
        raise NotImplementedError

    def dot(
        self, e: Emit, pairs: list[tuple[Value, Value]], scale: Value, total: Value | None
    ) -> Value:
        """``total`` plus, in each lane, q times activations times a scale: `Emit.scale_form`.
        Not for VNNI."""
        return e.dot_bytes_scaled(pairs, self.largest, scale, total)


def halves_of(e: Emit, nibbles: list[Value]) -> list[Value]:
    """The low halves of all bytes, then the high ones."""
    high = [e.mask(e.shr(v, 4), NIBBLES) for v in nibbles]
    return [e.mask(v, NIBBLES) for v in nibbles] + high


def with_bit(e: Emit, word: Value, bits: Value, bit: int, place: int) -> Value:
    """Bit ``bit`` of each byte of ``bits`` as bit ``place`` of that byte of ``word``."""
    moved = e.shl(bits, place - bit) if bit < place else e.shr(bits, bit - place)
    return e.b.or_(word, e.mask(moved, 0x01010101 << place))


@dataclass(frozen=True)
class Codes:
    """What four bits stand for, as bytes; unsigned and ``zero`` too large where that is faster."""

    values: tuple[int, ...]

    @property
    def largest(self) -> int:
        """Of the unsigned bytes."""
        return max(self.values) - min(self.values)

    def signed(self, e: Emit) -> bool:
        """Large unsigned bytes are for VNNI: without it `Emit.dot` has to split them."""
        return not e.isa.vnni and 2 * self.largest * 127 >= 1 << 15

    def zero(self, e: Emit) -> int:
        return 0 if self.signed(e) else -min(self.values)

    def words(self, e: Emit, nibbles: list[Value]) -> list[Value]:
        """`halves_of`, looked up."""
        table = [(v + self.zero(e)) & 0xFF for v in self.values]
        return [e.lookup_bytes(half, table) for half in halves_of(e, nibbles)]
