"""Linears of several tokens with f16 or bf16 weights, on tensor cores; see small_batch.cu."""

from __future__ import annotations

from collections.abc import Sequence

from ....graph.dtype import BF16, F16, DType
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import Job
from .matrices import (
    MAX_TOKENS,
    has_clusters,
    has_tensor_cores,
    has_wgmma,
    matrices_argument,
    splits,
)
from .quantize import HALVES

# Tokens of a block -> its warpgroups, which compute 64 rows each, and its stages. GPUs of another
# capability than 9.0 may have shared memory for the first two only.
_SHAPES = {8: (2, 5), 16: (2, 5), 32: (2, 5), 64: (2, 4), 128: (4, 4)}
_SMALL = 16


def max_tokens(ctx: KernelContext) -> int:
    """Number of tokens up to which the kernel is used."""
    return MAX_TOKENS if has_wgmma(ctx) else _SMALL if has_tensor_cores(ctx) else 0


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether the kernel supports the linear, whose activation is f16 or bf16."""
    x = job.x
    aligned = job.depth % 8 == 0 and x.address % 16 == 0 and x.row_stride % 16 == 0
    fits = ctx.deterministic or ctx.upper_bound(x.meta.rows) <= max_tokens(ctx)
    return fits and job.w.dtype == x.dtype and aligned


def kernel(kind: DType, tokens: int, gated: bool = False) -> Function:
    """The kernel for a dtype and a number of tokens of a block."""
    warpgroups, stages = _SHAPES[tokens]
    made = module(
        "small_batch", BFLOAT=int(kind == BF16), TOKENS=tokens, WARPGROUPS=warpgroups,
        GATED=int(gated), STAGES=stages, SHARED=shared_nbytes(tokens),
    )  # fmt: skip
    return made["small_batch"]


def shared_nbytes(tokens: int) -> int:
    """Bytes of the struct Shared, which the source checks, and of its alignment."""
    warpgroups, stages = _SHAPES[tokens]
    return stages * (64 * warpgroups + tokens) * 128 + 1024


def small_batch(
    ctx: KernelContext, jobs: Sequence[Job], act: int = 0, gated: bool = False
) -> Launch:
    """Linears of one f16 or bf16 activation of several tokens, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `matrices.MAX_FUSED_LINEARS` linears.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
    x, depth = jobs[0].x, jobs[0].depth
    most = ctx.upper_bound(x.meta.rows)
    tokens = next((n for n in _SHAPES if n >= most), max(_SHAPES))
    side = 64 * _SHAPES[tokens][0] // (1 + gated)  # rows of a block
    own = jobs[:1] if gated else jobs
    rows = sum(ceil(job.rows, side) for job in own)
    count = splits([job.rows * (1 + gated) for job in own], depth, ctx.device.gpu.processors)
    together = count if has_clusters(ctx) else 1
    kind = HALVES.get(jobs[0].out.dtype.name, 0)
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), count, act, kind)  # fmt: skip
    return Launch(
        kernel(x.dtype, tokens, gated), (ceil(most, tokens), rows, together),
        (128 * _SHAPES[tokens][0],), args, shared_nbytes(tokens),
        prefetches=[job.w for job in jobs], cluster=together,
    )  # fmt: skip


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for kind in (F16, BF16):
        for tokens in _SHAPES:
            for gated in (False, True):
                kernel(kind, tokens, gated)
