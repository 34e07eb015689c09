"""advance: make the sampled ids the input of the next step, in device memory."""

from __future__ import annotations

import numpy as np

from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("step")
_STATE, _TABLE_GROUP = ArgumentStruct("step.cu", "State"), ArgumentStruct("step.cu", "TableGroup")
_THREADS = 32
_OPERANDS = ("sampled", "ids", "pos", "kv_len", "count", "history")


@BACKEND.kernel("advance")
def advance(ctx: KernelContext) -> Launch:
    slots, tables = ctx.rest[::2], ctx.rest[1::2]
    rows = ctx.kv_len.meta.rows
    state = _STATE.pack(
        **{name: ctx.address(name) for name in _OPERANDS},
        ring=ctx.history.meta.inner[0], block=ctx.attrs["block"], groups=len(slots),
    )  # fmt: skip
    groups = b"".join(
        _TABLE_GROUP.pack(slot=slot.address, table=table.address, width=table.meta.inner[0])
        for slot, table in zip(slots, tables)
    )
    groups_address = ctx.constant(np.frombuffer(groups, np.uint8)) if groups else 0
    grid = (ceil(ctx.upper_bound(rows), _THREADS),)
    args = (state, groups_address, ctx.live_address(rows))
    return Launch(_MODULE["advance"], grid, (_THREADS,), args)
