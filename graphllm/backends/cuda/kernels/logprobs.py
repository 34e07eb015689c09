"""The most likely ids, and log-probabilities, on the device."""

from __future__ import annotations

from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch

_MODULE = module("logprobs")
_THREADS = 1024


@BACKEND.kernel("top_ids", layout={"logits": ROWS})
def top_ids(ctx: KernelContext) -> Launch:
    x = ctx.logits
    args = (x.address, x.row_stride, x.width, ctx.attrs["n"], ctx.live_address(x.meta.rows),
            ctx.out.address)  # fmt: skip
    return Launch(_MODULE["top_ids"], (ctx.upper_bound(x.meta.rows),), (_THREADS,), args)


@BACKEND.kernel("logprobs", layout={"logits": ROWS, "biased": ROWS})
def logprobs(ctx: KernelContext) -> Launch:
    x = ctx.logits
    biased = ctx.biased or x
    args = (x.address, x.row_stride, x.width, biased.address, biased.row_stride, ctx.ids.address,
            ctx.ids.width, ctx.live_address(x.meta.rows), ctx.out.address)  # fmt: skip
    return Launch(_MODULE["logprobs"], (ctx.upper_bound(x.meta.rows),), (_THREADS,), args)
