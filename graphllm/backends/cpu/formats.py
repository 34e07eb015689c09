"""Weight formats in R16 form, as microkernels read them.

R16 holds 16 rows of a matrix together, in the bytes of GGUF's blocks (source of the formats: ggml,
`ggml-common.h`), cut into chunks of four: a vector is one chunk of 16 rows, so lane = row, each
activation is one broadcast and no sum crosses lanes. A group of 16 rows follows the other; within
it, block follows block. Per block of 16 rows:

    q8_0   8 vectors of int8; 16 d
    q4_0   4 vectors of nibbles (low: elements 0..15, high: 16..31); 16 d
    q5_0   4 vectors of nibbles; 1 of fifth bits; 16 d
    q4_1   as q4_0, and 16 m at the end
    q5_1   as q5_0, and 16 m at the end
    q4_k   16 d; 16 dmin; 3 vectors of scales; 32 of nibbles
    q5_k   16 d; 16 dmin; 3 vectors of scales; 8 of fifth bits; 32 of nibbles
    q6_k   16 times (half h, chunk j): top bits, low nibbles of runs 0 and 2, of runs 1 and 3;
           4 vectors of scales; 16 d
    f32, f16, bf16   16 elements, for each k

Two things are moved so that they unpack in few steps: bit 8 b + j of q5_0's and q5_1's fifth bits
belongs to element 4 j + b, and q6_k's scales are stored 0 2 1 3 in each four. `layouts.py` packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .simd import SIGN_BITS, VECTOR, Emit, Value

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


# ----------------------------------------------------------------------------------- plain formats


@dataclass(frozen=True)
class Plain(Format):
    """Elements as they are; a block is one k."""

    load: str  # the method of Emit that reads them

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, getattr(e, self.load)(at)


# ------------------------------------------------------------------------------------- blocks of 32


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
        return [e.halves(at, self.nbytes - HALVES * (count - i)) for i in range(count)]

    def dot(self, e: Emit, words: list[Value], x: list[Value]) -> Value:
        return e.dot(list(zip(words, x)), self.largest)

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        (d, *m), offset = self.factors(e, at), self.offset(e)
        for j, word in enumerate(self.words(e, at)):
            for i in range(4):
                q = e.byte(word, i) if offset or m else e.signed_byte(word, i)
                q = e.b.sub(q, e.i32(offset)) if offset else q
                x = e.mul(e.to_f32(q), d)
                yield 4 * j + i, e.add(x, m[0]) if m else x


class Q8(Block32):
    """VNNI multiplies unsigned by signed bytes, so there q + 128 is used; else the sign is."""

    def words(self, e: Emit, at: Value) -> list[Value]:
        words = [e.load(at, offset=VECTOR * j) for j in range(8)]
        return [e.b.xor(w, e.i32(SIGN_BITS)) for w in words] if e.isa.vnni else words

    def offset(self, e: Emit) -> int:
        return 128 if e.isa.vnni else 0

    def dot(self, e: Emit, words: list[Value], x: list[Value]) -> Value:
        return super().dot(e, words, x) if e.isa.vnni else e.dot_signed(list(zip(words, x)))


class Nibbles(Block32):
    """Four bits of each q, and a vector of fifth ones where q goes up to 31."""

    def words(self, e: Emit, at: Value) -> list[Value]:
        nibbles = [e.load(at, offset=VECTOR * j) for j in range(4)]
        low = [e.mask(v, NIBBLES) for v in nibbles]
        words = low + [e.mask(e.shr(v, 4), NIBBLES) for v in nibbles]
        if self.largest == 15:
            return words
        fifth = e.load(at, offset=4 * VECTOR)
        return [_with_fifth(e, word, fifth, j) for j, word in enumerate(words)]

    def offset(self, e: Emit) -> int:
        return 0 if self.least else (self.largest + 1) // 2


def _with_fifth(e: Emit, word: Value, fifth: Value, bit: int) -> Value:
    """Bit ``bit`` of each byte of ``fifth`` put above the nibble in that byte of ``word``."""
    moved = e.shl(fifth, 4 - bit) if bit < 4 else e.shr(fifth, bit - 4)
    return e.b.or_(word, e.mask(moved, 0x10101010))


# ------------------------------------------------------------------------------------ super-blocks


@dataclass(frozen=True)
class BlockK(Format):
    """256 elements with a scale each ``sub``: x = d scale q - (what does not depend on q)."""

    sub: int
    largest: int

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        """(sub-block, its vectors of q), each once, in the order that loads least."""
        raise NotImplementedError

    def scales(self, e: Emit, at: Value) -> list[Value]:
        """The integer scales of the sub-blocks."""
        raise NotImplementedError

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        """Eight vectors of int16 pairs, that go with the sums of q over each 16 activations."""
        raise NotImplementedError

    def factors(self, e: Emit, at: Value) -> list[Value]:
        """Float scales, f32x16."""
        raise NotImplementedError

    def join(self, e: Emit, total: Value, offset: Value, factors: list[Value]) -> Value:
        """The block's share of the result, without the activation's scale, as f32x16.

        ``total``: sum of scale * q * activation; ``offset``: sum of `offsets` * activation sums.
        """
        raise NotImplementedError


class Q4K(BlockK):
    def _sixes(self, e: Emit, at: Value) -> tuple[list[Value], list[Value]]:
        """Scales and minima, four in each vector; how they are split: see `graphllm.quant`."""
        low, high, mixed = (e.load(at, offset=2 * HALVES + VECTOR * k) for k in range(3))
        tops = [e.mask(e.shr(v, 2), 0x30303030) for v in (low, high)]
        last = [e.mask(mixed, NIBBLES), e.mask(e.shr(mixed, 4), NIBBLES)]
        return (
            [e.mask(low, 0x3F3F3F3F), e.b.or_(last[0], tops[0])],
            [e.mask(high, 0x3F3F3F3F), e.b.or_(last[1], tops[1])],
        )

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        first = self.nbytes - 32 * VECTOR
        for c in range(4):
            both = [e.load(at, offset=first + VECTOR * (8 * c + j)) for j in range(8)]
            yield 2 * c, [e.mask(v, NIBBLES) for v in both]
            yield 2 * c + 1, [e.mask(e.shr(v, 4), NIBBLES) for v in both]

    def scales(self, e: Emit, at: Value) -> list[Value]:
        fours = self._sixes(e, at)[0]
        return [e.byte(fours[k // 4], k % 4) for k in range(8)]

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        fours = self._sixes(e, at)[1]
        return [e.twice(e.byte(fours[k // 4], k % 4)) for k in range(8)]

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.halves(at), e.halves(at, HALVES)]

    def join(self, e: Emit, total: Value, offset: Value, factors: list[Value]) -> Value:
        least = e.mul(e.to_f32(offset), factors[1])
        return e.sub(e.mul(e.to_f32(total), factors[0]), least)

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        fours, (d, dmin) = self._sixes(e, at), self.factors(e, at)
        for k, words in self.parts(e, at):
            scale, least = (e.to_f32(e.byte(four[k // 4], k % 4)) for four in fours)
            scale, least = e.mul(scale, d), e.mul(least, dmin)
            for j in range(32):
                q = e.to_f32(e.byte(words[j // 4], j % 4))
                yield 32 * k + j, e.sub(e.mul(q, scale), least)


class Q5K(Q4K):
    """Bit k of byte i of the fifth bits belongs to element i of sub-block k."""

    _FIFTH = 2 * HALVES + 3 * VECTOR

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        fifth = [e.load(at, offset=self._FIFTH + VECTOR * j) for j in range(8)]
        for k, words in super().parts(e, at):
            yield k, [_with_fifth(e, word, five, k) for word, five in zip(words, fifth)]


class Q6K(BlockK):
    _SCALES = 48 * VECTOR

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        for h in range(2):
            for side in range(2):
                runs: list[list[Value]] = [[] for _ in range(4)]
                for j in range(4 * side, 4 * side + 4):
                    first = 3 * VECTOR * (8 * h + j)
                    top, *low = (e.load(at, offset=first + VECTOR * z) for z in range(3))
                    for run, vectors in enumerate(runs):
                        moved = e.shl(top, 4 - 2 * run) if run < 2 else e.shr(top, 2 * run - 4)
                        nibble = e.shr(low[run % 2], 4 * (run // 2))
                        six = e.b.or_(e.mask(nibble, NIBBLES), e.mask(moved, 0x30303030))
                        vectors.append(six)
                for run, vectors in enumerate(runs):
                    yield 8 * h + 2 * run + side, vectors

    def scales(self, e: Emit, at: Value) -> list[Value]:
        fours = [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(4)]
        place = (0, 2, 1, 3)  # of a scale among its four
        return [e.signed_byte(fours[k // 4], place[k % 4]) for k in range(16)]

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        pairs: list[Value] = []
        for z in range(4):
            four = e.load(at, offset=self._SCALES + VECTOR * z)
            pairs += e.split_bytes(four)
        return pairs

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.halves(at, self._SCALES + 4 * VECTOR)]

    def join(self, e: Emit, total: Value, offset: Value, factors: list[Value]) -> Value:
        return e.mul(e.to_f32(e.b.sub(total, e.shl(offset, 5))), factors[0])

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        scales, (d,) = self.scales(e, at), self.factors(e, at)
        for k, words in self.parts(e, at):
            scale = e.mul(e.to_f32(scales[k]), d)
            for j in range(16):
                q = e.b.sub(e.byte(words[j // 4], j % 4), e.i32(32))
                yield 16 * k + j, e.mul(e.to_f32(q), scale)


FORMATS: dict[str, Any] = {
    f.name: f
    for f in (
        Plain("f32", 0, 1, 64, "load_f32"),
        Plain("f16", 1, 1, 32, "halves"),
        Plain("bf16", 2, 1, 32, "brains"),
        Q8("q8_0", 3, 32, 16 * 34, 255),
        Nibbles("q5_0", 4, 32, 16 * 22, 31),
        Q4K("q4_k", 5, 256, 16 * 144, 32, 15),
        Q6K("q6_k", 6, 256, 16 * 210, 16, 63),
        Nibbles("q4_0", 7, 32, 16 * 18, 15),
        Nibbles("q4_1", 8, 32, 16 * 20, 15, True),
        Nibbles("q5_1", 9, 32, 16 * 24, 31, True),
        Q5K("q5_k", 10, 256, 16 * 176, 32, 31),
    )
}
BY_CODE: dict[int, Any] = {f.code: f for f in FORMATS.values()}
