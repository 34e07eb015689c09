"""Draft tokens on the device; see `graphllm.ops.drafts`."""

from __future__ import annotations

from ....ops.drafts import LONGEST, SHORTEST
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil
from .step import table_groups

_MODULE = module("drafts")
_DRAFTS, _ROWS = ArgumentStruct("drafts.cu", "Drafts"), ArgumentStruct("drafts.cu", "Rows")
_THREADS, _PLACERS = 1024, 32  # of the block that looks tokens up, and of a block that places rows


def _drafts(ctx: KernelContext) -> bytes:
    sizes = {"count": ctx.drafts.meta.shape[0], "capacity": ctx.tokens.meta.shape[0]}
    names = ("drafts", "tokens", "progress")
    return _DRAFTS.pack(
        **{name: ctx.address(name) for name in names}, **sizes, shortest=SHORTEST, longest=LONGEST
    )


@BACKEND.kernel("accept_drafts")
def accept_drafts(ctx: KernelContext) -> Launch:
    live = ctx.live_address(ctx.sampled.meta.rows)
    args = (ctx.address("sampled"), _drafts(ctx), live)
    return Launch(_MODULE["accept_drafts"], (1,), (_THREADS,), args)


@BACKEND.kernel("place_drafts")
def place_drafts(ctx: KernelContext) -> Launch:
    rows = ctx.kv_len.meta.rows
    groups, count = table_groups(ctx)
    names = ("ids", "pos", "kv_len", "count")
    to = _ROWS.pack(
        **{name: ctx.address(name) for name in names}, block=ctx.attrs["block"], groups=count
    )
    grid = (ceil(ctx.upper_bound(rows), _PLACERS),)
    args = (_drafts(ctx), to, groups, ctx.live_address(rows))
    return Launch(_MODULE["place_drafts"], grid, (_PLACERS,), args)
