"""Kernels that move values: any strides to dense, between float types, chosen rows."""

from __future__ import annotations

from math import prod
from typing import Any

from numba import float32

from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (  # fmt: skip
    Kernel,
    args,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    f32s,
    i32s,
    i64s,
    inlined,
    kernel,
    load_i64,
    set_status,
    u8s,
    u16s,
    u32s,
)
from ..runtime.thread_pool import STATUS_ID
from .elementwise import CHUNK_COLUMNS, thread_range

AXES = 4


@inlined
def _same(x):
    return x


@inlined
def _f16_to_bf16(x):
    return f32_to_bf16(f16_to_f32(x))


@inlined
def _bf16_to_f16(x):
    return f32_to_f16(bf16_to_f32(x))


@inlined
def _widen_f16(x):
    return f16_to_f32(x)


@inlined
def _narrow_f16(x):
    return f32_to_f16(float32(x))


def _mover(name: str, source: Any, target: Any, wide: int, convert: Any) -> Kernel:
    """A kernel for out = convert(x), x of up to four axes with any strides; ``wide``: bytes of out.

    The last axis is walked by byte addresses where it is not dense.
    """

    @kernel(key=(name,))
    def move(p, thread, threads):
        x, s0, s1, s2, s3, y, rows_at, n1, n2, n3, size = args(p, 11)
        pieces = (n3 + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(rows_at) * n1 * n2 * pieces, thread, threads)
        for item in range(first, last):
            line, column = item // pieces, item % pieces * CHUNK_COLUMNS
            outer, c = line // n2, line % n2
            start = x + outer // n1 * s0 + outer % n1 * s1 + c * s2 + column * s3
            out = target(y + (line * n3 + column) * wide)
            count = min(CHUNK_COLUMNS, n3 - column)
            if s3 == size:
                dense = source(start)
                for i in range(count):
                    out[i] = convert(dense[i])
            else:
                for i in range(count):
                    out[i] = convert(source(start + i * s3)[0])

    return move


_COPY = {
    1: _mover("move1", u8s, u8s, 1, _same),
    2: _mover("move2", u16s, u16s, 2, _same),
    4: _mover("move4", u32s, u32s, 4, _same),
    8: _mover("move8", i64s, i64s, 8, _same),
}
_CAST = {
    ("f32", "f16"): _mover("f32_f16", f32s, u16s, 2, _narrow_f16),
    ("f32", "bf16"): _mover("f32_bf16", f32s, u16s, 2, f32_to_bf16),
    ("f16", "f32"): _mover("f16_f32", u16s, f32s, 4, _widen_f16),
    ("bf16", "f32"): _mover("bf16_f32", u16s, f32s, 4, bf16_to_f32),
    ("f16", "bf16"): _mover("f16_bf16", u16s, u16s, 2, _f16_to_bf16),
    ("bf16", "f16"): _mover("bf16_f16", u16s, u16s, 2, _bf16_to_f16),
}


def _launch(ctx: KernelContext, made: Kernel) -> Launch:
    meta = ctx.x.meta
    missing = AXES - max(meta.ndim, 1)
    strides = [*(meta.strides or (0,)), *[0] * missing]
    inner = [*meta.inner, *[1] * missing]
    if missing:  # the axis that is walked comes last
        strides = [strides[0], *strides[AXES - missing :], *strides[1 : AXES - missing]]
        inner = [*inner[AXES - 1 - missing :], *inner[: AXES - 1 - missing]]
    rows = ctx.live(meta.rows)
    words = [ctx.x.address, *strides, ctx.out.address, rows, *inner, meta.dtype.nbytes]
    return Launch(made, words)


@BACKEND.kernel("contiguous", layout={"x": "any"})
def contiguous(ctx: KernelContext) -> Launch:
    return _launch(ctx, _COPY[ctx.x.dtype.nbytes])


@BACKEND.kernel("cast", layout={"x": "any"})
def cast(ctx: KernelContext) -> Launch:
    if ctx.x.dtype == ctx.out.dtype:
        return contiguous(ctx)
    return _launch(ctx, _CAST[ctx.x.dtype.name, ctx.out.dtype.name])


_PLAIN = ("f32", "f16", "bf16", "i8", "i16", "i32", "i64", "f64")


@BACKEND.kernel("copy", dtypes={"x": _PLAIN})
def copy(ctx: KernelContext) -> Launch:
    """Between devices that share the host's memory."""
    return contiguous(ctx)


_BYTES = 8192  # of a row, moved at a time


@kernel
def _gather(p, thread, threads):
    x, stride, total_at, rows, count_at, y, width = args(p, 7)
    index, total = i32s(rows), load_i64(total_at)
    pieces = (width + _BYTES - 1) // _BYTES
    first, last = thread_range(load_i64(count_at) * pieces, thread, threads)
    for item in range(first, last):
        line, column = item // pieces, item % pieces * _BYTES
        row = index[line]
        if row < 0 or row >= total:
            set_status(p, STATUS_ID)
            continue
        source, target = u8s(x + row * stride + column), u8s(y + line * width + column)
        for i in range(min(_BYTES, width - column)):
            target[i] = source[i]


@BACKEND.kernel("gather_rows", layout={"x": "rows"})
def gather_rows(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.rows
    width = prod(x.meta.inner) * x.dtype.nbytes
    total, count = ctx.live(x.meta.rows), ctx.live(rows.meta.rows)
    return Launch(
        _gather, [x.address, x.row_stride, total, rows.address, count, ctx.out.address, width]
    )


@kernel
def _concat(p, thread, threads):
    a, a_stride, b, b_stride, y, rows_at, lines, a_width, b_width = args(p, 9)
    first, last = thread_range(load_i64(rows_at) * lines, thread, threads)
    for item in range(first, last):
        row, line = item // lines, item % lines
        left = f32s(a + row * a_stride + 4 * line * a_width)
        right = f32s(b + row * b_stride + 4 * line * b_width)
        target = f32s(y + 4 * item * (a_width + b_width))
        for i in range(a_width):
            target[i] = left[i]
        for i in range(b_width):
            target[a_width + i] = right[i]


@BACKEND.kernel("concat", layout={"a": "rows", "b": "rows"})
def concat(ctx: KernelContext) -> Launch:
    a, b = ctx.a, ctx.b
    *lines, width = a.meta.inner
    words = [a.address, a.row_stride, b.address, b.row_stride, ctx.out.address]
    words += [ctx.live(a.meta.rows), prod(lines), width, b.meta.inner[-1]]
    return Launch(_concat, words)
