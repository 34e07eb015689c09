"""Linears of many tokens with weights and activations of bytes; see gemm_bytes.cu."""

from __future__ import annotations

from collections.abc import Sequence

from ....graph.dtype import DType
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.tensor_map import tensor_map
from ..runtime.work import Launch
from .gemm import Job
from .gemm_tiles import CLUSTER, TOKENS, count_tiles, launch, most_clusters, shared_nbytes
from .matrices import MAX_FUSED_LINEARS, element_macros, matrices_argument
from .weight_packing import planes

_COLUMNS, _STAGES = 128, 6  # of a tile; tiles of the depth in shared memory
_PROMOTED = 4  # of these whose products tensor cores add without scales
_E4M3 = 2  # as in element_types.cuh
_SCALES_NBYTES = 1024  # of a stage


def _shared_nbytes(kind: DType) -> int:
    return shared_nbytes(_COLUMNS, _STAGES, _SCALES_NBYTES * element_macros(kind)["GROUPED"])


def kernel(kind: DType, gated: bool = False) -> Function:
    """The kernel for a weight format."""
    macros = element_macros(kind)
    promoted = 1 if macros["GROUPED"] else _PROMOTED if macros["EIGHT_BITS"] == _E4M3 else 0
    made = module(
        "gemm_bytes", **macros, GATED=int(gated), COLUMNS=_COLUMNS, STAGES=_STAGES,
        PROMOTED=promoted, SHARED=_shared_nbytes(kind),
    )  # fmt: skip
    return made["gemm_bytes"]


def gemm(ctx: KernelContext, jobs: Sequence[Job], act: int, gated: bool) -> Launch:
    """Linears of one activation and format, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `MAX_FUSED_LINEARS` linears.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
    x, depth, kind = jobs[0].x, jobs[0].depth, jobs[0].w.dtype
    most, shared, made = ctx.upper_bound(x.meta.rows), _shared_nbytes(kind), kernel(kind, gated)
    maps = [tensor_map(ctx.device.gpu, x.address, most, depth, x.row_stride, TOKENS)]
    maps += [_weight_map(ctx, job.w, depth) for job in jobs]
    maps += [maps[-1]] * (MAX_FUSED_LINEARS - len(jobs))
    args = (b"".join(maps), x.address, x.row_stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), act)  # fmt: skip
    tiles = count_tiles(jobs, most, _COLUMNS, gated)
    return launch(made, max(1, min(tiles, most_clusters(ctx, made, shared))), args, shared)


def _weight_map(ctx: KernelContext, w: OperandRef, depth: int) -> bytes:
    """The tensor map of a matrix, of which a block requests half a tile."""
    rows, address = int(w.meta.shape[0]), planes(w.address, w.meta)[0]  # type: ignore[arg-type]
    return tensor_map(ctx.device.gpu, address, rows, depth, depth, _COLUMNS // CLUSTER)


def register(kind: DType) -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for gated in (False, True):
        kernel(kind, gated)
