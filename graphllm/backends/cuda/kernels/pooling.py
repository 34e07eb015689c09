"""Pooling of packed sequences."""

from __future__ import annotations

from ....ops.pooling import POOLINGS
from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("pooling")
_THREADS = 128


@BACKEND.kernel("pool", layout={"x": ROWS})
def pool(ctx: KernelContext) -> Launch:
    x, starts = ctx.x, ctx.q_start.meta.rows
    args = (x.address, x.row_stride, ctx.q_start.address, ctx.out.address,
            ctx.live_address(starts), x.width, list(POOLINGS).index(ctx.attrs["kind"]))  # fmt: skip
    grid = (ctx.upper_bound(starts), ceil(x.width, _THREADS))
    return Launch(_MODULE["pool"], grid, (_THREADS,), args)
