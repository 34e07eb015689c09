"""iq4_nl, iq4_xs and nf4 on the CPU: four bits number a value of a table.

A block of a tile: iq4_nl and nf4 have 4 vectors of nibbles and 16 d. iq4_xs has 16 d, 16 times the
top bits of the scales (together a vector), a vector of the scales' low halves and 32 of nibbles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING

from ....formats.iq4 import IQ4_VALUES, NF4_VALUES
from ..runtime.isa import ISA
from ..runtime.lazy_numba import ir
from ..simd.emitter import I16, I16S, I32S, VECTOR, Emitter, Value
from .bit_layout import FOUR_BITS
from .encoder import BlockEncoder, fit_largest, runs_of_32, store_nibbles_of
from .packed_format import (
    HALVES,
    Block32,
    Block256,
    Codebook,
    Field,
    PackedFormat,
    halves_of,
    register,
)

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

_RUN = 32


@dataclass(frozen=True, kw_only=True)
class CodebookBlock(Block32):
    """x = d * value, and four bits number a value."""

    layout = FOUR_BITS
    symmetric = True
    codebook: Codebook

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.chunks(rows, "q", 0)
        yield from self.scalar(rows, "d", self.factors_at())

    def words(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        return ((j, self.codebook.look_up(e, word)) for j, word in super().words(e, at))

    def zero_point(self, e: Emitter) -> int:
        return self.codebook.zero_point(e)

    def signed(self, target: ISA) -> bool:
        return self.codebook.signed(target)


@dataclass(frozen=True, kw_only=True)
class IQ4XS(Block256):
    """x = d * scale * value, and four bits number a value."""

    minima = False
    signed_scales = True
    layout = FOUR_BITS
    symmetric = True
    words_at = 2 * HALVES + VECTOR
    codebook: Codebook

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        e, (low,) = rows.e, rows.words(self.span("scales"))
        top = e.b.zext(rows.numbers(self.span("high")[0], I16), I32S)
        nibbles = [_move_bits(e, low, 4 * k, 4, _nibble_place(k)) for k in range(8)]
        pairs = [_move_bits(e, top, 2 * k, 2, _pair_place(k)) for k in range(8)]
        yield from self.scalar(rows, "d", 0)
        yield Field(HALVES, e.b.trunc(reduce(e.b.or_, pairs), I16S))
        yield Field(2 * HALVES, reduce(e.b.or_, nibbles))
        yield from self.chunks(rows, "q", self.words_at)

    def words(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        return ((j, self.codebook.look_up(e, word)) for j, word in super().words(e, at))

    def scale_bytes(self, e: Emitter, at: Value, z: int) -> Value:
        low = halves_of(e, e.load(at, offset=2 * HALVES))[z]
        top = e.shl(e.b.zext(e.load(at, I16S, HALVES), I32S), 4 * z)
        tops = e.mask(e.b.or_(top, e.shl(top, 14)), 0x30303030)
        return e.add_bytes(e.b.or_(low, tops), -32)

    def zero_point(self, e: Emitter) -> int:
        return self.codebook.zero_point(e) if e.isa.vnni else 0

    def has_offsets(self, e: Emitter) -> bool:
        return super().has_offsets(e) and not self.codebook.signed(e.isa)

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at)]

    def signed(self, target: ISA) -> bool:
        return self.codebook.signed(target)

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.b.mul(offset, e.i32(self.codebook.zero_point(e))))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        (d,), zero = self.factors(e, at), self.codebook.zero_point(e)
        scale = self.float_scales(e, partial(self.scale_bytes, e, at), d)
        for j, word in self.all_words(e, at):
            for i in range(4):
                q = e.b.sub(e.byte(word, i), e.i32(zero)) if zero else e.signed_byte(word, i)
                yield 4 * j + i, e.mul(e.to_f32(q), scale(j // 8))


def _nibble_place(k: int) -> int:
    """Bit of the low half of scale k in a tile: scales 0 to 3 in the low halves of four bytes, 4 to
    7 in the high halves."""
    return 8 * (k % 4) + 4 * (k // 4)


def _pair_place(k: int) -> int:
    """Bit of the top bits of scale k in a tile; see `IQ4XS.scale_bytes`."""
    return (4, 12, 6, 14)[k % 4] - k // 4 * 4


def _move_bits(e: Emitter, x: Value, source: int, count: int, target: int) -> Value:
    """``count`` bits of int32 lanes at bit ``source``, moved to bit ``target``."""
    return e.shl(e.mask(e.shr(x, source), (1 << count) - 1), target)


_LOW, _HIGH = NF4_VALUES.view("u1").reshape(-1, 2).T.tolist()  # bytes of the values
_SCALES_AT = FOUR_BITS.vectors * VECTOR


class NormalFloat(PackedFormat):
    """x = d * value, and four bits number a float16."""

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.chunks(rows, "q", 0)
        yield from self.scalar(rows, "d", _SCALES_AT)

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        d = e.load_f16(at, _SCALES_AT)
        for j, word in FOUR_BITS.unpack(e, lambda i: e.load(at, offset=VECTOR * i)):
            low, high = (e.lookup_bytes(word, table) for table in (_LOW, _HIGH))
            for i in range(4):
                bits = e.b.or_(e.byte(low, i), e.shl(e.byte(high, i), 8))
                yield 4 * j + i, e.mul(e.half_to_f32(e.b.trunc(bits, I16S)), d)


# --------------------------------------------------------------------------------------- encoding


def _encode_codes(
    e: BlockEncoder, vectors: Sequence[Value], at: Value, d: Value, values: Sequence[float]
) -> Value:
    """Store blocks of a float16 ``d`` and the numbers of the nearest of ``values``."""
    inverse, half = e.inverse(d), e.to_half(d)
    for i, block in enumerate(runs_of_32(vectors)):
        e.store_half(half, i, at, 18 * i)
        one = e.lane(inverse, i)
        low, high = (e.nearest(e.mul(x, one), values) for x in block)
        e.store_nibbles(low, high, at, 18 * i + 2)
    return e.not_finite(vectors)


def _encode_iq4_nl(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    d = e.over(e.fold(vectors, _RUN, e.larger), -127)
    return _encode_codes(e, vectors, at, d, IQ4_VALUES)


def _encode_iq4_xs(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    fitted = fit_largest(e, vectors, 32, -127, 32)
    six = e.b.add(fitted.scale, e.i32(32))
    places = ir.Constant(I32S, [2 * k for k in range(8)] * 2)
    top = e.b.shl(e.shr(six, 4), places)
    both = e.fold([top], 8, e.b.or_)  # of eight runs, in every lane
    e.store_half(fitted.d, 0, at, 0)
    e.store_half(e.b.trunc(both, I16S), 0, at, 2)
    low = e.mask(six, 15)
    even, odd = e.select_lanes(low, range(0, 8, 2)), e.select_lanes(low, range(1, 8, 2))
    e.store_bytes(e.b.or_(even, e.shl(odd, 4)), at, 4, 4)
    inverse, q = e.inverse(fitted.step), []
    for i, x in enumerate(vectors):
        q.append(e.nearest(e.mul(x, e.lane(inverse, i // 2)), IQ4_VALUES))
    store_nibbles_of(e, q, 1, at, 8)
    return e.not_finite(vectors)


def _encode_nf4(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    d = e.magnitude(e.fold(vectors, _RUN, e.larger))
    return _encode_codes(e, vectors, at, d, NF4_VALUES.tolist())


_IQ4 = Codebook(IQ4_VALUES)
register(CodebookBlock(name="iq4_nl", largest=_IQ4.largest, codebook=_IQ4, encode=_encode_iq4_nl))
register(IQ4XS(name="iq4_xs", sub=32, largest=_IQ4.largest, codebook=_IQ4, encode=_encode_iq4_xs))
register(NormalFloat(name="nf4", encode=_encode_nf4))
