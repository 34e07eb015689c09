"""Row formats on the CPU: w8a8, fp8 and fp8_128, one byte per element.

A group of 16 packed rows has blocks of 32 columns, padded with zero bytes to whole steps of 64
(what one AMX instruction multiplies), then float32 scales: 16 for the rows, or 16 for each 128
columns. int8 is packed with four columns of a row in a lane; e4m3 has a column of 16 rows in
16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....formats import ROW_FORMATS
from ..runtime.lazy_numba import ir
from ..simd.emitter import I8S, I16S, LANES, VECTOR, Emitter, Value
from .legacy import Bytes
from .packed_format import Field, PackedFormat, register

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows

BLOCK = 32
STEP = 64  # columns that packed rows are padded to


def scales_at(columns: int) -> int:
    """Offset of the scales in a group of ``columns`` columns."""
    return -(-columns // STEP) * STEP * LANES


class _Rows(PackedFormat):
    """What the row formats have in common."""

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def nbytes(self) -> int:
        return LANES * BLOCK

    @property
    def scale_columns(self) -> int:
        """Columns that share a scale; 0: the row."""
        form = ROW_FORMATS[self.name]
        return 0 if form.scaled_by_row else form.dtype.block

    @property
    def unit(self) -> float:
        """What scales are multiplied by, because `values` are smaller by this factor."""
        return 1.0

    def span(self, field: str) -> tuple[int, int]:
        """(offset, bytes) of the elements, the only field of a block."""
        return 0, BLOCK

    def group_nbytes(self, columns: int) -> int:
        count = columns // self.scale_columns if self.scale_columns else 1
        return scales_at(columns) + count * VECTOR


@dataclass(frozen=True, kw_only=True)
class Int8Rows(_Rows, Bytes):
    """int8; with VNNI, q + 128 is packed."""

    def scales(self, rows: StoredRows) -> Iterator[Field]:
        return iter(())  # they are at the end of the group

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        zero = self.zero_point(e)
        for j, word in self.words(e, at):
            for i in range(4):
                q = e.b.sub(e.byte(word, i), e.i32(zero)) if zero else e.signed_byte(word, i)
                yield 4 * j + i, e.to_f32(q)


@dataclass(frozen=True, kw_only=True)
class Float8Rows(_Rows):
    """e4m3. Its bits, moved, are those of a float16 that is smaller by 2^8, subnormal or not."""

    @property
    def unit(self) -> float:
        return 256.0

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        e = rows.e
        for offset, word in self.chunks(rows, "q", 0):
            for i in range(4):
                byte = e.b.trunc(e.b.lshr(word, e.i32(8 * i)), I8S)
                yield Field(offset + LANES * i, byte)

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        for k in range(BLOCK):
            yield k, upcast_e4m3(e, e.load(at, I8S, LANES * k))


def upcast_e4m3(e: Emitter, x: Value) -> Value:
    """The numbers of 16 bytes, times 2^-8, as f32x16. NaN becomes 1.875."""
    shift, mask = ir.Constant(I16S, [7] * LANES), ir.Constant(I16S, [-0x4001] * LANES)
    half = e.b.and_(e.b.shl(e.b.sext(x, I16S), shift), mask)
    return e.half_to_f32(half)


register(Int8Rows(name="w8a8", largest=255))
register(Float8Rows(name="fp8"))
register(Float8Rows(name="fp8_128"))
