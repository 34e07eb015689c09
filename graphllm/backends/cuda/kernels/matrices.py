"""Several linears as one kernel argument; see matrices.cuh."""

from __future__ import annotations

from collections.abc import Sequence

from ....formats import ROW_FORMATS
from ....graph.dtype import BF16, DType
from ...kernel_context import address
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.work import ceil
from .gemm import Job, planes_argument

MAX_FUSED_LINEARS = 3  # matrices of one launch
MAX_TOKENS = 256  # tokens up to which the kernels of this package multiply; cuBLASLt above
_ROWS, _CHUNK = 128, 256  # rows and depth that a block of these kernels takes at a time
_MAX_SPLITS = 8  # blocks of a cluster
_OCCUPANCY = 1.72  # blocks of a multiprocessor, of which clusters fit
_MATRIX = ArgumentStruct("matrices.cuh", "Matrix")
_MATRICES = ArgumentStruct("matrices.cuh", "Matrices")


def matrices_argument(jobs: Sequence[Job]) -> bytes:
    """The matrices of at most `MAX_FUSED_LINEARS` linears."""
    matrices = [
        _MATRIX.pack(
            w=planes_argument(job.w), bias=address(job.bias), y=job.out.address,
            y_stride=job.out.row_stride, residual=address(job.residual),
            residual_stride=job.residual.row_stride if job.residual else 0, rows=job.rows,
        )
        for job in jobs
    ]  # fmt: skip
    return _MATRICES.pack(m=matrices)


def element_macros(kind: DType) -> dict[str, int]:
    """The macros of element_types.cuh for weights of ``kind``: f16, bf16 or a row format."""
    form = ROW_FORMATS.get(kind.name)
    if form is None:
        return {"BFLOAT": int(kind == BF16), "EIGHT_BITS": 0, "GROUPED": 0}
    eight_bits = 1 if form.element.kind == "i" else 2
    return {"BFLOAT": 0, "EIGHT_BITS": eight_bits, "GROUPED": int(not form.scaled_by_row)}


def has_tensor_cores(ctx: KernelContext) -> bool:
    """Whether the GPU has mma m16n8k16 with f16 and bf16 (capability 8.0)."""
    return bool(ctx.device.gpu.capability >= (8, 0))


def has_clusters(ctx: KernelContext) -> bool:
    """Whether the GPU has clusters of thread blocks (capability 9.0)."""
    return bool(ctx.device.gpu.capability >= (9, 0))


def has_wgmma(ctx: KernelContext) -> bool:
    """Whether the GPU has the instructions of wgmma.cuh (capability 9.0 alone)."""
    return bool(ctx.device.gpu.capability == (9, 0))


def splits(rows: Sequence[int], depth: int, processors: int) -> int:
    """Number of parts that the depth of some matrices is divided into: one or an even number.

    It decides the order of the sums, so it must not depend on the number of tokens. Of clusters of
    7 blocks, with a multiprocessor each, only 15 fit on an H200, one less than 4,096 rows need.

    Args:
        rows: rows of each matrix of the launch.
        depth: depth of the matrices.
        processors: multiprocessors of the GPU.
    """
    fit = int(_OCCUPANCY * processors / sum(ceil(count, _ROWS) for count in rows))
    most = max(1, min(_MAX_SPLITS, fit, ceil(depth, _CHUNK)))
    return max(1, most // 2 * 2)
