"""Microscaling formats on the CPU: mxfp4.

A block of a tile: 4 vectors of nibbles and 16 bytes of exponents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ....formats.microscaling import MXFP4_VALUES
from ..runtime.lazy_numba import ir
from ..simd.emitter import F32S, I8, I32, LANES, Emitter, Value
from .encoder import BlockEncoder, runs_of_32
from .iq4 import CodebookBlock
from .packed_format import Codebook, Field, register

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

_RUN = 32


class Mxfp4(CodebookBlock):
    """The scale is a power of two, in one byte."""

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield from self.chunks(rows, "q", 0)
        yield from self.scalar(rows, "e", self.factors_at())

    def factors_at(self) -> int:
        return self.nbytes - LANES

    def factors(self, e: Emitter, at: Value) -> list[Value]:
        return [e.load_e8m0_half(at, self.factors_at())]


# --------------------------------------------------------------------------------------- encoding


def _e2m1(e: BlockEncoder, x: Value, steps: Value) -> Value:
    """The four bits of x, which has so many steps; none is a negative zero."""
    q = e.nearest(steps, MXFP4_VALUES[:8])
    minus = e.mask(e.shr(e.bits_of(x), 28), 8)
    return e.b.select(e.b.icmp_signed(">", q, e.i32(0)), e.b.or_(q, minus), q)


def _encode_mxfp4(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    exponent = e.shr(e.size(e.fold(vectors, _RUN, e.larger)), 23)
    code = e.within(e.b.sub(exponent, e.i32(2)), 0, 254)
    # 2 ** (code - 128), which is subnormal where the code is 0 or 1.
    small = e.b.shl(e.i32(0x00200000), e.at_most(code, 1))
    normal = e.shl(e.b.sub(code, e.i32(1)), 23)
    d = e.b.select(e.b.icmp_signed("<", code, e.i32(2)), small, normal)
    for i, block in enumerate(runs_of_32(vectors)):
        e.store(e.b.trunc(e.b.extract_element(code, ir.Constant(I32, i)), I8), at, 17 * i)
        one = e.lane(e.b.bitcast(d, F32S), i)
        low, high = (_e2m1(e, x, e.divide_positive(e.magnitude(x), one)) for x in block)
        e.store_nibbles(low, high, at, 17 * i + 1)
    return e.not_finite(vectors)


_E2M1 = Codebook(MXFP4_VALUES)
register(Mxfp4(name="mxfp4", largest=_E2M1.largest, codebook=_E2M1, encode=_encode_mxfp4))
