"""Writes to KV pools: rows converted to the pool's dtype (kv_write), and copies of blocks."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from ....graph.dtype import DTYPES
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32_to_f16, f32s, helper, i32s, kernel, load_i64, u8s, u16s
from ..runtime.lazy_numba import int64, ir
from ..simd.emitter import F16, F32, F32S, I8, I32, I32S, LANES, Emitter, Value
from .attention_vectors import tuple_intrinsic
from .elementwise import thread_range

_Q8 = DTYPES["q8_0"]
_TINY_BITS, _INF_BITS = 0x0D800000, 0x7F800000  # bits of 2**-100 and of infinity


def _to_f32(e: Emitter, source: Value, target: Value) -> None:
    e.store(e.load_f32(source), target)


def _to_f16(e: Emitter, source: Value, target: Value) -> None:
    e.store(e.b.fptrunc(e.load_f32(source), ir.VectorType(F16, LANES)), target)


def _to_q8_0(e: Emitter, source: Value, target: Value) -> None:
    """Encode a block exactly as the op's NumPy body: d = amax / 127, q = x / d, ties away from 0.

    A block with NaN or infinity gets the scale NaN; a block whose largest magnitude is below
    2**-100 becomes zero.
    """
    b, half = e.b, _Q8.block // LANES
    values = [e.load_f32(source, 4 * LANES * i) for i in range(half)]
    sizes = [e.mask(b.bitcast(x, I32S), 0x7FFFFFFF) for x in values]
    largest = e.reduce("umax", b.select(b.icmp_unsigned(">", *sizes), *sizes))
    finite = b.icmp_unsigned("<", largest, ir.Constant(I32, _INF_BITS))
    live = b.and_(finite, b.icmp_unsigned(">=", largest, ir.Constant(I32, _TINY_BITS)))
    one = ir.Constant(F32, 1.0)
    d = e.divide_positive(b.select(live, b.bitcast(largest, F32), one), ir.Constant(F32, 127.0))
    inverse = e.splat(e.divide_positive(one, d))
    scale = b.select(finite, ir.Constant(F32, 0.0), ir.Constant(F32, float("nan")))
    e.store(b.fptrunc(b.select(live, d, scale), F16), target)
    keep = e.splat(b.sext(live, I32))
    for i, x in enumerate(values):
        x = e.mul(b.bitcast(b.and_(b.bitcast(x, I32S), keep), F32S), inverse)
        sign = e.mask(b.bitcast(x, I32S), 0x80000000)
        nearest = b.fptosi(e.add(x, b.bitcast(e.bits(sign, 0x3F000000), F32S)), I32S)
        e.store(b.trunc(nearest, ir.VectorType(I8, LANES)), target, 2 + LANES * i)


_CONVERSIONS = {  # elements of a unit, its bytes, and the function that emits its conversion
    "f32": (LANES, 4 * LANES, _to_f32),
    "f16": (LANES, 2 * LANES, _to_f16),
    "q8_0": (_Q8.block, _Q8.nbytes, _to_q8_0),
}


@cache
def _row_converter(kind: str) -> Any:
    """A helper ``move(target, source, width)``: float32 at an address as elements of ``kind``."""
    unit, nbytes, code = _CONVERSIONS[kind]
    whole, half, rest = (
        tuple_intrinsic(lambda e, *at: code(e, *at), 2),
        kind == "f16",
        unit == LANES,
    )

    @helper
    def convert(target, source, width):
        units = width // unit
        for i in range(units):
            whole((source + 4 * unit * i, target + nbytes * i))
        if rest:
            for i in range(units * unit, width):
                if half:
                    u16s(target)[i] = f32_to_f16(f32s(source)[i])
                else:
                    f32s(target)[i] = f32s(source)[i]

    return convert


class StoreArgs(NamedTuple):
    """Argument block of stores into a pool."""

    pool: int
    pool_stride: int
    x: int
    x_stride: int
    slots: int  # int32 [rows], negative: the row is not stored
    rows: int  # address of the live count
    width: int


_read_store = argument_reader(StoreArgs)


@cache
def _store(kind: str) -> Kernel:
    convert = _row_converter(kind)

    @kernel(key=(kind,))
    def store(p, thread, threads):
        a = _read_store(p)
        first, last = thread_range(load_i64(a.rows), thread, threads)
        for row in range(first, last):
            slot = int64(i32s(a.slots)[row])
            if slot >= 0:
                convert(a.pool + slot * a.pool_stride, a.x + row * a.x_stride, a.width)

    return store


def store(
    pool: OperandRef, x: int, x_stride: int, slots: OperandRef, rows: int,
    overlaps_previous: bool = False,
) -> Launch:  # fmt: skip
    """Launch the stores of rows into their slots; each thread stores its `thread_range` of rows.

    Args:
        pool: KV pool [slots, ...].
        x: address of float32 rows.
        x_stride: bytes from row to row.
        slots: slot of each row.
        rows: address of the live count of rows.
        overlaps_previous: see `Launch`.
    """
    width = prod(pool.meta.inner)
    block = StoreArgs(pool.address, pool.row_stride, x, x_stride, slots.address, rows, width)
    return Launch(_store(pool.dtype.name), block, overlaps_previous)


@BACKEND.kernel("kv_write", layout={"x": "rows"})
def kv_write(ctx: KernelContext) -> Launch:
    x = ctx.x
    return store(ctx.pool, x.address, x.row_stride, ctx.slot, ctx.live(x.meta.rows))


_CHUNK_BYTES = 8192  # of a block, copied by one thread


class CopyBlocksArgs(NamedTuple):
    """Argument block of `copy_blocks`."""

    pool: int
    sources: int  # int32 [M], negative: no copy
    targets: int  # int32 [M], negative: no copy
    copies: int  # address of the live count M
    block_bytes: int


_read_copy = argument_reader(CopyBlocksArgs)


@kernel
def _copy_blocks(p, thread, threads):
    a = _read_copy(p)
    chunks = (a.block_bytes + _CHUNK_BYTES - 1) // _CHUNK_BYTES
    first, last = thread_range(load_i64(a.copies) * chunks, thread, threads)
    for item in range(first, last):
        at, begin = item // chunks, item % chunks * _CHUNK_BYTES
        source, target = int64(i32s(a.sources)[at]), int64(i32s(a.targets)[at])
        if source >= 0 and target >= 0:
            old = u8s(a.pool + source * a.block_bytes + begin)
            new = u8s(a.pool + target * a.block_bytes + begin)
            for i in range(min(_CHUNK_BYTES, a.block_bytes - begin)):
                new[i] = old[i]


@BACKEND.kernel("copy_blocks")
def copy_blocks(ctx: KernelContext) -> Launch:
    pool, source, target = ctx.pool, ctx.source, ctx.target
    nbytes = ctx.attrs["block"] * pool.row_stride
    count = ctx.live(source.meta.rows)
    block = CopyBlocksArgs(pool.address, source.address, target.address, count, nbytes)
    return Launch(_copy_blocks, block)
