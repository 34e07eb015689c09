"""Pooling of packed sequences."""

from __future__ import annotations

from ....ops.pooling import POOLINGS
from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("pooling")
_THREADS = 256
_BLOCKS = 8  # of a multiprocessor: a block computes several sequences of a batch of many


@BACKEND.kernel("pool", layout={"x": ROWS})
def pool(ctx: KernelContext) -> Launch:
    x, starts = ctx.x, ctx.q_start.meta.rows
    args = (x.address, x.row_stride, ctx.q_start.address, ctx.out.address,
            ctx.live_address(starts), x.width, list(POOLINGS).index(ctx.attrs["kind"]))  # fmt: skip
    places = (x.address, x.row_stride, ctx.out.address, 4 * x.width)
    each = 4 if all(at % 16 == 0 for at in places) else 1
    blocks = min(ctx.upper_bound(starts), _BLOCKS * ctx.device.gpu.processors)
    return Launch(_MODULE[f"pool_{each}"], (blocks, ceil(x.width, 32 * each)), (_THREADS,), args)
