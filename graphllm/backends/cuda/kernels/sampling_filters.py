"""Filters of logits on the device."""

from __future__ import annotations

from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch

_MODULE = module("sampling_filters")
_FILTERS = ArgumentStruct("sampling_filters.cu", "Filters")
_THREADS = 1024


@BACKEND.kernel("filter_logits", layout={"logits": ROWS})
def filter_logits(ctx: KernelContext) -> Launch:
    x = ctx.logits
    packed = _FILTERS.pack(**{name: ctx.address(name) for name in _FILTERS.fields})
    args = (x.address, x.row_stride, x.width, packed, ctx.live_address(x.meta.rows),
            ctx.out.address)  # fmt: skip
    return Launch(_MODULE["filter_logits"], (ctx.upper_bound(x.meta.rows),), (_THREADS,), args)
