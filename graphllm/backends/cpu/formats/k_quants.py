"""q2_k, q3_k, q4_k, q5_k and q6_k on the CPU: super-blocks of 256 elements.

Bytes of the scales of 16 sub-blocks (q2_k, q3_k, q6_k) are stored 0 2 1 3 in each four, so that
they unpack in few steps. Fields of a block of a tile, in vectors:

    q4_k   16 d, 16 dmin (together a vector); 3 of scales; 32 of q
    q5_k   16 d, 16 dmin; 3 of scales; 40 of q
    q2_k   16 of q; 4 of scales (low halves) and minima; 16 d, 16 dmin
    q3_k   24 of q; 3 of scales; 16 d
    q6_k   48 of q; 4 of scales; 16 d
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..runtime.isa import ISA
from ..simd.emitter import VECTOR, Emitter, Value
from .bit_layout import FIVE_BITS, FOUR_BITS, SIX_BITS, THREE_BITS, TWO_BITS, byte_bits
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
from .packed_format import (
    HALVES,
    NIBBLES,
    Block256,
    Field,
    PackedFormat,
    halves_of,
    register,
)

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

_SIXES = 0x30303030  # the top two bits of six in each of four bytes


def _runs(form: PackedFormat, rows: StoredRows, field: str) -> list[list[Value]]:
    """The words of a field, in runs of eight."""
    words = rows.words(form.span(field))
    return [words[first : first + 8] for first in range(0, len(words), 8)]


def _sub_scales(form: PackedFormat, rows: StoredRows, field: str, target: int) -> Iterator[Field]:
    """A field with a byte for each of 16 sub-blocks, in the order 0 2 1 3 of each four."""
    e = rows.e
    for offset, word in form.chunks(rows, field, target):
        second, third = e.shl(e.mask(word, 0xFF00), 8), e.mask(e.shr(word, 8), 0xFF00)
        yield Field(offset, e.b.or_(e.mask(word, 0xFF0000FF), e.b.or_(second, third)))


# ----------------------------------------------------------------------------------- with minima


class Q4K(Block256):
    """x = d * scale * q - dmin * minimum."""

    minima = True
    signed_scales = False
    folding = "scale"
    layout = FOUR_BITS
    words_at = 2 * HALVES + 3 * VECTOR

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.scalar(rows, "d", 0)
        yield from self.scalar(rows, "dmin", HALVES)
        yield from self.chunks(rows, "scales", 2 * HALVES)

    def _sixes(self, e: Emitter, at: Value, z: int, minima: int) -> Value:
        """Half z of the scales or of the minima, from the bits that `graphllm.formats.k_quants`
        describes."""
        first = e.load(at, offset=2 * HALVES + VECTOR * minima)
        if z == 0:
            return e.mask(first, 0x3F3F3F3F)
        last = e.mask(e.shr(e.load(at, offset=2 * HALVES + 2 * VECTOR), 4 * minima), NIBBLES)
        return e.b.or_(last, e.mask(e.shr(first, 2), _SIXES))

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return self._sixes(e, at, z, 0)

    def offset_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return self._sixes(e, at, z, 1)

    def stored_words(self, rows: StoredRows) -> list[Value]:
        halves = ((run, 4 * half) for run in _runs(self, rows, "q") for half in range(2))
        return [byte_bits(rows.e, word, shift, 4) for run, shift in halves for word in run]

    def zero_point(self, e: Emitter) -> int:
        return 8 if e.isa.vnni and self.sub == 32 and self.largest == 15 else 0

    def corrections(self, e: Emitter, at: Value) -> list[Value]:
        pairs = self.pairs(e, [self.scale_bytes(e, at, z) for z in range(2)])
        return [e.shl(pair, self.zero_point(e).bit_length() - 1) for pair in pairs]

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at), e.load_f16(at, HALVES)]

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        least = e.mul(e.to_f32(offset), factors[1])
        return e.sub(e.mul(e.to_f32(total), factors[0]), least)

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        d, dmin = self.factors(e, at)
        scale = self.float_scales(e, partial(self.scale_bytes, e, at), d)
        least = self.float_scales(e, partial(self.offset_bytes, e, at), dmin)
        for j, word in self.all_words(e, at):
            k = 4 * j // self.sub
            for i in range(4):
                q = e.to_f32(e.byte(word, i))
                yield 4 * j + i, e.sub(e.mul(q, scale(k)), least(k))


class Q5K(Q4K):
    """As q4_k, with fifth bits: bit k of byte i belongs to element i of sub-block k."""

    layout = FIVE_BITS

    def stored_words(self, rows: StoredRows) -> list[Value]:
        e, (high,) = rows.e, _runs(self, rows, "high")
        fifths = [byte_bits(e, word, k, 1, to=4) for k in range(8) for word in high]
        return [e.b.or_(*each) for each in zip(super().stored_words(rows), fifths)]


class Q2K(Q4K):
    """As q4_k, with bit pairs, and scales and minima of four bits."""

    folding = "byte"
    layout = TWO_BITS
    words_at = 0
    _SCALES = 16 * VECTOR
    _FACTORS = _SCALES + 4 * VECTOR

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from _sub_scales(self, rows, "scales", self._SCALES)
        yield from self.scalar(rows, "d", self._FACTORS)
        yield from self.scalar(rows, "dmin", self._FACTORS + HALVES)

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return halves_of(e, e.load(at, offset=self._SCALES + VECTOR * z))[0]

    def offset_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return halves_of(e, e.load(at, offset=self._SCALES + VECTOR * z))[1]

    def stored_words(self, rows: StoredRows) -> list[Value]:
        pairs = ((run, 2 * i) for run in _runs(self, rows, "q") for i in range(4))
        return [byte_bits(rows.e, word, shift, 2) for run, shift in pairs for word in run]

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at, self._FACTORS), e.load_f16(at, self._FACTORS + HALVES)]


# -------------------------------------------------------------------------------- without minima


class Q6K(Block256):
    """x = d * scale * (q - offset)."""

    minima = False
    signed_scales = True
    offset = 32
    layout = SIX_BITS
    _SCALES = 48 * VECTOR

    def in_place_tokens(self, target: ISA) -> int:
        return min(4, super().in_place_tokens(target))  # unpacking takes the most instructions

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from _sub_scales(self, rows, "scales", self._SCALES)
        yield from self.scalar(rows, "d", self._factors_at())

    def _factors_at(self) -> int:
        return self.nbytes - HALVES

    def stored_words(self, rows: StoredRows) -> list[Value]:
        e, low, found = rows.e, _runs(self, rows, "q"), []
        for half, tops in enumerate(_runs(self, rows, "high")):
            for i in range(4):
                for nibbles, top in zip(low[2 * half + i % 2], tops):
                    four = byte_bits(e, nibbles, i // 2 * 4, 4)
                    found.append(e.b.or_(four, byte_bits(e, top, 2 * i, 2, to=4)))
        return found

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return e.load(at, offset=self._SCALES + VECTOR * z)

    def zero_point(self, e: Emitter) -> int:
        return self.offset if e.isa.vnni else 0

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at, self._factors_at())]

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.shl(offset, self.offset.bit_length() - 1))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        (d,) = self.factors(e, at)
        scale = self.float_scales(e, partial(self.scale_bytes, e, at), d)
        for j, word in self.all_words(e, at):
            for i in range(4):
                q = e.b.sub(e.byte(word, i), e.i32(self.offset))
                yield 4 * j + i, e.mul(e.to_f32(q), scale(4 * j // self.sub))


class Q3K(Q6K):
    """As q6_k, with bit pairs and third bits: bit k of byte i belongs to element 32 k + i."""

    folding = "negated"
    offset = 4
    layout = THREE_BITS
    _SCALES = 24 * VECTOR

    def stored_words(self, rows: StoredRows) -> list[Value]:
        e, pairs, found = rows.e, _runs(self, rows, "q"), []
        (tops,) = _runs(self, rows, "high")
        for k in range(8):
            for pair, top in zip(pairs[k // 4], tops):
                two = byte_bits(e, pair, k % 4 * 2, 2)
                found.append(e.b.or_(two, byte_bits(e, top, k, 1, to=2)))
        return found

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        low = halves_of(e, e.load(at, offset=self._SCALES + VECTOR * (z % 2)))[z // 2]
        top = e.load(at, offset=self._SCALES + 2 * VECTOR)  # bit pair z of its bytes
        moved = e.shl(top, 4 - 2 * z) if z < 2 else e.shr(top, 2 * z - 4)
        return e.add_bytes(e.b.or_(low, e.mask(moved, _SIXES)), -32)


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
