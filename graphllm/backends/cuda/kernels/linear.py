"""Linears: GEMV and small-batch kernels for few tokens; many tokens go to `gemm`.

Block formats multiply int8 activations (or float32, see `Options.linear`). f16 and bf16 weights
multiply float32 activations up to `MAX_F32_TOKENS` tokens, and above that activations of their own
dtype on tensor cores, as cuBLASLt does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from .... import ops
from ....graph.dtype import BF16, F16, F32, DType, dtype
from ....graph.tensor import Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch, Work, ceil
from . import gemv_shapes
from .gemm import (
    PLAIN,
    Job,
    dequantize_module,
    gemms,
    matmul_dtype,
    planes_argument,
    workspace_nbytes,
)
from .gemv_shapes import Shape
from .quantize import HALVES
from .weight_packing import PACK, PLANES, item_elements

MAX_F32_TOKENS = 8  # tokens up to which plain weights multiply float32 activations
MAX_SMALL_BATCH = 16  # tokens up to which kernels of this package multiply; cuBLASLt above
MAX_FUSED_LINEARS = 3  # matrices of one launch
WARPS = 4  # of a block of gemv_unaligned.cu and experts_gemv.cu
_WARPS_PER_ROW, _BUSY_WARPS = (1, 2, 4), 20  # choices; warps that keep a multiprocessor busy
_MATRIX = ArgumentStruct("matrices.cuh", "Matrix")
_MATRICES = ArgumentStruct("matrices.cuh", "Matrices")
_STEP = 32  # depth that a warp of small_batch_f32.cu or small_batch.cu takes at a time
# Rows of a block of small_batch.cu -> blocks per multiprocessor from which on that size is used.
_SMALL_BATCH_ROWS = {64: 2.0, 32: 1.4, 16: 0.0}
_GEMV_TOKENS = (1, 2, 4, 8)  # tokens that a GEMV kernel takes at a time


# ---------------------------------------------------------------------------------- few tokens


def _gemv_kernel(
    name: str, integer: bool, shape: Shape, tokens: int = 1, gated: bool = False, shared: int = 1
) -> Function:
    """gemv.cu for a format; the file describes the macros."""
    made = module(
        "gemv", FORMAT=name.upper(), INTEGER=int(integer), TOKENS=tokens, ROWS=shape.rows,
        DEPTH=shape.depth, GATED=int(gated), NEXT=shape.next, SHARED_BY=shared, WARPS=shape.warps,
        AHEAD=int(shape.ahead), STAGED=int(shape.staged), RESIDENT=shape.resident,
    )  # fmt: skip
    return made["gemv"]


def _small_batch_f32_kernel(kind: DType) -> Function:
    return module("small_batch_f32", BFLOAT=int(kind == BF16))["small_batch"]


def _small_batch_kernel(kind: DType, rows: int, gated: bool = False) -> Function:
    made = module("small_batch", BFLOAT=int(kind == BF16), SIDE=rows, GATED=int(gated))
    return made["small_batch"]


def _unaligned_kernel(name: str) -> Function:
    return module("gemv_unaligned", FORMAT=PLAIN.index(name))["gemv"]


def _token_counts(name: str, integer: bool) -> tuple[int, ...]:
    """Numbers of tokens that GEMV kernels exist for: those that fit in registers."""
    return _GEMV_TOKENS if integer or name in PLAIN else _GEMV_TOKENS[:3]


def _matrices_argument(jobs: Sequence[Job]) -> bytes:
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


def gemv(ctx: KernelContext, jobs: Sequence[Job], act: int = -1) -> Launch:
    """Linears of few tokens, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `MAX_FUSED_LINEARS` linears of one activation and format.
        act: an activation as in `elementwise.ACTIVATIONS`: act(first) * second is written to the
            first job's result, see `can_fuse_gate`. -1: no gated unit.
    """
    gated, weights = act >= 0, [job.w for job in jobs]
    x, w, k = jobs[0].x, jobs[0].w, jobs[0].depth
    name, most = w.dtype.name, ctx.upper_bound(x.meta.rows)
    args: list[int | float | bytes] = [
        x.address, x.row_stride, ctx.live_address(x.meta.rows), k, _matrices_argument(jobs)
    ]  # fmt: skip
    unaligned = x.dtype == F32 and (x.address % 16 or (x.row_stride % 16 and most > 1))
    if name in PLAIN and (k % item_elements(w.dtype) or unaligned):
        return _launch(_unaligned_kernel(name), jobs, 1, WARPS, most, args)
    if name in ("f16", "bf16") and most > 1 and k % _STEP == 0 and has_tensor_cores(ctx):
        grid = (sum(ceil(job.rows, 16) for job in jobs), ceil(most, 8))
        kernel = _small_batch_f32_kernel(w.dtype)
        return Launch(kernel, grid, (256,), args, prefetches=weights)
    sizes = _token_counts(name, x.dtype != F32)
    tokens = next((n for n in sizes if n >= most), sizes[-1])
    shape = gemv_shapes.shape(name, x.dtype != F32, k, gated, tokens)
    own = jobs[:1] if gated else jobs
    groups = sum(ceil(job.rows, shape.rows) for job in own)
    items = k // item_elements(w.dtype)
    shared = _warps_per_row(groups, items, shape.depth, ctx) if shape.split else 1
    kernel = _gemv_kernel(name, x.dtype != F32, shape, tokens, gated, shared)
    args.append(act)
    grid = (ceil(groups, shape.warps // shared), ceil(most, tokens))
    staged = x.dtype.row_nbytes(k) if shape.staged else 0
    return Launch(kernel, grid, (32 * shape.warps,), args, staged, prefetches=weights)


def _warps_per_row(groups: int, items: int, depth: int, ctx: KernelContext) -> int:
    """Number of warps that share the depth of a group of rows: enough to keep the GPU busy.

    Args:
        groups: groups of rows, one for each warp if none is shared.
        items: items of a row.
        depth: items of a row that a thread loads at a time.
        ctx: the step.
    """
    wanted = _BUSY_WARPS * ctx.device.gpu.processors
    return next(
        (n for n in _WARPS_PER_ROW if groups * n >= wanted or items < 64 * depth * n),
        _WARPS_PER_ROW[-1],
    )


def fits_small_batch(ctx: KernelContext, job: Job) -> bool:
    """Whether small_batch.cu supports the linear, whose activation is f16 or bf16."""
    x = job.x
    aligned = job.depth % _STEP == 0 and x.address % 16 == 0 and x.row_stride % 16 == 0
    fits = (
        ctx.upper_bound(x.meta.rows) <= MAX_SMALL_BATCH
        and job.w.dtype == x.dtype
        and job.rows >= min(_SMALL_BATCH_ROWS)
    )
    return fits and aligned and has_tensor_cores(ctx)


def small_batch(
    ctx: KernelContext, jobs: Sequence[Job], act: int = 0, gated: bool = False
) -> Launch:
    """Linears of one f16 or bf16 activation of few tokens, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `MAX_FUSED_LINEARS` linears.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
    x, processors = jobs[0].x, ctx.device.gpu.processors

    def blocks(block_rows: int) -> int:
        rows = [2 * jobs[0].rows] if gated else [job.rows for job in jobs]
        return sum(ceil(count, block_rows) for count in rows)

    least = min(job.rows for job in jobs) * (1 + gated)
    block_rows = next(
        rows for rows, wanted in _SMALL_BATCH_ROWS.items()
        if rows <= least and blocks(rows) >= wanted * processors
    )  # fmt: skip
    kind = HALVES.get(jobs[0].out.dtype.name, 0)
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), jobs[0].depth,
            _matrices_argument(jobs), act, kind)  # fmt: skip
    grid = (blocks(block_rows), ceil(ctx.upper_bound(x.meta.rows), MAX_SMALL_BATCH))
    kernel = _small_batch_kernel(x.dtype, block_rows, gated)
    return Launch(kernel, grid, (256,), args, prefetches=[job.w for job in jobs])


def _launch(
    kernel: Function, jobs: Sequence[Job], rows: int, warps: int, y: int, args: list[Any]
) -> Launch:
    """A launch with ``rows`` rows of the matrices per warp and ``warps`` warps per block."""
    groups = sum(ceil(job.rows, rows) for job in jobs)
    return Launch(kernel, (ceil(groups, warps), y), (32 * WARPS,), args)


def has_tensor_cores(ctx: KernelContext) -> bool:
    """Whether the GPU has mma m16n8k16 with f16 and bf16 (capability 8.0)."""
    return bool(ctx.device.gpu.capability >= (8, 0))


# ------------------------------------------------------------------------------------ registration


def few_tokens(x: Tensor | OperandRef, w: Tensor | OperandRef) -> bool:
    """Whether the GEMV kernels multiply x, as float32 or int8, at this number of tokens."""
    return KernelContext.upper_bound(x.meta.rows) <= (
        MAX_SMALL_BATCH if w.dtype.quantised else MAX_F32_TOKENS
    )


def launches(ctx: KernelContext, jobs: Sequence[Job], workspace: int) -> list[Work]:
    """Work of several linears; those of one activation and format share launches.

    Args:
        ctx: the step.
        jobs: the linears.
        workspace: address of `workspace_nbytes` bytes.
    """
    groups: dict[tuple[int, str], list[Job]] = {}  # by activation and kernel
    for job in jobs:
        if job.x.dtype.name in HALVES:
            kind = "small_batch" if fits_small_batch(ctx, job) else "gemm"
        else:
            kind = job.w.dtype.name if job.x.dtype.quantised or few_tokens(job.x, job.w) else "gemm"
        groups.setdefault((job.x.address, kind), []).append(job)
    work: list[Work] = []
    for (_, kind), own in groups.items():
        if kind == "gemm":
            work += gemms(ctx, own, workspace)
            continue
        launch = small_batch if kind == "small_batch" else gemv
        work += [
            launch(ctx, own[i : i + MAX_FUSED_LINEARS])
            for i in range(0, len(own), MAX_FUSED_LINEARS)
        ]
    return work


def can_fuse_gate(gate: Job, up: Job) -> bool:
    """Whether `gemv` can compute both linears of a gated unit in one kernel."""
    kind = gate.w.dtype
    if gate.x.dtype.name in HALVES:
        return False
    same = (gate.x.address, kind, gate.w.meta.shape) == (up.x.address, up.w.dtype, up.w.meta.shape)
    whole = kind.name in PLANES or (gate.depth % item_elements(kind) == 0)
    return same and whole and gate.x.address % 16 == 0


def activation(w: DType) -> str:
    """The activation format of a weight's block format."""
    return "a8_32" if w.block == 32 else "a8_256"


def dtype_mismatch(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight does not match the activation as `_lower` leaves it; None if it does."""
    assert x is not None and w is not None
    if x.dtype.quantised:
        fits = w.dtype.name in PLANES and x.dtype.name == activation(w.dtype)
    elif x.dtype == F32:
        fits = few_tokens(x, w) or w.dtype == F32
    else:
        fits = x.dtype == matmul_dtype(w.dtype)
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _when(node: Tensor, options: Options) -> str | None:
    x, w = node.src[:2]
    return None if x is not None and x.dtype == F32 else dtype_mismatch(x, w)


def lower_activation(x: Tensor, w: Tensor, few: bool, options: Options) -> Tensor:
    """The activation in the dtype that the kernels multiply.

    Few tokens are quantised for block formats, or made contiguous if float32 rows are not aligned
    to 16 bytes. Many tokens get `matmul_dtype` of the weight.
    """
    if x.dtype != F32:
        return x
    if not few:
        return (
            x
            if matmul_dtype(w.dtype) == F32
            else ops.quantise_act(x, dtype=matmul_dtype(w.dtype).name)
        )
    if w.dtype.name not in PLANES:
        return x
    if options.linear != "float":
        return ops.quantise_act(x, dtype=activation(w.dtype))
    apart = any(at % 16 for at in (x.meta.offset, *x.meta.strides[:-1]))
    return ops.contiguous(x) if apart else x


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    assert x is not None and w is not None
    return (lower_activation(x, w, few_tokens(x, w), options), w, *rest)


def _scratch(node: Tensor, options: Options) -> int:
    return workspace_nbytes((node.src[0], node.src[1]))


_RULES: dict[str, Any] = {
    "layout": {"x": ROWS},
    "when": _when,
    "lower": _lower,
    "scratch": _scratch,
}


@BACKEND.kernel("linear", name="linear_plain", dtypes={"w": PLAIN}, **_RULES)
@BACKEND.kernel(
    "linear", name="linear_blocks", dtypes={"w": tuple(PLANES)}, pack={"w": PACK}, **_RULES
)
def linear(ctx: KernelContext) -> list[Work]:
    return launches(ctx, [Job(ctx.x, ctx.w, ctx.op("bias"), ctx.out)], ctx.scratch)


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for name, integer in [*product(PLANES, (True, False)), *((name, False) for name in PLAIN)]:
        for tokens in _token_counts(name, integer)[1:]:
            _gemv_kernel(name, integer, gemv_shapes.shape(name, integer, 0, False, tokens), tokens)
        for k, gated in product(gemv_shapes.DEPTHS, (False, True)):
            shape = gemv_shapes.shape(name, integer, k, gated)
            for shared in _WARPS_PER_ROW if shape.split else (1,):
                _gemv_kernel(name, integer, shape, gated=gated, shared=shared)
    for name in PLANES:
        dequantize_module(dtype(name))
    for name in PLAIN:
        _unaligned_kernel(name)
    for kind in (F16, BF16):
        _small_batch_f32_kernel(kind)
        for rows, gated in product(_SMALL_BATCH_ROWS, (False, True)):
            _small_batch_kernel(kind, rows, gated)


_all_instances()
