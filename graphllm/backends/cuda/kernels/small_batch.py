"""Linears of several tokens on tensor cores, whose weights and activations have one type.

That is f16, bf16, or the bytes of a row format; see small_batch.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....formats import ROW_FORMATS
from ....graph.dtype import BF16, F16, DType
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import Job
from .matrices import (
    MAX_TOKENS,
    element_macros,
    has_clusters,
    has_tensor_cores,
    has_wgmma,
    matrices_argument,
    splits,
)
from .quantize import HALVES

# Tokens of a block -> its warpgroups, which compute 64 rows each, and its stages. GPUs of another
# capability than 9.0 may have shared memory for some of them only.
_SHAPES = {8: (2, 5), 16: (2, 5), 32: (2, 5), 64: (2, 4), 128: (4, 4)}
_SMALL_SHAPES = {8: (2, 5), 16: (2, 5)}
_SMALL = 16
_BYTES_SMALL_SHAPES = {**_SMALL_SHAPES, 32: (2, 4)}  # row formats have no other kernel there


def max_tokens(ctx: KernelContext) -> int:
    """Number of tokens up to which the kernel is used."""
    return MAX_TOKENS if has_wgmma(ctx) else _SMALL if has_tensor_cores(ctx) else 0


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether the kernel supports the linear, whose activation is f16 or bf16."""
    x = job.x
    aligned = job.depth % 8 == 0 and x.address % 16 == 0 and x.row_stride % 16 == 0
    fits = ctx.deterministic or ctx.upper_bound(x.meta.rows) <= max_tokens(ctx)
    return fits and job.w.dtype == x.dtype and aligned


def _shapes(kind: DType, small: bool) -> dict[int, tuple[int, int]]:
    """The kernels for a weight format, as in `_SHAPES`."""
    if small:
        return _BYTES_SMALL_SHAPES if kind.name in ROW_FORMATS else _SMALL_SHAPES
    floats = kind.name in ROW_FORMATS and ROW_FORMATS[kind.name].element.kind != "i"
    # Two sums of e4m3 for each product leave no registers for 128 tokens.
    return {n: shape for n, shape in _SHAPES.items() if n < 128 or not floats}


def kernel(kind: DType, tokens: int, gated: bool = False, small: bool = False) -> Function:
    """The kernel for a weight format and a number of tokens of a block.

    ``small``: for GPUs of another capability than 9.0.
    """
    warpgroups, stages = _shapes(kind, small)[tokens]
    made = module(
        "small_batch", **element_macros(kind), TOKENS=tokens, WARPGROUPS=warpgroups,
        GATED=int(gated), STAGES=stages, SHARED=shared_nbytes(kind, tokens, small),
    )  # fmt: skip
    return made["small_batch"]


def shared_nbytes(kind: DType, tokens: int, small: bool = False) -> int:
    """Bytes of the struct Shared, which the source checks, and of its alignment."""
    warpgroups, stages = _shapes(kind, small)[tokens]
    row = 128 + 4 * element_macros(kind)["GROUPED"]
    return stages * (64 * warpgroups + tokens) * row + 1024


def small_batch(
    ctx: KernelContext, jobs: Sequence[Job], act: int = 0, gated: bool = False
) -> Launch:
    """Linears of one activation of any number of tokens, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `matrices.MAX_FUSED_LINEARS` linears.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
    x, dtype, depth = jobs[0].x, jobs[0].w.dtype, jobs[0].depth
    most, small = ctx.upper_bound(x.meta.rows), not has_wgmma(ctx)
    shapes = _shapes(dtype, small)
    tokens = next((n for n in shapes if n >= most), max(shapes))
    warpgroups, _ = shapes[tokens]
    side = 64 * warpgroups // (1 + gated)  # rows of a block
    own = jobs[:1] if gated else jobs
    rows = sum(ceil(job.rows, side) for job in own)
    count = splits([job.rows * (1 + gated) for job in own], depth, ctx.device.gpu.processors)
    together = count if has_clusters(ctx) else 1
    kind = HALVES.get(jobs[0].out.dtype.name, 0)
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), count, act, kind)  # fmt: skip
    return Launch(
        kernel(dtype, tokens, gated, small), (ceil(most, tokens), rows, together),
        (128 * warpgroups,), args, shared_nbytes(dtype, tokens, small),
        prefetches=[job.w for job in jobs], cluster=together,
    )  # fmt: skip


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for kind in (F16, BF16, *(form.dtype for form in ROW_FORMATS.values())):
        for small in (False, True):
            for tokens in _shapes(kind, small):
                for gated in (False, True):
                    kernel(kind, tokens, gated, small)
