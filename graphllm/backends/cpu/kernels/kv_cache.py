"""Writes to KV pools: rows converted to the pool's dtype (kv_write), and copies of blocks."""

from __future__ import annotations

from collections.abc import Iterable
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
from .quantize_rows import largest_size, quantise_run

_Q8, _Q4 = DTYPES["q8_0"], DTYPES["q4_0"]  # blocks of two vectors
_TINY_BITS, _INF_BITS = 0x0D800000, 0x7F800000  # bits of 2**-100 and of infinity


def _to_f32(e: Emitter, source: Value, target: Value) -> None:
    e.store(e.load_f32(source), target)


def _to_f16(e: Emitter, source: Value, target: Value) -> None:
    e.store(e.b.fptrunc(e.load_f32(source), ir.VectorType(F16, LANES)), target)


class _Block:
    """A block of float32 to quantise: its vectors, magnitudes, and whether its scale is a number.

    A block with NaN or infinity is not ``finite``; one whose largest magnitude is below 2**-100
    becomes zero and is not ``live`` either.
    """

    def __init__(self, e: Emitter, source: Value) -> None:
        b = e.b
        self.e, self.values = e, [e.load_f32(source, 4 * LANES * i) for i in range(2)]
        self.sizes = [e.mask(b.bitcast(x, I32S), 0x7FFFFFFF) for x in self.values]
        self.largest = e.reduce("umax", b.select(b.icmp_unsigned(">", *self.sizes), *self.sizes))
        self.finite = b.icmp_unsigned("<", self.largest, ir.Constant(I32, _INF_BITS))
        tiny = ir.Constant(I32, _TINY_BITS)
        self.live = b.and_(self.finite, b.icmp_unsigned(">=", self.largest, tiny))

    def magnitude(self) -> Value:
        """Return the largest magnitude as float32, 1 if the block is not live."""
        b = self.e.b
        return b.select(self.live, b.bitcast(self.largest, F32), ir.Constant(F32, 1.0))

    def negative(self) -> Value:
        """Return whether the first value of largest magnitude is negative."""
        e, b = self.e, self.e.b
        largest, zero = e.splat(self.largest), ir.Constant(I32S, None)
        first = b.cttz(
            self._bits(b.icmp_unsigned("==", x, largest) for x in self.sizes),
            ir.Constant(ir.IntType(1), 0),
        )
        signs = self._bits(b.icmp_signed("<", b.bitcast(x, I32S), zero) for x in self.values)
        return b.trunc(b.lshr(signs, first), ir.IntType(1))

    def _bits(self, masks: Iterable[Value]) -> Value:
        """Return the 32 lanes of two masks as the bits of an integer."""
        b = self.e.b
        low, high = (b.zext(b.bitcast(mask, ir.IntType(LANES)), I32) for mask in masks)
        return b.or_(low, b.shl(high, ir.Constant(I32, LANES)))

    def store_scale(self, d: Value, zero: float, target: Value) -> None:
        """Store the scale ``d`` as float16; ``zero`` or NaN for a block that is not live."""
        b = self.e.b
        other = b.select(self.finite, ir.Constant(F32, zero), ir.Constant(F32, float("nan")))
        self.e.store(b.fptrunc(b.select(self.live, d, other), F16), target)

    def scaled(self, inverse: Value) -> list[Value]:
        """Return the vectors times a number; zeros if the block is not live."""
        e, b = self.e, self.e.b
        keep, factor = e.splat(b.sext(self.live, I32)), e.splat(inverse)
        kept = (b.bitcast(b.and_(b.bitcast(x, I32S), keep), F32S) for x in self.values)
        return [e.mul(x, factor) for x in kept]


def _to_q8_0(e: Emitter, source: Value, target: Value) -> None:
    """Encode a block exactly as the op's NumPy body: d = amax / 127, q = x / d, rounded."""
    b, block = e.b, _Block(e, source)
    d = e.divide_positive(block.magnitude(), ir.Constant(F32, 127.0))
    block.store_scale(d, 0.0, target)
    for i, x in enumerate(block.scaled(e.divide_positive(ir.Constant(F32, 1.0), d))):
        sign = e.mask(b.bitcast(x, I32S), 0x80000000)
        nearest = b.fptosi(e.add(x, b.bitcast(e.bits(sign, 0x3F000000), F32S)), I32S)
        e.store(b.trunc(nearest, ir.VectorType(I8, LANES)), target, 2 + LANES * i)


def _to_q4_0(e: Emitter, source: Value, target: Value) -> None:
    """Encode a block exactly as the op's NumPy body: the value m of largest magnitude becomes -8;
    d = m / -8, q = x / d + 8, rounded."""
    b, block = e.b, _Block(e, source)
    size = b.fmul(block.magnitude(), ir.Constant(F32, 0.125))
    inverse, negative = e.divide_positive(ir.Constant(F32, 1.0), size), block.negative()
    d, inverse = (b.select(negative, x, b.fneg(x)) for x in (size, inverse))
    block.store_scale(d, -0.0, target)
    middle = e.splat(ir.Constant(F32, 8.5))
    steps = [b.fptosi(e.add(x, middle), I32S) for x in block.scaled(inverse)]
    low, high = (b.select(b.icmp_signed(">", q, e.i32(15)), e.i32(15), q) for q in steps)
    both = b.or_(low, e.shl(high, 4))
    e.store(b.trunc(both, ir.VectorType(I8, LANES)), target, 2)


_CONVERSIONS = {  # elements of a unit, its bytes, and the function that emits its conversion
    "f32": (LANES, 4 * LANES, _to_f32),
    "f16": (LANES, 2 * LANES, _to_f16),
    "q8_0": (_Q8.block, _Q8.nbytes, _to_q8_0),
    "q4_0": (_Q4.block, _Q4.nbytes, _to_q4_0),
}


@helper
def _convert_fp8(target, source, width, head):
    """Convert each head to e4m3 and the float32 scale of the head; see `_row_converter`."""
    for i in range(width // head):
        x, y = source + 4 * i * head, target + i * (head + 4)
        quantise_run("f32", 1, x, head, largest_size("f32", x, head), y, y + head)


@cache
def _row_converter(kind: str) -> Any:
    """A helper ``convert(target, source, width, head)``: float32 at an address as ``kind``.

    ``width``: elements of a row, in heads of ``head`` elements.
    """
    if kind == "fp8":
        return _convert_fp8
    unit, nbytes, code = _CONVERSIONS[kind]
    whole, half, rest = (
        tuple_intrinsic(lambda e, *at: code(e, *at), 2),
        kind == "f16",
        unit == LANES,
    )

    @helper
    def convert(target, source, width, head):
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
    head: int  # elements of a head


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
                convert(a.pool + slot * a.pool_stride, a.x + row * a.x_stride, a.width, a.head)

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
    width, head = prod(pool.meta.inner), pool.meta.inner[-1]
    block = StoreArgs(pool.address, pool.row_stride, x, x_stride, slots.address, rows, width, head)
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
