"""iq4_nl and iq4_xs on the CPU: four bits number a value of a table.

A block of a tile: iq4_nl has 4 vectors of nibbles and 16 d. iq4_xs has 16 d, 16 times the top bits
of the scales (together a vector), a vector of the scales' low halves and 32 of nibbles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....formats.iq4 import IQ4_VALUES
from ..runtime.lazy_numba import ir
from ..simd.emitter import I16S, I32S, VECTOR, Emitter, Value
from .encoder import BlockEncoder, fit_largest, runs_of_32, store_nibbles_of
from .packed_format import HALVES, Block32, Block256, Codebook, Move, register

_RUN = 32


@dataclass(frozen=True, kw_only=True)
class CodebookBlock(Block32):
    """x = d * value, and four bits number a value."""

    codebook: Codebook

    def moves(self) -> list[Move]:
        return [*self.chunks("q", 0), *self.scalar("d", self.factors_at())]

    def integers(self, e: Emitter, at: Value) -> list[Value]:
        return self.codebook.look_up(e, [e.load(at, offset=VECTOR * j) for j in range(4)])

    def zero_point(self, e: Emitter) -> int:
        return self.codebook.zero_point(e)

    def signed(self, e: Emitter) -> bool:
        return self.codebook.signed(e)


@dataclass(frozen=True, kw_only=True)
class IQ4XS(Block256):
    """x = d * scale * value, and four bits number a value."""

    minima = False
    codebook: Codebook

    def moves(self) -> list[Move]:
        scales = [*self.scalar("d", 0), *self.scalar("high", HALVES)]
        scales += self.chunks("scales", 2 * HALVES)
        return [*scales, *self.chunks("q", 2 * HALVES + VECTOR)]

    def sub_blocks(self, e: Emitter, at: Value) -> Iterator[tuple[int, list[Value]]]:
        first = 2 * HALVES + VECTOR
        for k in range(8):
            nibbles = [e.load(at, offset=first + VECTOR * (4 * k + j)) for j in range(4)]
            yield k, self.codebook.look_up(e, nibbles)

    def scales(self, e: Emitter, at: Value) -> list[Value]:
        low = e.load(at, offset=2 * HALVES)
        top = e.b.zext(e.load(at, I16S, HALVES), I32S)
        sixes = []
        for k in range(8):
            moved = e.shl(top, 4 - 2 * k) if k < 2 else e.shr(top, 2 * k - 4)
            sixes.append(e.b.or_(e.mask(e.shr(low, 4 * k), 15), e.mask(moved, 0x30)))
        return [e.b.sub(six, e.i32(32)) for six in sixes]

    def zero_point(self, e: Emitter) -> int:
        return self.codebook.zero_point(e) if e.isa.vnni else 0

    def has_offsets(self, e: Emitter) -> bool:
        return super().has_offsets(e) and not self.codebook.signed(e)

    def offsets(self, e: Emitter, at: Value) -> list[Value]:
        scales = self.scales(e, at)
        return [e.pack_i16(scales[k], scales[k + 2]) for k in (0, 1, 4, 5)]

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_f16(at)]

    def signed(self, e: Emitter) -> bool:
        return self.codebook.signed(e)

    def join(self, e: Emitter, total: Value, offset: Value | None, factors: list[Value]) -> Value:
        if offset is not None:
            total = e.b.sub(total, e.b.mul(offset, e.i32(self.codebook.zero_point(e))))
        return e.mul(e.to_f32(total), factors[0])

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        scales, (d,) = self.scales(e, at), self.factors(e, at)
        zero = self.codebook.zero_point(e)
        for k, words in self.sub_blocks(e, at):
            scale = e.mul(e.to_f32(scales[k]), d)
            for j in range(32):
                word, i = words[j // 4], j % 4
                q = e.b.sub(e.byte(word, i), e.i32(zero)) if zero else e.signed_byte(word, i)
                yield 32 * k + j, e.mul(e.to_f32(q), scale)


# --------------------------------------------------------------------------------------- encoding


def _encode_iq4_nl(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    d = e.over(e.fold(vectors, _RUN, e.larger), -127)
    inverse, half = e.inverse(d), e.to_half(d)
    for i, block in enumerate(runs_of_32(vectors)):
        e.store_half(half, i, at, 18 * i)
        one = e.lane(inverse, i)
        low, high = (e.nearest(e.mul(x, one), IQ4_VALUES) for x in block)
        e.store_nibbles(low, high, at, 18 * i + 2)
    return e.not_finite(vectors)


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


_IQ4 = Codebook(IQ4_VALUES)
register(CodebookBlock(name="iq4_nl", largest=_IQ4.largest, codebook=_IQ4, encode=_encode_iq4_nl))
register(IQ4XS(name="iq4_xs", sub=32, largest=_IQ4.largest, codebook=_IQ4, encode=_encode_iq4_xs))
