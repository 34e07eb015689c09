"""AMX: eight tile registers of up to 16 rows x 64 bytes, and products of tiles of bytes.

``C[m][n] += sum over k of A[m][4 k + i] * B[k][4 n + i]``: a row of A is a token's activations, a
row of B is a vector of four columns of 16 interleaved weight rows, C is int32 (Intel, Architecture
Instruction Set Extensions, chapter 3). LLVM's intrinsics take the numbers of tile registers as
constants; their shapes are those that `configure` has loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.lazy_numba import cgutils, ir
from .vectors import I8, I64, VECTOR, Value, VectorBuilder

TILE_ROWS = 16
TILE_BYTES = TILE_ROWS * VECTOR


class TileShape(NamedTuple):
    rows: int
    columns: int  # bytes


def _call(e: VectorBuilder, name: str, *operands: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in operands])
    function = cgutils.get_or_insert_function(e.b.module, kind, f"llvm.x86.{name}")
    e.b.call(function, operands)


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)


def _pointer(e: VectorBuilder, address: Value) -> Value:
    return e.b.inttoptr(address, I8.as_pointer())


def configure(e: VectorBuilder, shapes: Sequence[TileShape]) -> None:
    """Set the shapes of tile registers 0, 1, ... of this thread; until `release`."""
    record = bytearray(VECTOR)
    record[0] = 1  # palette
    for i, shape in enumerate(shapes):
        record[16 + 2 * i] = shape.columns
        record[48 + i] = shape.rows
    at = e.stack_buffer(VECTOR)
    kind = ir.ArrayType(I8, VECTOR)
    e.store(ir.Constant(kind, record), at)
    _call(e, "ldtilecfg", _pointer(e, at))


def release(e: VectorBuilder) -> None:
    """Give the tile registers back, so that context switches need not save them."""
    _call(e, "tilerelease")


def zero(e: VectorBuilder, tile: int) -> None:
    _call(e, "tilezero", _tile(tile))


def load(e: VectorBuilder, tile: int, address: Value, stride: int = VECTOR) -> None:
    """Load a tile whose rows are ``stride`` bytes apart."""
    _call(e, "tileloadd64", _tile(tile), _pointer(e, address), ir.Constant(I64, stride))


def store(e: VectorBuilder, tile: int, address: Value, stride: int = VECTOR) -> None:
    _call(e, "tilestored64", _tile(tile), _pointer(e, address), ir.Constant(I64, stride))


def dot(e: VectorBuilder, c: int, a: int, b: int, unsigned: bool) -> None:
    """c += a b in tile registers, of signed bytes; those of b are ``unsigned``."""
    _call(e, "tdpbsud" if unsigned else "tdpbssd", *map(_tile, (c, a, b)))
