"""Weight formats with super-blocks of 256 elements; where their parts lie: `formats.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..simd.emitter import I16S, I32S, VECTOR, Emit, Value
from .block_unpacking import HALVES, NIBBLES, BlockK, Codes, with_bit

PLACE = (0, 2, 1, 3)  # of a sub-block's scale among its four, where there are sixteen
_SIXES = 0x30303030  # of four bytes, the top two bits of six


def _quarter(e: Emit, at: Value, first: int, run: int) -> list[Value]:
    """Bit pair ``run`` of the bytes in four vectors, of which the first is number ``first``."""
    vectors = [e.load(at, offset=VECTOR * (first + j)) for j in range(4)]
    return [e.mask(e.shr(v, 2 * run), 0x03030303) for v in vectors]


def _pairs(e: Emit, fours: list[Value]) -> list[Value]:
    """The numbers of sub-blocks, four in each vector, as `BlockK.offsets` wants them."""
    return [pair for four in fours for pair in e.split_bytes(four)]


# ----------------------------------------------------------------------------------- with minima


class Q4K(BlockK):
    """x = d scale q - dmin least."""

    minima = True
    place = (0, 1, 2, 3)  # of a sub-block's scale and minimum among their four

    def fours(self, e: Emit, at: Value) -> tuple[list[Value], list[Value]]:
        """Scales and minima, four in each vector; how they are split: see `quant_formats`."""
        low, high, mixed = (e.load(at, offset=2 * HALVES + VECTOR * k) for k in range(3))
        tops = [e.mask(e.shr(v, 2), _SIXES) for v in (low, high)]
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

    def _one(self, e: Emit, fours: list[Value], k: int) -> Value:
        return e.byte(fours[k // 4], self.place[k % 4])

    def scales(self, e: Emit, at: Value) -> list[Value]:
        fours = self.fours(e, at)[0]
        return [self._one(e, fours, k) for k in range(256 // self.sub)]

    def centre(self, e: Emit) -> int:
        return 8 if e.isa.vnni and self.sub == 32 and self.largest == 15 else 0

    def lifts(self, e: Emit, at: Value) -> list[Value]:
        pairs = _pairs(e, self.fours(e, at)[0])
        return [e.shl(pair, self.centre(e).bit_length() - 1) for pair in pairs]

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        return _pairs(e, self.fours(e, at)[1])

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.load_f16(at), e.load_f16(at, HALVES)]

    def join(self, e: Emit, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        least = e.mul(e.to_f32(offset), factors[1])
        return e.sub(e.mul(e.to_f32(total), factors[0]), least)

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        fours, (d, dmin) = self.fours(e, at), self.factors(e, at)
        for k, words in self.parts(e, at):
            scale, least = (e.to_f32(self._one(e, four, k)) for four in fours)
            scale, least = e.mul(scale, d), e.mul(least, dmin)
            for j in range(self.sub):
                q = e.to_f32(e.byte(words[j // 4], j % 4))
                yield self.sub * k + j, e.sub(e.mul(q, scale), least)


class Q5K(Q4K):
    """Bit k of byte i of the fifth bits belongs to element i of sub-block k."""

    _FIFTH = 2 * HALVES + 3 * VECTOR

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        fifth = [e.load(at, offset=self._FIFTH + VECTOR * j) for j in range(8)]
        for k, words in super().parts(e, at):
            yield k, [with_bit(e, word, five, k, 4) for word, five in zip(words, fifth)]


class Q2K(Q4K):
    place = PLACE
    _SCALES = 16 * VECTOR

    def fours(self, e: Emit, at: Value) -> tuple[list[Value], list[Value]]:
        both = [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(4)]
        return [e.mask(v, NIBBLES) for v in both], [e.mask(e.shr(v, 4), NIBBLES) for v in both]

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        for half in range(2):
            for side in range(2):
                for run in range(4):
                    words = _quarter(e, at, 8 * half + 4 * side, run)
                    yield 8 * half + 2 * run + side, words

    def factors(self, e: Emit, at: Value) -> list[Value]:
        first = self._SCALES + 4 * VECTOR
        return [e.load_f16(at, first), e.load_f16(at, first + HALVES)]


# -------------------------------------------------------------------------------- without minima


class Q6K(BlockK):
    """x = d scale (q - zero)."""

    minima = False
    zero = 32
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
                        six = e.b.or_(e.mask(nibble, NIBBLES), e.mask(moved, _SIXES))
                        vectors.append(six)
                for run, vectors in enumerate(runs):
                    yield 8 * h + 2 * run + side, vectors

    def fours(self, e: Emit, at: Value) -> list[Value]:
        """The signed scales, four in each vector."""
        return [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(4)]

    def scales(self, e: Emit, at: Value) -> list[Value]:
        fours = self.fours(e, at)
        return [e.signed_byte(fours[k // 4], PLACE[k % 4]) for k in range(16)]

    def centre(self, e: Emit) -> int:
        return self.zero if e.isa.vnni else 0

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        return _pairs(e, self.fours(e, at))

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.load_f16(at, self.nbytes - HALVES)]

    def join(self, e: Emit, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.shl(offset, self.zero.bit_length() - 1))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        scales, (d,) = self.scales(e, at), self.factors(e, at)
        for k, words in self.parts(e, at):
            scale = e.mul(e.to_f32(scales[k]), d)
            for j in range(16):
                q = e.b.sub(e.byte(words[j // 4], j % 4), e.i32(self.zero))
                yield 16 * k + j, e.mul(e.to_f32(q), scale)


class Q3K(Q6K):
    """Bit k of byte i of the third bits belongs to element i of 32, which are number k."""

    zero = 4
    _QUARTERS, _SCALES = 8, 24 * VECTOR

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        for half in range(2):
            for side in range(2):
                thirds = [e.load(at, offset=VECTOR * (4 * side + j)) for j in range(4)]
                for run in range(4):
                    low = _quarter(e, at, self._QUARTERS + 8 * half + 4 * side, run)
                    bit = 4 * half + run
                    words = [with_bit(e, word, third, bit, 2) for word, third in zip(low, thirds)]
                    yield 2 * bit + side, words

    def fours(self, e: Emit, at: Value) -> list[Value]:
        low = [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(2)]
        top = e.load(at, offset=self._SCALES + 2 * VECTOR)
        # Of four sixes z: the low halves z of the first two vectors, bit pair z of the third.
        tops = [e.shl(top, 4), e.shl(top, 2), top, e.shr(top, 2)]
        nibbles = [e.mask(v, NIBBLES) for v in (*low, *(e.shr(v, 4) for v in low))]
        sixes = [e.b.or_(v, e.mask(t, _SIXES)) for v, t in zip(nibbles, tops)]
        return [e.add_bytes(six, -32) for six in sixes]


@dataclass(frozen=True)
class IQ4XS(BlockK):
    """x = d scale value, four bits number a value."""

    minima = False
    codes: Codes

    def parts(self, e: Emit, at: Value) -> Iterator[tuple[int, list[Value]]]:
        first = 2 * HALVES + VECTOR
        for k in range(8):
            nibbles = [e.load(at, offset=first + VECTOR * (4 * k + j)) for j in range(4)]
            yield k, self.codes.words(e, nibbles)

    def scales(self, e: Emit, at: Value) -> list[Value]:
        low = e.load(at, offset=2 * HALVES)
        top = e.b.zext(e.load(at, I16S, HALVES), I32S)
        sixes = []
        for k in range(8):
            moved = e.shl(top, 4 - 2 * k) if k < 2 else e.shr(top, 2 * k - 4)
            sixes.append(e.b.or_(e.mask(e.shr(low, 4 * k), 15), e.mask(moved, 0x30)))
        return [e.b.sub(six, e.i32(32)) for six in sixes]

    def centre(self, e: Emit) -> int:
        return self.codes.zero(e) if e.isa.vnni else 0

    def offset(self, e: Emit) -> bool:
        return super().offset(e) and not self.codes.signed(e)

    def offsets(self, e: Emit, at: Value) -> list[Value]:
        scales = self.scales(e, at)
        return [e.pack_i16(scales[k], scales[k + 2]) for k in (0, 1, 4, 5)]

    def factors(self, e: Emit, at: Value) -> list[Value]:
        return [e.load_f16(at)]

    def dot(
        self, e: Emit, pairs: list[tuple[Value, Value]], scale: Value, total: Value | None
    ) -> Value:
        if self.codes.signed(e):
            return e.dot_signed_bytes_scaled(pairs, scale, total)
        return super().dot(e, pairs, scale, total)

    def join(self, e: Emit, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.b.mul(offset, e.i32(self.codes.zero(e))))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emit, at: Value) -> Iterator[tuple[int, Value]]:
        scales, (d,), zero = self.scales(e, at), self.factors(e, at), self.codes.zero(e)
        for k, words in self.parts(e, at):
            scale = e.mul(e.to_f32(scales[k]), d)
            for j in range(32):
                word, i = words[j // 4], j % 4
                q = e.b.sub(e.byte(word, i), e.i32(zero)) if zero else e.signed_byte(word, i)
                yield 32 * k + j, e.mul(e.to_f32(q), scale)
