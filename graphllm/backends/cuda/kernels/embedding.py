"""Embedding rows by token id."""

from __future__ import annotations

from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import PLAIN, planes_argument
from .weight_packing import PACK, QUANTISED, item_elements

_THREADS = 256  # of a block, at most


def _float_kernel(name: str) -> Function:
    return module("embedding_float", FORMAT=PLAIN.index(name))["embedding"]


def _block_kernel(name: str) -> Function:
    return module("embedding", FORMAT=name.upper())["embedding"]


@BACKEND.kernel("embedding", name="embedding_plain", dtypes={"w": PLAIN})
def embedding_float(ctx: KernelContext) -> Launch:
    each = 4 if ctx.w.width % 4 == 0 else 1
    return _launch(ctx, _float_kernel(ctx.w.dtype.name), ctx.w.address, each)


@BACKEND.kernel("embedding", name="embedding_blocks", dtypes={"w": QUANTISED}, pack={"w": PACK})
def embedding_blocks(ctx: KernelContext) -> Launch:
    """Blocks are packed as for linears, so a table that is also the head is stored once."""
    w = ctx.w
    return _launch(ctx, _block_kernel(w.dtype.name), planes_argument(w), item_elements(w.dtype))


def _launch(ctx: KernelContext, kernel: Function, table: int | bytes, elements: int) -> Launch:
    """A launch in which each thread writes ``elements`` of a row."""
    ids, (count, width) = ctx.ids, ctx.w.meta.shape
    args = (ids.address, table, count, ctx.out.address, ctx.live_address(ids.meta.rows), width)
    threads = min(
        _THREADS, 32 * ceil(width // elements, 32)
    )  # few blocks: they are started in turn
    grid = (ctx.upper_bound(ids.meta.rows), ceil(width // elements, threads))
    return Launch(kernel, grid, (threads,), args)


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for name in PLAIN:
        _float_kernel(name)
    for name in QUANTISED:
        _block_kernel(name)


_all_instances()
