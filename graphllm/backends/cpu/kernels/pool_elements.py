"""How elements of KV pools become float32 vectors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....graph.dtype import DTYPES
from ..formats.row_formats import upcast_e4m3
from ..runtime.lazy_numba import cgutils, ir, resolve
from ..simd.emitter import F16, F32, F32S, I8, I8S, I32S, I64, LANES, Emitter, Value


def _load_f32(e: Emitter, address: Value) -> list[Value]:
    return [e.load(address, F32S)]


def _load_f16(e: Emitter, address: Value) -> list[Value]:
    return [e.load_f16(address, 2 * LANES * i) for i in range(2)]


def _load_q8_0(e: Emitter, address: Value) -> list[Value]:
    """A block is d:f16 and 32 int8. Products have at most 18 bits, so they are exact."""
    scale = e.b.fpext(e.splat(e.load(address, F16)), F32S)
    found = []
    for i in range(2):
        q = e.load(address, ir.VectorType(I8, LANES), 2 + LANES * i)
        found.append(e.mul(e.to_f32(e.b.sext(q, I32S)), scale))
    return found


def _load_q4_0(e: Emitter, address: Value) -> list[Value]:
    """A block is d:f16 and 16 bytes, whose low halves are elements 0 to 15. Products are exact."""
    scale = e.b.fpext(e.splat(e.load(address, F16)), F32S)
    q = e.b.zext(e.load(address, ir.VectorType(I8, LANES), 2), I32S)
    halves = e.mask(q, 15), e.shr(q, 4)
    return [e.mul(e.to_f32(e.b.sub(half, e.i32(8))), scale) for half in halves]


def _load_fp8(e: Emitter, address: Value) -> list[Value]:
    """32 e4m3, times 2^-8. Exact."""
    return [upcast_e4m3(e, e.load(address, I8S, LANES * i)) for i in range(2)]


@dataclass(frozen=True)
class ElementReader:
    """How elements of a KV pool are converted to float32.

    Attributes:
        unit: elements that are converted together.
        nbytes: bytes of a unit.
        load_unit: emits the conversion of a unit to vectors.
        element: type of an element of a plain format, whose rows may end in a part of a unit; None
            for block formats.
        row_scale: factor of the float32 scale that follows the units of a row, by which elements
            are multiplied; 0 if there is none.
    """

    unit: int
    nbytes: int
    load_unit: Callable[[Emitter, Value], list[Value]]
    element: Any = None
    row_scale: float = 0.0

    @property
    def vectors(self) -> int:
        return self.unit // LANES

    def scale_of(self, e: Emitter, row: Value, units: Value) -> Value | None:
        """Load the scale of a row of ``units`` to all lanes; None if rows have none."""
        if not self.row_scale:
            return None
        d = e.broadcast_f32(e.at(row, e.times(units, self.nbytes)))
        return e.mul(d, e.f32(self.row_scale))

    def load_scaled(self, e: Emitter, address: Value, scale: Value | None) -> list[Value]:
        """Load a unit, times the scale of its row, rounded once."""
        vectors = self.load_unit(e, address)
        return vectors if scale is None else [e.mul(vector, scale) for vector in vectors]

    def load_partial(self, e: Emitter, address: Value, count: Value) -> list[Value]:
        """Load the first ``count`` elements of a unit, followed by zeros.

        Memory beyond them is not read, as it may hold NaN.
        """
        element = resolve(self.element)
        kind = ir.VectorType(element, self.unit)
        place = cgutils.alloca_once(e.b, kind)
        e.b.store(ir.Constant(kind, None), place)
        first = e.b.bitcast(place, element.as_pointer())
        with e.loop(count) as loop:
            offset = e.times(loop.index, self.nbytes // self.unit)
            e.b.store(e.load(e.at(address, offset), element), e.b.gep(first, [loop.index]))
        return self.load_unit(e, e.b.ptrtoint(place, I64))


READERS = {
    "f32": ElementReader(LANES, 4 * LANES, _load_f32, F32),
    "f16": ElementReader(2 * LANES, 4 * LANES, _load_f16, F16),
    "q8_0": ElementReader(DTYPES["q8_0"].block, DTYPES["q8_0"].nbytes, _load_q8_0),
    "q4_0": ElementReader(DTYPES["q4_0"].block, DTYPES["q4_0"].nbytes, _load_q4_0),
    "fp8": ElementReader(DTYPES["fp8"].block, DTYPES["fp8"].nbytes, _load_fp8, row_scale=256.0),
}
