"""Padding: packed tokens as one rectangle [length, ...] for each sequence, and back."""

from __future__ import annotations

from math import prod

from ... import ANY, ROWS
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch
from .elementwise import rows_grid

_MODULE = module("padding")
_THREADS = 256


@BACKEND.kernel("rebuild_padding", layout={"x": ROWS})
def rebuild_padding(ctx: KernelContext) -> Launch:
    x, starts = ctx.x, ctx.live_address(ctx.q_start.meta.rows)
    args = (x.address, x.row_stride, ctx.q_start.address, ctx.out.address, starts,
            ctx.attrs["length"], prod(x.meta.inner))  # fmt: skip
    grid = rows_grid(ctx, ctx.out, _THREADS)
    return Launch(_MODULE["rebuild_padding"], grid, (_THREADS,), args)


@BACKEND.kernel("remove_padding", layout={"x": ROWS, "tokens": ANY})
def remove_padding(ctx: KernelContext) -> Launch:
    x = ctx.x
    length, *inner = x.meta.inner
    live = [ctx.live_address(each.meta.rows) for each in (ctx.out, ctx.q_start, x)]
    args = (x.address, x.row_stride, ctx.q_start.address, ctx.out.address, *live, length,
            prod(inner))  # fmt: skip
    grid = rows_grid(ctx, ctx.out, _THREADS)
    return Launch(_MODULE["remove_padding"], grid, (_THREADS,), args)
