"""Rows of a table, by token id."""

from __future__ import annotations

import struct

from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil
from .gemm import PLAIN
from .weight_packing import PACK, PLANES, planes

_MODULE = module("embedding")
_THREADS = 128


@BACKEND.kernel("embedding", name="embedding_plain", dtypes={"w": PLAIN})
@BACKEND.kernel("embedding", name="embedding_blocks", dtypes={"w": tuple(PLANES)}, pack={"w": PACK})
def embedding(ctx: KernelContext) -> Launch:
    """Blocks lie as linears want them: of a table that is a linear's weight, too, there is one."""
    w, ids = ctx.w, ctx.ids
    count, width = w.meta.shape
    table = struct.pack("<4Q", *planes(w.address, w.meta))
    args = (ids.address, table, count, ctx.out.address, ctx.live_address(ids.meta.rows), width)
    grid = (ctx.upper_bound(ids.meta.rows), ceil(width, _THREADS))
    return Launch(_MODULE[f"embedding_{w.dtype.name}"], grid, (_THREADS,), args)
