"""linear: own kernels for few tokens; for gemms, see `gemm`.

Few: integer kernels on quantised activations for block formats (or float ones, as `Options.linear`
says), tensor cores for f16 and bf16. Above `MAX_F32_TOKENS` these take activations in half
precision, as cuBLASLt does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product
from typing import Any

from .... import ops
from ....graph.dtype import BF16, F16, F32, DType, dtype
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch, Work, ceil
from . import gemv_shapes
from .gemm import PLAIN, Job, dequantize_module, gemms, matmul_dtype, workspace_nbytes
from .gemv_shapes import Shape
from .quantize import HALVES
from .weight_packing import PACK, PLANES, item_elements, planes

MAX_F32_TOKENS = 8  # tokens, up to which plain weights meet activations of float32
MAX_SMALL_BATCH = 16  # tokens, up to which own kernels multiply; above the library is faster
MAX_FUSED_LINEARS = 3  # matrices in one launch
WARPS = 4  # of a block of gemv_unaligned.cu and experts_gemv.cu
_WARPS_PER_ROW, _BUSY_WARPS = (
    (1, 2, 4),
    20,
)  # warps that may share a row; warps that keep a processor busy
_STEP = 32  # depth that a warp of small_batch_f32.cu or small_batch.cu takes at a time
_SMALL_BATCH_ROWS = {
    64: 2.0,
    32: 1.4,
    16: 0.0,
}  # rows of a block of small_batch.cu: blocks a processor, then
_GEMV_TOKENS = (1, 2, 4, 8)  # tokens at a time


# ---------------------------------------------------------------------------------- few tokens


def _gemv_kernel(
    name: str, integer: bool, shape: Shape, tokens: int = 1, gated: bool = False, shared: int = 1
) -> Function:
    """gemv.cu for a format; see there for the macros."""
    made = module(
        "gemv", FORMAT=name.upper(), INTEGER=int(integer), TOKENS=tokens, ROWS=shape.rows,
        DEPTH=shape.depth, GATED=int(gated), NEXT=shape.next, SHARED_BY=shared, WARPS=shape.warps,
        AHEAD=int(shape.ahead), STAGED=int(shape.staged), RESIDENT=shape.resident,
    )  # fmt: skip
    return made["gemv"]


def _small_batch_f32_kernel(kind: DType) -> Function:
    return module("small_batch_f32", BFLOAT=int(kind == BF16))["small_batch"]


def _small_batch_kernel(kind: DType, side: int, gated: bool = False) -> Function:
    made = module("small_batch", BFLOAT=int(kind == BF16), SIDE=side, GATED=int(gated))
    return made["small_batch"]


def _unaligned_kernel(name: str) -> Function:
    return module("gemv_unaligned", FORMAT=PLAIN.index(name))["gemv"]


def _token_counts(name: str, integer: bool) -> tuple[int, ...]:
    """Counts of tokens that there are kernels for: as many as fit in registers."""
    return _GEMV_TOKENS if integer or name in PLAIN else _GEMV_TOKENS[:3]


def _matrices_argument(jobs: Sequence[Job]) -> bytes:
    """The struct Matrices of matrices.cuh."""
    packed = b""
    for job in jobs:
        bias = job.bias.address if job.bias else 0
        added = (job.added.address, job.added.row_stride) if job.added else (0, 0)
        packed += struct.pack(
            "<6QqQqq", *planes(job.w.address, job.w.meta), bias, job.out.address,
            job.out.row_stride, *added, job.rows,
        )  # fmt: skip
    return packed.ljust(80 * MAX_FUSED_LINEARS, b"\0")


def gemv(ctx: KernelContext, jobs: Sequence[Job], act: int = -1) -> Launch:
    """Up to three linears of one activation and format; or with ``act`` a gated unit (see
    `can_fuse_gate`), act(first) * second, written to the first one's result."""
    gated = act >= 0
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
        return Launch(_small_batch_f32_kernel(w.dtype), grid, (256,), args)
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
    staged = k + k // 4 if shape.staged else 0  # int8, and 8 bytes a block of 32
    return Launch(kernel, grid, (32 * shape.warps,), args, staged)


def _warps_per_row(groups: int, items: int, depth: int, ctx: KernelContext) -> int:
    """Warps that share the depth of some rows, of which there are so many groups: as many as keep
    every processor busy."""
    wanted = _BUSY_WARPS * ctx.device.gpu.processors
    return next(
        (n for n in _WARPS_PER_ROW if groups * n >= wanted or items < 64 * depth * n),
        _WARPS_PER_ROW[-1],
    )


def fits_small_batch(ctx: KernelContext, job: Job) -> bool:
    """Whether small_batch.cu can multiply these halves."""
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
    """Up to three linears of one activation in halves; or of two ``gated`` ones, ``act`` of the
    first times the second, to where the first goes."""
    x, processors = jobs[0].x, ctx.device.gpu.processors

    def blocks(side: int) -> int:
        rows = [2 * jobs[0].rows] if gated else [job.rows for job in jobs]
        return sum(ceil(count, side) for count in rows)

    least = min(job.rows for job in jobs) * (1 + gated)
    sides = (s for s, n in _SMALL_BATCH_ROWS.items() if s <= least and blocks(s) >= n * processors)
    side = next(sides)
    kind = HALVES.get(jobs[0].out.dtype.name, 0)
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), jobs[0].depth,
            _matrices_argument(jobs), act, kind)  # fmt: skip
    grid = (blocks(side), ceil(ctx.upper_bound(x.meta.rows), MAX_SMALL_BATCH))
    return Launch(_small_batch_kernel(x.dtype, side, gated), grid, (256,), args)


def _launch(
    kernel: Function, jobs: Sequence[Job], rows: int, warps: int, y: int, args: list[Any]
) -> Launch:
    """``rows`` of the matrices to a warp, and ``warps`` such groups of rows to a block."""
    groups = sum(ceil(job.rows, rows) for job in jobs)
    return Launch(kernel, (ceil(groups, warps), y), (32 * WARPS,), args)


def has_tensor_cores(ctx: KernelContext) -> bool:
    """Whether there are those of capability 8.0, with bf16 and 16 deep."""
    return bool(ctx.device.gpu.capability >= (8, 0))


# ------------------------------------------------------------------------------------ registration


def few_tokens(x: Tensor | OperandRef, w: Tensor | OperandRef) -> bool:
    """Whether a step has so few rows that own kernels multiply them as float32 or int8."""
    return KernelContext.upper_bound(x.meta.rows) <= (
        MAX_SMALL_BATCH if w.dtype.quantised else MAX_F32_TOKENS
    )


def launches(ctx: KernelContext, jobs: Sequence[Job], room: int) -> list[Work]:
    """Several linears: those of one activation and format together."""
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
            work += gemms(ctx, own, room)
            continue
        launch = small_batch if kind == "small_batch" else gemv
        work += [
            launch(ctx, own[i : i + MAX_FUSED_LINEARS])
            for i in range(0, len(own), MAX_FUSED_LINEARS)
        ]
    return work


def can_fuse_gate(gate: Job, up: Job) -> bool:
    """Whether one kernel can go along both matrices at a time."""
    kind = gate.w.dtype
    if gate.x.dtype.name in HALVES:
        return False
    same = (gate.x.address, kind, gate.w.meta.shape) == (up.x.address, up.w.dtype, up.w.meta.shape)
    whole = kind.name in PLANES or (gate.depth % item_elements(kind) == 0)
    return same and whole and gate.x.address % 16 == 0


def activation(w: DType) -> str:
    """The quantised activations that the weight's format is multiplied with."""
    return "a8_32" if w.block == 32 else "a8_256"


def dtype_mismatch(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight does not meet these activations, as `_lower` leaves them."""
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
    """Few rows quantised for a block format, many in the kind that weights are multiplied as; float
    rows where vectors can be loaded from them."""
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
    """Every module that a plan may ask for is known from the start: tests compile them all."""
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
        for side, gated in product(_SMALL_BATCH_ROWS, (False, True)):
            _small_batch_kernel(kind, side, gated)


_all_instances()
