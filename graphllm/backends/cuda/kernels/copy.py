"""Copies: contiguous, cast, gather_rows, gather_columns, concat, and copies between memories."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ....graph.tensor import Tensor
from ... import ANY, ROWS, Options
from ...kernel_context import span
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.pool_layout import scales_are_apart
from ..runtime.source import module
from ..runtime.work import HostCall, Launch, ceil
from .elementwise import rows_grid

_MODULE = module("copy")
_SHAPE = ArgumentStruct("copy.cu", "Shape")
_THREADS = 256
_MAX_BLOCKS = 65535  # of a grid along its second axis
_FLOATS = ("f32", "f16", "bf16")  # as `FloatKind` of copy.cu counts them
_PLAIN = ("f32", "f16", "bf16", "i8", "i16", "i32", "i64", "f64")


@BACKEND.kernel("contiguous", layout={"x": ANY}, dtypes={"x": _PLAIN})
def contiguous(ctx: KernelContext) -> Launch:
    meta = ctx.x.meta
    dims, strides = [*meta.inner], [*meta.strides[1:]]
    missing = 3 - len(dims)
    dims, strides = [1] * missing + dims, [0] * missing + strides
    shape = _SHAPE.pack(stride=[ctx.x.row_stride, *strides], dims=dims, width=ctx.x.width)
    args = (ctx.x.address, shape, ctx.out.address, ctx.live_address(meta.rows))
    kernel = _MODULE[f"contiguous_{meta.dtype.nbytes}"]
    return Launch(kernel, rows_grid(ctx, ctx.x, _THREADS), (_THREADS,), args)


@BACKEND.kernel("cast", layout={"x": ROWS}, dtypes={"x": _FLOATS})
def cast(ctx: KernelContext) -> Launch:
    x, out = ctx.x, ctx.out
    rows, width, stride = x.meta.rows, x.width, x.row_stride
    flat = x.meta.contiguous and isinstance(rows, int) and rows * width <= _MAX_BLOCKS * _THREADS
    if flat:  # a vector's elements are its rows
        rows, width, stride = 1, rows * width, 0
    kinds = _FLOATS.index(x.dtype.name), _FLOATS.index(out.dtype.name)
    args = (x.address, stride, out.address, ctx.live_address(rows), width, *kinds)
    grid = (ctx.upper_bound(rows), ceil(width, _THREADS))
    return Launch(_MODULE["cast"], grid, (_THREADS,), args)


@BACKEND.kernel("gather_rows", layout={"x": ROWS}, dtypes={"x": _PLAIN})
def gather_rows(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.rows.meta.rows
    args = (
        x.address,
        x.row_stride,
        ctx.rows.address,
        ctx.out.address,
        ctx.live_address(rows),
        x.width,
    )
    kernel = _MODULE[f"gather_{x.dtype.nbytes}"]
    return Launch(kernel, (ctx.upper_bound(rows), ceil(x.width, _THREADS)), (_THREADS,), args)


@BACKEND.kernel("gather_columns", layout={"x": ROWS}, dtypes={"x": "f32"})
def gather_columns(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.x.meta.rows
    args = (
        x.address, x.row_stride, ctx.columns.address, ctx.out.address, ctx.live_address(rows),
        x.width,
    )  # fmt: skip
    return Launch(
        _MODULE["gather_columns"], rows_grid(ctx, x, _THREADS), (_THREADS,), args,
        prefetches=[ctx.columns],
    )  # fmt: skip


@BACKEND.kernel("concat", layout={"a": ROWS, "b": ROWS}, dtypes={"a": "f32", "b": "f32"})
def concat(ctx: KernelContext) -> Launch:
    a, b = ctx.a, ctx.b
    *lines, width = a.meta.inner
    args = (a.address, a.row_stride, b.address, b.row_stride, ctx.out.address,
            ctx.live_address(a.meta.rows), prod(lines), width, b.meta.inner[-1])  # fmt: skip
    return Launch(_MODULE["concat"], rows_grid(ctx, ctx.out, _THREADS), (_THREADS,), args)


def _reachable(node: Tensor, options: Options) -> str | None:
    """Only the host and this GPU can be copied to."""
    if scales_are_apart(node.sources[0].meta):
        return "quantised keys and values have a layout of their own on a GPU"
    memory = node.attrs["memory"]
    return None if memory == "host" or memory.startswith("cuda:0") else f"no way to {memory}"


@BACKEND.kernel("copy", when=_reachable)
def copy(ctx: KernelContext) -> HostCall:
    """A copy of the live rows between host memory and this GPU."""
    source, target, rows = ctx.x, ctx.out, ctx.x.meta.rows
    row = span(replace(source.meta, shape=(1, *source.meta.inner)))
    to_host = ctx.attrs["memory"] == "host"
    ctx.live_address(rows)  # adds the dimension to the header

    def run() -> None:
        count = ctx.live_value(rows)
        ctx.device.transfer(source.address, target.address, count * row, to_host)

    return HostCall(run)
