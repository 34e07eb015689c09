"""The end of a step: its ids become the next one's input, in device memory."""

from __future__ import annotations

import struct

import numpy as np

from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("step")
_THREADS = 32
_OPERANDS = ("sampled", "stop", "ids", "pos", "kv_len", "count", "done", "history")


@BACKEND.kernel("advance")
def advance(ctx: KernelContext) -> Launch:
    slots, tables = ctx.rest[::2], ctx.rest[1::2]
    rows = ctx.kv_len.meta.rows
    state = struct.pack(
        "<8Q4i", *map(ctx.address, _OPERANDS), ctx.stop.meta.shape[0],
        ctx.history.meta.inner[0], ctx.attrs["block"], len(slots),
    )  # fmt: skip
    groups = [(s.address, t.address, t.meta.inner[0]) for s, t in zip(slots, tables)]
    kept = ctx.constant(np.array(groups, np.int64)) if groups else 0
    grid = (ceil(ctx.upper_bound(rows), _THREADS),)
    return Launch(_MODULE["advance"], grid, (_THREADS,), (state, kept, ctx.live_address(rows)))
