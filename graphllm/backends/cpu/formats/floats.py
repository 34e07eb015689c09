"""Float weights on the CPU: f32, f16 and bf16. A block is one element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....graph.dtype import DTYPES
from ..runtime.lazy_numba import ir
from ..simd.emitter import Emitter, Value
from .packed_format import Field, PackedFormat, register

if TYPE_CHECKING:
    from ..simd.stored_rows import StoredRows


@dataclass(frozen=True, kw_only=True)
class FloatFormat(PackedFormat):
    """Elements as they are stored: 16 of them, one of each row, for each k."""

    load: str  # the method of Emitter that loads 16 elements as f32x16

    def fields(self, rows: StoredRows) -> Iterator[Field]:
        yield Field(0, rows.numbers(0, ir.IntType(8 * DTYPES[self.name].nbytes)))

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, getattr(e, self.load)(at)


for _name in ("f32", "f16", "bf16"):
    register(FloatFormat(name=_name, load=f"load_{_name}"))
