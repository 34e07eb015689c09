"""Linears of many tokens with weights and activations of bytes; see gemm_bytes.cu."""

from __future__ import annotations

from collections.abc import Sequence

from ....graph.dtype import DType
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.tensor_map import TILE_BYTES, tensor_map
from ..runtime.work import Arg, Launch, ceil
from .gemm import Job
from .matrices import MAX_FUSED_LINEARS, element_macros, matrices_argument
from .weight_packing import planes

_TOKENS, _THREADS = 128, 384  # of a block
_CLUSTER = 2  # blocks that share weights
_COLUMNS, _STAGES = 128, 6  # of a tile; tiles of the depth in shared memory
_PROMOTED = 4  # of these whose products tensor cores add without scales
_E4M3 = 2  # as in element_types.cuh
_SCALES_NBYTES = 1024  # of a stage


def _shared_nbytes(kind: DType) -> int:
    """Bytes of the struct Shared, and of its alignment."""
    scales = _SCALES_NBYTES * element_macros(kind)["GROUPED"]
    return _STAGES * (TILE_BYTES * (_COLUMNS + _TOKENS) + scales + 16) + 1024


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
    x, depth, gpu = jobs[0].x, jobs[0].depth, ctx.device.gpu
    kind, most = jobs[0].w.dtype, ctx.upper_bound(x.meta.rows)
    maps = [tensor_map(gpu, x.address, most, depth, x.row_stride, _TOKENS)]
    maps += [_weight_map(ctx, job.w, depth) for job in jobs]
    maps += [maps[-1]] * (MAX_FUSED_LINEARS - len(jobs))
    args = (b"".join(maps), x.address, x.row_stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), act)  # fmt: skip
    rows = [jobs[0].rows * 2] if gated else [job.rows for job in jobs]
    tiles = sum(ceil(count, _COLUMNS) for count in rows) * ceil(most, _TOKENS * _CLUSTER)
    # A cluster beyond those that run at a time would start when another one has ended.
    room = gpu.max_clusters(_launch(kind, gated, 1, ()))
    return _launch(kind, gated, max(1, min(tiles, room)), args)


def _launch(kind: DType, gated: bool, clusters: int, args: Sequence[Arg]) -> Launch:
    return Launch(
        kernel(kind, gated), (clusters, 1, _CLUSTER), (_THREADS,), args, _shared_nbytes(kind),
        cluster=_CLUSTER,
    )  # fmt: skip


def _weight_map(ctx: KernelContext, w: OperandRef, depth: int) -> bytes:
    """The tensor map of a matrix, of which a block requests half a tile."""
    rows, address = int(w.meta.shape[0]), planes(w.address, w.meta)[0]  # type: ignore[arg-type]
    return tensor_map(ctx.device.gpu, address, rows, depth, depth, _COLUMNS // _CLUSTER)


def register(kind: DType) -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for gated in (False, True):
        kernel(kind, gated)
