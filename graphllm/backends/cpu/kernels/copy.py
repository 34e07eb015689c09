"""Kernels that move values: copies from any strides, casts of floats, gathers, padding."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (  # fmt: skip
    Kernel,
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
from ..runtime.lazy_numba import float32
from ..runtime.thread_pool import STATUS_ID
from .elementwise import CHUNK_COLUMNS, thread_range

AXES = 4


class MoveArgs(NamedTuple):
    """Argument block of copies and casts of up to four axes."""

    x: int
    stride0: int
    stride1: int
    stride2: int
    stride3: int
    y: int
    rows: int  # address of the live length of axis 0
    n1: int
    n2: int
    n3: int
    element_bytes: int  # of x


_read_move = argument_reader(MoveArgs)


@inlined
def _identity(x):
    return x


@inlined
def _f16_to_bf16(x):
    return f32_to_bf16(f16_to_f32(x))


@inlined
def _bf16_to_f16(x):
    return f32_to_f16(bf16_to_f32(x))


@inlined
def _f16_to_f32(x):
    return f16_to_f32(x)


@inlined
def _f32_to_f16(x):
    return f32_to_f16(float32(x))


def _mover(name: str, source: Any, target: Any, out_bytes: int, convert: Any) -> Kernel:
    """Make a kernel for y = convert(x) with y contiguous.

    Args:
        name: identifies the kernel in the disk cache.
        source: view of x's elements, such as `f32s`.
        target: view of y's elements.
        out_bytes: bytes of an element of y.
        convert: inlined function of one element.
    """

    @kernel(key=(name,))
    def move(p, thread, threads):
        a = _read_move(p)
        n1, n2, n3 = a.n1, a.n2, a.n3
        chunks = (n3 + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(a.rows) * n1 * n2 * chunks, thread, threads)
        for item in range(first, last):
            line, column = item // chunks, item % chunks * CHUNK_COLUMNS
            outer, i2 = line // n2, line % n2
            start = a.x + outer // n1 * a.stride0 + outer % n1 * a.stride1
            start += i2 * a.stride2 + column * a.stride3
            out = target(a.y + (line * n3 + column) * out_bytes)
            count = min(CHUNK_COLUMNS, n3 - column)
            if a.stride3 == a.element_bytes:
                dense = source(start)
                for i in range(count):
                    out[i] = convert(dense[i])
            else:
                for i in range(count):
                    out[i] = convert(source(start + i * a.stride3)[0])

    return move


_COPY = {
    1: _mover("move1", u8s, u8s, 1, _identity),
    2: _mover("move2", u16s, u16s, 2, _identity),
    4: _mover("move4", u32s, u32s, 4, _identity),
    8: _mover("move8", i64s, i64s, 8, _identity),
}
_CAST = {
    ("f32", "f16"): _mover("f32_f16", f32s, u16s, 2, _f32_to_f16),
    ("f32", "bf16"): _mover("f32_bf16", f32s, u16s, 2, f32_to_bf16),
    ("f16", "f32"): _mover("f16_f32", u16s, f32s, 4, _f16_to_f32),
    ("bf16", "f32"): _mover("bf16_f32", u16s, f32s, 4, bf16_to_f32),
    ("f16", "bf16"): _mover("f16_bf16", u16s, u16s, 2, _f16_to_bf16),
    ("bf16", "f16"): _mover("bf16_f16", u16s, u16s, 2, _bf16_to_f16),
}


def _launch(ctx: KernelContext, code: Kernel) -> Launch:
    meta = ctx.x.meta
    missing = AXES - max(meta.ndim, 1)
    strides = [*(meta.strides or (0,)), *[0] * missing]
    inner = [*meta.inner, *[1] * missing]
    if missing:  # move the innermost axis to the end
        strides = [strides[0], *strides[AXES - missing :], *strides[1 : AXES - missing]]
        inner = [*inner[AXES - 1 - missing :], *inner[: AXES - 1 - missing]]
    rows = ctx.live(meta.rows)
    stride0, stride1, stride2, stride3 = strides
    n1, n2, n3 = inner
    block = MoveArgs(
        ctx.x.address, stride0, stride1, stride2, stride3, ctx.out.address, rows, n1, n2, n3,
        meta.dtype.nbytes,
    )  # fmt: skip
    return Launch(code, block)


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
    """Copy between devices that share the host's memory."""
    return contiguous(ctx)


_CHUNK_BYTES = 8192


class GatherArgs(NamedTuple):
    """Argument block of `gather_rows`."""

    x: int
    x_stride: int
    x_rows: int  # address of the live count
    rows: int  # row indices, int32
    index_count: int  # address of the live count of row indices
    y: int
    row_bytes: int


_read_gather = argument_reader(GatherArgs)


@kernel
def _gather(p, thread, threads):
    a = _read_gather(p)
    index, total, width = i32s(a.rows), load_i64(a.x_rows), a.row_bytes
    chunks = (width + _CHUNK_BYTES - 1) // _CHUNK_BYTES
    first, last = thread_range(load_i64(a.index_count) * chunks, thread, threads)
    for item in range(first, last):
        line, column = item // chunks, item % chunks * _CHUNK_BYTES
        row = index[line]
        if row < 0 or row >= total:
            set_status(p, STATUS_ID)
            continue
        source, target = u8s(a.x + row * a.x_stride + column), u8s(a.y + line * width + column)
        for i in range(min(_CHUNK_BYTES, width - column)):
            target[i] = source[i]


@BACKEND.kernel("gather_rows", layout={"x": "rows"})
def gather_rows(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.rows
    width = prod(x.meta.inner) * x.dtype.nbytes
    total, count = ctx.live(x.meta.rows), ctx.live(rows.meta.rows)
    block = GatherArgs(x.address, x.row_stride, total, rows.address, count, ctx.out.address, width)
    return Launch(_gather, block)


class ColumnsArgs(NamedTuple):
    """Argument block of `gather_columns`."""

    x: int
    x_stride: int
    columns: int  # int32
    y: int
    rows: int  # address of the live count
    width: int


_read_columns = argument_reader(ColumnsArgs)


@kernel
def _gather_columns(p, thread, threads):
    a = _read_columns(p)
    order, width = i32s(a.columns), a.width
    chunks = (width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
    first, last = thread_range(load_i64(a.rows) * chunks, thread, threads)
    for item in range(first, last):
        row, column = item // chunks, item % chunks * CHUNK_COLUMNS
        source, target = f32s(a.x + row * a.x_stride), f32s(a.y + 4 * row * width)
        for i in range(column, min(column + CHUNK_COLUMNS, width)):
            if order[i] < 0 or order[i] >= width:
                set_status(p, STATUS_ID)
            else:
                target[i] = source[order[i]]


@BACKEND.kernel("gather_columns", layout={"x": "rows"})
def gather_columns(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.live(ctx.x.meta.rows)
    width = x.meta.inner[0]
    args = x.address, x.row_stride, ctx.columns.address, ctx.out.address, rows, width
    return Launch(_gather_columns, ColumnsArgs(*args))


class ConcatArgs(NamedTuple):
    """Argument block of `concat`: a [rows, lines, a_width] and b [rows, lines, b_width]."""

    a: int
    a_stride: int
    b: int
    b_stride: int
    y: int
    rows: int  # address of the live count
    lines: int
    a_width: int
    b_width: int


_read_concat = argument_reader(ConcatArgs)


@kernel
def _concat(p, thread, threads):
    w = _read_concat(p)
    lines, a_width, b_width = w.lines, w.a_width, w.b_width
    first, last = thread_range(load_i64(w.rows) * lines, thread, threads)
    for item in range(first, last):
        row, line = item // lines, item % lines
        left = f32s(w.a + row * w.a_stride + 4 * line * a_width)
        right = f32s(w.b + row * w.b_stride + 4 * line * b_width)
        target = f32s(w.y + 4 * item * (a_width + b_width))
        for i in range(a_width):
            target[i] = left[i]
        for i in range(b_width):
            target[a_width + i] = right[i]


@BACKEND.kernel("concat", layout={"a": "rows", "b": "rows"})
def concat(ctx: KernelContext) -> Launch:
    a, b = ctx.a, ctx.b
    *lines, width = a.meta.inner
    block = ConcatArgs(
        a=a.address,
        a_stride=a.row_stride,
        b=b.address,
        b_stride=b.row_stride,
        y=ctx.out.address,
        rows=ctx.live(a.meta.rows),
        lines=prod(lines),
        a_width=width,
        b_width=b.meta.inner[-1],
    )
    return Launch(_concat, block)


class PaddingArgs(NamedTuple):
    """Argument block of `rebuild_padding` and `remove_padding`."""

    x: int
    x_stride: int
    q_start: int
    starts: int  # address of the live length of q_start
    rows: int  # address of the live length of axis 0 of the padded operand
    tokens: int  # address of the live number of packed tokens
    y: int
    length: int  # rows of a rectangle
    width: int  # elements of a row


_read_padding = argument_reader(PaddingArgs)


@kernel
def _rebuild(p, thread, threads):
    a = _read_padding(p)
    q_start, starts, tokens = i32s(a.q_start), load_i64(a.starts), load_i64(a.tokens)
    length, width = a.length, a.width
    first, last = thread_range(starts * length, thread, threads)
    for item in range(first, last):
        sequence, position = item // length, item % length
        begin = q_start[sequence]
        end = q_start[sequence + 1] if sequence + 1 < starts else begin
        if begin < 0 or end > tokens or end - begin > length:
            set_status(p, STATUS_ID)
            continue
        target = f32s(a.y + 4 * item * width)
        source = f32s(a.x + (begin + position) * a.x_stride)
        if begin + position < end:
            for i in range(width):
                target[i] = source[i]
        else:
            for i in range(width):
                target[i] = 0


@kernel
def _remove(p, thread, threads):
    a = _read_padding(p)
    q_start, starts, rows = i32s(a.q_start), load_i64(a.starts), load_i64(a.rows)
    length, width = a.length, a.width
    first, last = thread_range(load_i64(a.tokens), thread, threads)
    sequence = 0
    for token in range(first, last):
        while sequence + 1 < starts and q_start[sequence + 1] <= token:
            sequence += 1
        position = token - q_start[sequence]
        if sequence + 1 >= starts or sequence >= rows or position < 0 or position >= length:
            set_status(p, STATUS_ID)
            continue
        source = f32s(a.x + sequence * a.x_stride + 4 * position * width)
        target = f32s(a.y + 4 * token * width)
        for i in range(width):
            target[i] = source[i]


@BACKEND.kernel("rebuild_padding", layout={"x": "rows"})
def rebuild_padding(ctx: KernelContext) -> Launch:
    x, starts = ctx.x, ctx.live(ctx.q_start.meta.rows)
    args = PaddingArgs(
        x.address, x.row_stride, ctx.q_start.address, starts, starts, ctx.live(x.meta.rows),
        ctx.out.address, ctx.attrs["length"], prod(x.meta.inner),
    )  # fmt: skip
    return Launch(_rebuild, args)


@BACKEND.kernel("remove_padding", layout={"x": "rows", "tokens": "any"})
def remove_padding(ctx: KernelContext) -> Launch:
    x, starts = ctx.x, ctx.live(ctx.q_start.meta.rows)
    length, *inner = x.meta.inner
    args = PaddingArgs(
        x.address, x.row_stride, ctx.q_start.address, starts, ctx.live(x.meta.rows),
        ctx.live(ctx.out.meta.rows), ctx.out.address, length, prod(inner),
    )  # fmt: skip
    return Launch(_remove, args)
