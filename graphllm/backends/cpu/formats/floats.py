"""Float weights on the CPU: f32, f16 and bf16. A block is one element."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....graph.dtype import DTYPES
from ..simd.emitter import Emitter, Value
from .packed_format import Move, PackedFormat, register


@dataclass(frozen=True, kw_only=True)
class FloatFormat(PackedFormat):
    """Elements as they are stored: 16 of them, one of each row, for each k."""

    load: str  # the method of Emitter that loads 16 elements as f32x16

    def moves(self) -> list[Move]:
        size = DTYPES[self.name].nbytes
        return [Move(0, 0, size, size)]

    def values(self, e: Emitter, at: Value) -> Iterator[tuple[int, Value]]:
        yield 0, getattr(e, self.load)(at)


for _name in ("f32", "f16", "bf16"):
    register(FloatFormat(name=_name, load=f"load_{_name}"))
