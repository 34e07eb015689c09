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

from ..simd.emitter import I32, VECTOR, Emitter, Value
from ..simd.vectors import vector
from .bit_layout import FIVE_BITS, FOUR_BITS, SIX_BITS, THREE_BITS, TWO_BITS, stored_run
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
    SCALE_ORDER,
    Block256,
    Move,
    PackedFormat,
    halves_of,
    register,
)

_SIXES = 0x30303030  # the top two bits of six in each of four bytes


def _runs(e: Emitter, source: Value, span: tuple[int, int]) -> list[Value]:
    """The bytes of a stored field as vectors of eight int32."""
    first, size = span
    return [e.load(source, vector(I32, 8), first + at) for at in range(0, size, 32)]


def _sub_scales(form: PackedFormat, field: str, target: int) -> list[Move]:
    """Moves of a field with a byte for each of 16 sub-blocks, in the order 0 2 1 3 of each four."""
    start, size = form.span(field)
    places = [target + k // 4 * VECTOR + SCALE_ORDER[k % 4] for k in range(size)]
    return [Move(start + k, place, 1, 4) for k, place in enumerate(places)]


# ----------------------------------------------------------------------------------- with minima


class Q4K(Block256):
    """x = d * scale * q - dmin * minimum."""

    minima = True
    signed_scales = False
    folding = "scale"
    layout = FOUR_BITS
    words_at = 2 * HALVES + 3 * VECTOR

    def moves(self) -> list[Move]:
        scales = [*self.scalar("d", 0), *self.scalar("dmin", HALVES)]
        return [*scales, *self.chunks("scales", 2 * HALVES)]

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

    def stored_words(self, e: Emitter, source: Value) -> list[Value]:
        runs = _runs(e, source, self.span("q"))
        return [stored_run(e.b, run, 4 * half, 4) for run in runs for half in range(2)]

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

    def stored_words(self, e: Emitter, source: Value) -> list[Value]:
        (high,) = _runs(e, source, self.span("high"))
        fifths = [stored_run(e.b, high, k, 1, to=4) for k in range(8)]
        return [e.b.or_(*each) for each in zip(super().stored_words(e, source), fifths)]


class Q2K(Q4K):
    """As q4_k, with bit pairs, and scales and minima of four bits."""

    folding = "byte"
    layout = TWO_BITS
    words_at = 0
    _SCALES = 16 * VECTOR
    _FACTORS = _SCALES + 4 * VECTOR

    def moves(self) -> list[Move]:
        factors = [*self.scalar("d", self._FACTORS), *self.scalar("dmin", self._FACTORS + HALVES)]
        return [*_sub_scales(self, "scales", self._SCALES), *factors]

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return halves_of(e, e.load(at, offset=self._SCALES + VECTOR * z))[0]

    def offset_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        return halves_of(e, e.load(at, offset=self._SCALES + VECTOR * z))[1]

    def stored_words(self, e: Emitter, source: Value) -> list[Value]:
        runs = _runs(e, source, self.span("q"))
        return [stored_run(e.b, run, 2 * i, 2) for run in runs for i in range(4)]

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

    def moves(self) -> list[Move]:
        return [*_sub_scales(self, "scales", self._SCALES), *self.scalar("d", self._factors_at())]

    def _factors_at(self) -> int:
        return self.nbytes - HALVES

    def stored_words(self, e: Emitter, source: Value) -> list[Value]:
        low, found = _runs(e, source, self.span("q")), []
        for half, high in enumerate(_runs(e, source, self.span("high"))):
            for i in range(4):
                nibbles = stored_run(e.b, low[2 * half + i % 2], i // 2 * 4, 4)
                found.append(e.b.or_(nibbles, stored_run(e.b, high, 2 * i, 2, to=4)))
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

    def stored_words(self, e: Emitter, source: Value) -> list[Value]:
        pairs = _runs(e, source, self.span("q"))
        (high,), found = _runs(e, source, self.span("high")), []
        for k in range(8):
            low = stored_run(e.b, pairs[k // 4], k % 4 * 2, 2)
            found.append(e.b.or_(low, stored_run(e.b, high, k, 1, to=2)))
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
