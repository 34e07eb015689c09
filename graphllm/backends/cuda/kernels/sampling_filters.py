"""Filters of logits on the device."""

from __future__ import annotations

from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("sampling_filters")
_FILTERS = ArgumentStruct("sampling_filters.cu", "Filters")
_THREADS = 1024
_COPY_THREADS = 256


def row_blocks(ctx: KernelContext, rows: int, width: int) -> int:
    """Thread blocks that share a row of logits of a kernel that copies it."""
    least, most = ceil(width, 16 * _COPY_THREADS), ceil(width, 4 * _COPY_THREADS)
    return max(1, min(most, max(least, 8 * ctx.device.gpu.processors // max(1, rows))))


@BACKEND.kernel("filter_logits", layout={"logits": ROWS})
def filter_logits(ctx: KernelContext) -> list[Launch]:
    x, live = ctx.logits, ctx.live_address(ctx.logits.meta.rows)
    rows, out = ctx.upper_bound(x.meta.rows), ctx.out.address
    packed = _FILTERS.pack(**{name: ctx.address(name) for name in _FILTERS.fields})
    copied = (x.address, x.row_stride, x.width, live, out)
    grid = (rows, row_blocks(ctx, rows, x.width))
    return [
        Launch(_MODULE["copy_rows"], grid, (_COPY_THREADS,), copied),
        Launch(_MODULE["filter_logits"], (rows,), (_THREADS,), (out, x.width, packed, live)),
    ]
