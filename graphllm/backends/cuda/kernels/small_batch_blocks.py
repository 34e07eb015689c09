"""Linears of several tokens with block weights, on int8 tensor cores; see small_batch_blocks.cu."""

from __future__ import annotations

from collections.abc import Sequence

from ....formats import BLOCK_FORMATS
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import Job
from .matrices import has_clusters, has_tensor_cores, has_wgmma, matrices_argument, splits
from .weight_packing import PLANES

_TILES = (8, 16, 32, 64)  # tokens of a block
_SMALL_TILES = _TILES[:2]  # those that have room on other GPUs than those of capability 9.0
_ROWS, _THREADS = 128, 256  # of a block
_CHUNK = 256  # elements of the depth that a block takes at a time


def kernel(name: str, tokens: int) -> Function:
    """The kernel for a format and a number of tokens of a block."""
    made = module(
        "small_batch_blocks", FORMAT=name.upper(), TOKENS=tokens,
        RESIDENT=1 if tokens == max(_TILES) else 2, SHARED=shared_nbytes(tokens),
    )  # fmt: skip
    return made["small_batch"]


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether the kernel supports the linear."""
    several = ctx.deterministic or ctx.upper_bound(job.x.meta.rows) > 1
    return several and job.x.dtype.quantised and job.rows >= 16 and has_tensor_cores(ctx)


def shared_nbytes(tokens: int) -> int:
    """Bytes of the struct Shared, for any format; the source checks them."""
    scales = 4 * 8 * 20  # of the rows of a warp, or offsets
    rows = 16 * _CHUNK + max(2 * scales, scales // 4 + 16 * (16 + 8 + 48)) + 80
    x = tokens * (_CHUNK + 8 * (4 + 4))
    together = 4 if tokens < 32 else 2  # chunks
    return 8 * rows + 2 * together * x + 4 * tokens // 2 * _THREADS + 1024  # 1024: alignment


def blocks(ctx: KernelContext, jobs: Sequence[Job]) -> Launch:
    """Linears of one quantised activation of several tokens in one launch.

    Args:
        ctx: the step.
        jobs: at most `matrices.MAX_FUSED_LINEARS` linears of one format.
    """
    x, w, depth = jobs[0].x, jobs[0].w, jobs[0].depth
    most = ctx.upper_bound(x.meta.rows)
    sizes = _TILES if has_wgmma(ctx) else _SMALL_TILES
    tokens = next((n for n in sizes if n >= most), sizes[-1])
    rows = sum(ceil(job.rows, _ROWS) for job in jobs)
    count = splits([job.rows for job in jobs], depth, ctx.device.gpu.processors)
    together = 1  # blocks
    if has_clusters(ctx):
        together = count if tokens < _TILES[-1] else max(1, count // 2)
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), count)  # fmt: skip
    return Launch(
        kernel(w.dtype.name, tokens), (ceil(most, tokens), rows, together), (_THREADS,), args,
        shared_nbytes(tokens), prefetches=[job.w for job in jobs], cluster=together,
    )  # fmt: skip


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    assert PLANES.keys() == BLOCK_FORMATS.keys()
    for name in PLANES:
        for tokens in _TILES:
            kernel(name, tokens)
