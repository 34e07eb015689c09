"""q2_k, q3_k, q4_k, q5_k and q6_k on the CPU: super-blocks of 256 elements.

Bytes of the scales of 16 sub-blocks (q2_k, q3_k, q6_k) are stored 0 2 1 3 in each four, so that
they unpack in few steps. Fields of a block of a tile, in vectors:

    q4_k   16 d, 16 dmin (together a vector); 3 of scales; 32 of nibbles
    q5_k   16 d, 16 dmin; 3 of scales; 8 of fifth bits; 32 of nibbles
    q2_k   16 of bit pairs; 4 of scales (low halves) and minima; 16 d, 16 dmin
    q3_k   8 of third bits; 16 of bit pairs; 3 of scales; 16 d
    q6_k   16 times (half h, chunk j): top bits, low nibbles of runs 0 and 2, of runs 1 and 3;
           4 of scales; 16 d
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..simd.emitter import VECTOR, Emitter, Value
from .encoder import (
    BIT_PAIRS,
    BlockEncoder,
    FittedScales,
    fit_largest,
    fit_span,
    join_bits,
    lanes_from,
    quantized_steps,
    store_bit_pairs,
    store_bits,
    store_nibbles_of,
)
from .packed_format import HALVES, NIBBLES, Block256, Move, PackedFormat, register, with_bit

_ORDER = (0, 2, 1, 3)  # of the scales in each four, in formats with 16 sub-blocks
_SIXES = 0x30303030  # the top two bits of six in each of four bytes


def _quarter(e: Emitter, at: Value, first: int, run: int) -> list[Value]:
    """Bit pair ``run`` of the bytes of vectors ``first`` to ``first + 3``."""
    vectors = [e.load(at, offset=VECTOR * (first + j)) for j in range(4)]
    return [e.mask(e.shr(v, 2 * run), 0x03030303) for v in vectors]


def _sub_scales(form: PackedFormat, field: str, target: int) -> list[Move]:
    """Moves of a field with a byte for each of 16 sub-blocks, in the order 0 2 1 3 of each four."""
    start, size = form.span(field)
    return [Move(start + k, target + k // 4 * VECTOR + _ORDER[k % 4], 1, 4) for k in range(size)]


def _pairs(e: Emitter, packed: list[Value]) -> list[Value]:
    """Bytes of sub-blocks, four in each lane, as the int16 pairs of `Block256.offsets`."""
    return [pair for each in packed for pair in e.split_bytes(each)]


# ----------------------------------------------------------------------------------- with minima


class Q4K(Block256):
    """x = d * scale * q - dmin * minimum."""

    minima = True
    place = (0, 1, 2, 3)  # of a sub-block's scale and minimum among their four

    def moves(self) -> list[Move]:
        scales = [*self.scalar("d", 0), *self.scalar("dmin", HALVES)]
        scales += self.chunks("scales", 2 * HALVES)
        return [*scales, *self.chunks("q", self.nbytes - 32 * VECTOR)]

    def packed_scales(self, e: Emitter, at: Value) -> tuple[list[Value], list[Value]]:
        """Vectors of scales and of minima, a byte each, from the bits that
        `graphllm.formats.k_quants` describes."""
        low, high, mixed = (e.load(at, offset=2 * HALVES + VECTOR * k) for k in range(3))
        tops = [e.mask(e.shr(v, 2), _SIXES) for v in (low, high)]
        last = [e.mask(mixed, NIBBLES), e.mask(e.shr(mixed, 4), NIBBLES)]
        return (
            [e.mask(low, 0x3F3F3F3F), e.b.or_(last[0], tops[0])],
            [e.mask(high, 0x3F3F3F3F), e.b.or_(last[1], tops[1])],
        )

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
        first = self.nbytes - 32 * VECTOR
        for c in range(4):
            both = [e.load(at, offset=first + VECTOR * (8 * c + j)) for j in range(8)]
            yield 2 * c, [e.mask(v, NIBBLES) for v in both]
            yield 2 * c + 1, [e.mask(e.shr(v, 4), NIBBLES) for v in both]

    def _scale(self, e: Emitter, packed: list[Value], k: int) -> Value:
        return e.byte(packed[k // 4], self.place[k % 4])

    def scales(self, e: Emitter, at: Value) -> list[Value]:
        packed = self.packed_scales(e, at)[0]
        return [self._scale(e, packed, k) for k in range(256 // self.sub)]

    def zero_point(self, e: Emitter) -> int:
        return 8 if e.isa.vnni and self.sub == 32 and self.largest == 15 else 0

    def corrections(self, e: Emitter, at: Value) -> list[Value]:
        pairs = _pairs(e, self.packed_scales(e, at)[0])
        return [e.shl(pair, self.zero_point(e).bit_length() - 1) for pair in pairs]

    def offsets(self, e: Emitter, at: Value) -> list[Value]:
        return _pairs(e, self.packed_scales(e, at)[1])

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at), e.load_f16(at, HALVES)]

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        least = e.mul(e.to_f32(offset), factors[1])
        return e.sub(e.mul(e.to_f32(total), factors[0]), least)

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        packed, (d, dmin) = self.packed_scales(e, at), self.factors(e, at)
        for k, words in self.sub_blocks(e, at):
            scale, least = (e.to_f32(self._scale(e, each, k)) for each in packed)
            scale, least = e.mul(scale, d), e.mul(least, dmin)
            for j in range(self.sub):
                q = e.to_f32(e.byte(words[j // 4], j % 4))
                yield self.sub * k + j, e.sub(e.mul(q, scale), least)


class Q5K(Q4K):
    """As q4_k, with fifth bits: bit k of byte i belongs to element i of sub-block k."""

    _FIFTH = 2 * HALVES + 3 * VECTOR

    def moves(self) -> list[Move]:
        return [*super().moves(), *self.chunks("high", self._FIFTH)]

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
        fifth = [e.load(at, offset=self._FIFTH + VECTOR * j) for j in range(8)]
        for k, words in super().sub_blocks(e, at):
            yield k, [with_bit(e, word, five, k, 4) for word, five in zip(words, fifth)]


class Q2K(Q4K):
    """As q4_k, with bit pairs, and scales and minima of four bits."""

    place = _ORDER
    _SCALES = 16 * VECTOR
    _FACTORS = _SCALES + 4 * VECTOR

    def moves(self) -> list[Move]:
        factors = [*self.scalar("d", self._FACTORS), *self.scalar("dmin", self._FACTORS + HALVES)]
        return [*self.chunks("q", 0), *_sub_scales(self, "scales", self._SCALES), *factors]

    def packed_scales(self, e: Emitter, at: Value) -> tuple[list[Value], list[Value]]:
        both = [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(4)]
        return [e.mask(v, NIBBLES) for v in both], [e.mask(e.shr(v, 4), NIBBLES) for v in both]

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
        for half in range(2):
            for side in range(2):
                for run in range(4):
                    words = _quarter(e, at, 8 * half + 4 * side, run)
                    yield 8 * half + 2 * run + side, words

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at, self._FACTORS), e.load_f16(at, self._FACTORS + HALVES)]


# -------------------------------------------------------------------------------- without minima


class Q6K(Block256):
    """x = d * scale * (q - offset)."""

    minima = False
    offset = 32
    _SCALES = 48 * VECTOR

    def moves(self) -> list[Move]:
        (low, _), (high, _), step = self.span("q"), self.span("high"), 3 * VECTOR
        found = [*_sub_scales(self, "scales", self._SCALES), *self.scalar("d", self._factors_at())]
        for h in range(2):
            for j in range(8):
                at = (8 * h + j) * step
                found.append(Move(high + 32 * h + 4 * j, at, 4, 4))
                for z in range(2):
                    found.append(Move(low + 64 * h + 32 * z + 4 * j, at + (1 + z) * VECTOR, 4, 4))
        return found

    def _factors_at(self) -> int:
        return self.nbytes - HALVES

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
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

    def packed_scales(self, e: Emitter, at: Value) -> list[Value]:
        """Vectors of the signed scales, a byte each."""
        return [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(4)]

    def scales(self, e: Emitter, at: Value) -> list[Value]:
        packed = self.packed_scales(e, at)
        return [e.signed_byte(packed[k // 4], _ORDER[k % 4]) for k in range(16)]

    def zero_point(self, e: Emitter) -> int:
        return self.offset if e.isa.vnni else 0

    def offsets(self, e: Emitter, at: Value) -> list[Value]:
        return _pairs(e, self.packed_scales(e, at))

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at, self._factors_at())]

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.shl(offset, self.offset.bit_length() - 1))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        scales, (d,) = self.scales(e, at), self.factors(e, at)
        for k, words in self.sub_blocks(e, at):
            scale = e.mul(e.to_f32(scales[k]), d)
            for j in range(16):
                q = e.b.sub(e.byte(words[j // 4], j % 4), e.i32(self.offset))
                yield 16 * k + j, e.mul(e.to_f32(q), scale)


class Q3K(Q6K):
    """As q6_k, with bit pairs and third bits: bit k of byte i belongs to element 32 k + i."""

    offset = 4
    _QUARTERS, _SCALES = 8, 24 * VECTOR

    def moves(self) -> list[Move]:
        bits = [*self.chunks("high", 0), *self.chunks("q", self._QUARTERS * VECTOR)]
        scales = _sub_scales(self, "scales", self._SCALES)
        return [*bits, *scales, *self.scalar("d", self._factors_at())]

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
        for half in range(2):
            for side in range(2):
                thirds = [e.load(at, offset=VECTOR * (4 * side + j)) for j in range(4)]
                for run in range(4):
                    low = _quarter(e, at, self._QUARTERS + 8 * half + 4 * side, run)
                    bit = 4 * half + run
                    words = [with_bit(e, word, third, bit, 2) for word, third in zip(low, thirds)]
                    yield 2 * bit + side, words

    def packed_scales(self, e: Emitter, at: Value) -> list[Value]:
        low = [e.load(at, offset=self._SCALES + VECTOR * z) for z in range(2)]
        top = e.load(at, offset=self._SCALES + 2 * VECTOR)
        # Vector z of scales: half z of the two vectors `low`, and bit pair z of `top`.
        tops = [e.shl(top, 4), e.shl(top, 2), top, e.shr(top, 2)]
        nibbles = [e.mask(v, NIBBLES) for v in (*low, *(e.shr(v, 4) for v in low))]
        sixes = [e.b.or_(v, e.mask(t, _SIXES)) for v, t in zip(nibbles, tops)]
        return [e.add_bytes(six, -32) for six in sixes]


# --------------------------------------------------------------------------------------- encoding


def _encode_q2_k(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_span(e, vectors, 16, 3, 15)
    e.store_nibbles(fitted.scale, fitted.low, at, 0)
    store_bit_pairs(e, quantized_steps(e, vectors, 16, fitted, 0, 3), at, 16)
    e.store_half(fitted.d, 0, at, 80)
    e.store_half(fitted.dmin, 0, at, 82)
    return e.not_finite(vectors)


def _store_k_scales(e: BlockEncoder, fitted: FittedScales, at: Value) -> None:
    """The 16 bytes of d, dmin and scales: see `graphllm.formats.k_quants`."""
    e.store_half(fitted.d, 0, at, 0)
    e.store_half(fitted.dmin, 0, at, 2)
    scale, low = fitted.scale, fitted.low
    last, last_low = lanes_from(e, scale, 4), lanes_from(e, low, 4)
    e.store_bytes(e.b.or_(scale, e.shl(e.shr(last, 4), 6)), at, 4, 4)
    e.store_bytes(e.b.or_(low, e.shl(e.shr(last_low, 4), 6)), at, 8, 4)
    e.store_bytes(e.b.or_(e.mask(last, 15), e.shl(last_low, 4)), at, 12, 4)


def _encode_q4_k(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_span(e, vectors, 32, 15, 63)
    _store_k_scales(e, fitted, at)
    store_nibbles_of(e, quantized_steps(e, vectors, 32, fitted, 0, 15), 2, at, 16)
    return e.not_finite(vectors)


def _encode_q5_k(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_span(e, vectors, 32, 31, 63)
    _store_k_scales(e, fitted, at)
    q = quantized_steps(e, vectors, 32, fitted, 0, 31)
    store_bits(e, [e.shr(x, 4) for x in q], at, 16)
    store_nibbles_of(e, [e.mask(x, 15) for x in q], 2, at, 48)
    return e.not_finite(vectors)


def _encode_q3_k(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_largest(e, vectors, 16, -4, 32)
    six = e.b.add(fitted.scale, e.i32(32))
    nibbles, top = e.mask(six, 15), e.shr(six, 4)
    e.store_bytes(e.b.or_(nibbles, e.shl(lanes_from(e, nibbles, 8), 4)), at, 96, 8)
    parts = [top, *(lanes_from(e, top, first) for first in (4, 8, 12))]
    e.store_bytes(join_bits(e, parts, BIT_PAIRS), at, 104, 4)
    e.store_half(fitted.d, 0, at, 108)
    q = [e.b.add(x, e.i32(4)) for x in quantized_steps(e, vectors, 16, fitted, -4, 3)]
    store_bits(e, [e.shr(x, 2) for x in q], at, 0)
    store_bit_pairs(e, [e.mask(x, 3) for x in q], at, 32)
    return e.not_finite(vectors)


def _encode_q6_k(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_largest(e, vectors, 16, -32, 128)
    e.store_bytes(fitted.scale, at, 192)
    e.store_half(fitted.d, 0, at, 208)
    q = [e.b.add(x, e.i32(32)) for x in quantized_steps(e, vectors, 16, fitted, -32, 31)]
    store_nibbles_of(e, [e.mask(x, 15) for x in q], 4, at, 0)
    store_bit_pairs(e, [e.shr(x, 4) for x in q], at, 128)
    return e.not_finite(vectors)


register(Q2K(name="q2_k", sub=16, largest=3, encode=_encode_q2_k))
register(Q3K(name="q3_k", sub=16, largest=7, encode=_encode_q3_k))
register(Q4K(name="q4_k", sub=32, largest=15, encode=_encode_q4_k))
register(Q5K(name="q5_k", sub=32, largest=31, encode=_encode_q5_k))
register(Q6K(name="q6_k", sub=16, largest=63, encode=_encode_q6_k))
