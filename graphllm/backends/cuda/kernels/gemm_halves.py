"""Linears of many tokens with results of f16 or bf16; see gemm_halves.cu."""

from __future__ import annotations

from collections.abc import Sequence

from ....graph.dtype import BF16, F16, DType
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.tensor_map import interleaved_map, tensor_map
from ..runtime.work import Launch
from .gemm import Job
from .gemm_tiles import CLUSTER, TOKENS, count_tiles, launch, most_clusters, shared_nbytes
from .matrices import MAX_FUSED_LINEARS, has_wgmma, matrices_argument

_COLUMNS, _STAGES = 256, 4  # of a tile; tiles of the depth in shared memory
_SHARED = shared_nbytes(_COLUMNS, _STAGES)
_ROWS = 32  # that a tensor map interleaves
_KINDS = (F16, BF16)
NO_UNIT = -1  # in place of an activation


def kernel(kind: DType, act: int = NO_UNIT) -> Function:
    """The kernel for a dtype and an activation as in `elementwise.ACTIVATIONS`."""
    made = module("gemm_halves", BFLOAT=int(kind == BF16), ACT=act, COLUMNS=_COLUMNS,
                  STAGES=_STAGES, SHARED=_SHARED)  # fmt: skip
    return made["gemm_halves"]


def fits(ctx: KernelContext, jobs: Sequence[Job]) -> bool:
    """Whether `gemm` computes the linears of one activation, and has tiles for the whole GPU."""
    kind, most = jobs[0].x.dtype, ctx.upper_bound(jobs[0].x.meta.rows)
    if not has_wgmma(ctx) or len(jobs) > MAX_FUSED_LINEARS or kind not in _KINDS:
        return False
    if not all(_fits(job) for job in jobs):
        return False
    tiles = count_tiles(jobs, most, _COLUMNS)
    return tiles >= most_clusters(ctx, kernel(kind), _SHARED)


def _fits(job: Job) -> bool:
    """Whether dtypes, shape and alignment are those that the kernel takes."""
    rows = [ref for ref in (job.x, job.out, job.residual) if ref is not None]
    kinds = {ref.dtype for ref in (*rows, job.w)}
    places = [at for ref in rows for at in (ref.address, ref.row_stride)]
    places += [job.w.address, job.bias.address if job.bias else 0]
    whole = job.rows % _ROWS == 0 and job.depth % 8 == 0
    return len(kinds) == 1 and whole and all(at % 16 == 0 for at in places)


def gemm(ctx: KernelContext, jobs: Sequence[Job], act: int = NO_UNIT) -> Launch:
    """Linears of one activation, for which `fits` holds, in one launch.

    Args:
        ctx: the step.
        jobs: the linears; biases are float32, residuals of the dtype of the results.
        act: activation of the results before residuals are added, as in `elementwise.ACTIVATIONS`.
    """
    x, gpu = jobs[0].x, ctx.device.gpu
    depth, most, made = 2 * jobs[0].depth, ctx.upper_bound(x.meta.rows), kernel(x.dtype, act)
    maps = [tensor_map(gpu, x.address, most, depth, x.row_stride, TOKENS)]
    maps += [interleaved_map(gpu, job.w.address, job.rows, depth, _COLUMNS // CLUSTER)
             for job in jobs]  # fmt: skip
    maps += [maps[-1]] * (MAX_FUSED_LINEARS - len(jobs))
    args = (b"".join(maps), ctx.live_address(x.meta.rows), depth, matrices_argument(jobs))
    return launch(made, most_clusters(ctx, made, _SHARED), args, _SHARED)


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for kind in _KINDS:
        for act in range(NO_UNIT, 4):
            kernel(kind, act)


register()
