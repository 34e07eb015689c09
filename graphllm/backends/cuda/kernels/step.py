"""advance: make the sampled ids the input of the next step, in device memory."""

from __future__ import annotations

import numpy as np

from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("step")
_STATE = ArgumentStruct("step.cu", "State")
_TABLE_GROUP = ArgumentStruct("block_tables.cuh", "TableGroup")
_THREADS = 32
_OPERANDS = ("sampled", "ids", "pos", "kv_len", "count", "history")


@BACKEND.kernel("advance")
def advance(ctx: KernelContext) -> Launch:
    rows = ctx.kv_len.meta.rows
    groups, count = table_groups(ctx)
    state = _STATE.pack(
        **{name: ctx.address(name) for name in _OPERANDS},
        ring=ctx.history.meta.inner[0], block=ctx.attrs["block"], groups=count,
    )  # fmt: skip
    grid = (ceil(ctx.upper_bound(rows), _THREADS),)
    return Launch(_MODULE["advance"], grid, (_THREADS,), (state, groups, ctx.live_address(rows)))


def table_groups(ctx: KernelContext) -> tuple[int, int]:
    """Return the address and the number of the structs `TableGroup` of the variadic operands."""
    groups = b"".join(
        _TABLE_GROUP.pack(slot=slot.address, table=table.address, width=table.meta.inner[0])
        for slot, table in zip(ctx.rest[::2], ctx.rest[1::2])
    )
    address = ctx.constant(np.frombuffer(groups, np.uint8)) if groups else 0
    return address, len(ctx.rest) // 2
