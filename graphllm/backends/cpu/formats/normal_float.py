"""NormalFloat on the CPU: nf4, whose four bits number a float16.

A block of a tile: 4 vectors of nibbles and 16 d.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ....formats.normal_float import NF4_VALUES
from ..simd.emitter import I16S, VECTOR, Emitter, Value
from .bit_layout import FOUR_BITS
from .encoder import BlockEncoder
from .iq4 import encode_codes
from .packed_format import Field, PackedFormat, register

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

_RUN = 32
_LOW, _HIGH = NF4_VALUES.view("u1").reshape(-1, 2).T.tolist()  # bytes of the values
_SCALES_AT = FOUR_BITS.vectors * VECTOR


class NormalFloat(PackedFormat):
    """x = d * value, and four bits number a value."""

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


def _encode(e: BlockEncoder, vectors: Sequence[Value], at: Value) -> Value:
    d = e.magnitude(e.fold(vectors, _RUN, e.larger))
    return encode_codes(e, vectors, at, d, NF4_VALUES.tolist())


register(NormalFloat(name="nf4", encode=_encode))
