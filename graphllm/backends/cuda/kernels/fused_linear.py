"""Kernels of the fused ops around linears; `graphllm.ops.fused.linear` declares the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ..runtime.device import KernelContext, OperandRef
from ..runtime.work import Launch, Work
from . import e4m3_copy, gated_e4m3, linear_bytes, small_batch, small_batch_blocks
from .elementwise import ACTIVATIONS
from .fused_norm import gated_halves, gated_unit, two_at_most
from .gemm import Job, grouped_job, workspace_nbytes
from .linear import can_fuse_gate, dtype_mismatch, first_pair, gemv, launches, linear_kernels, pairs
from .matrices import MAX_TOKENS
from .quantize import HALVES, quantise


def _all_matched(node: Tensor, options: Options) -> str | None:
    return next(filter(None, (dtype_mismatch(*pair, options) for pair in pairs(node))), None)


@linear_kernels(
    "linears", pairs, _all_matched, layout={"x": ROWS}, dtypes={"bias": "f32"},
    scratch=lambda node, options: workspace_nbytes(*pairs(node)),
)  # fmt: skip
def linears(ctx: KernelContext) -> list[Work]:
    jobs = [grouped_job(ctx, i, out) for i, out in enumerate(ctx.results)]
    return launches(ctx, jobs, ctx.scratch)


@linear_kernels(
    "linear_add", first_pair,
    lambda node, options: dtype_mismatch(node.src[0], node.src[1], options),
    layout={"x": ROWS, "r": ROWS}, dtypes={"r": "f32", "bias": "f32"},
    scratch=lambda node, options: workspace_nbytes(*first_pair(node)),
)  # fmt: skip
def linear_add(ctx: KernelContext) -> list[Work]:
    job = Job(ctx.x, ctx.w, ctx.op("bias"), ctx.out, ctx.r)
    return launches(ctx, [job], ctx.scratch)


def _linear_result(node: Tensor, deterministic: bool) -> Meta:
    """Meta of each linear's result before the activation.

    If the step's result is f16 or bf16 and cuBLASLt computes the linears, their results have that
    dtype, too: half the bytes, with an error of the same size.
    """
    x, w = node.src[:2]
    assert x is not None and w is not None
    rows, columns = x.meta.rows, w.meta.shape[0]
    bias = node.src[2] is not None or node.src[5] is not None
    narrow = x.dtype.name in HALVES and node.attrs["dtypes"] == (x.dtype.name,) and not bias
    made = Meta.of((rows, columns), F32)
    many = KernelContext.upper_bound(rows) > MAX_TOKENS and not deterministic
    fits = made.inner[0] % 8 == 0 and many
    return Meta.of(made.shape, x.dtype) if narrow and fits else made


def _gated_when(node: Tensor, options: Options) -> str | None:
    return _all_matched(node, options) or two_at_most(node, options)


def _gated_scratch(node: Tensor, options: Options) -> int:
    made = _linear_result(node, options.deterministic).bound()
    return 2 * aligned(made.nbytes) + workspace_nbytes(*pairs(node))


@linear_kernels(
    "gated", pairs, _gated_when, layout={"x": ROWS}, dtypes={"bias": "f32"}, scratch=_gated_scratch
)
def gated(ctx: KernelContext) -> list[Work]:
    """One kernel for one token, a small batch of halves, or bytes; else both linears, then the
    product, see also gated_e4m3.py."""
    x, forms, meta = ctx.x, ctx.results, _linear_result(ctx.node, ctx.deterministic)
    act = ACTIVATIONS[ctx.attrs["act"], ctx.attrs["kind"]]
    size = aligned(meta.bound().nbytes)
    results = [OperandRef(ctx.scratch + i * size, meta, ctx.out.operand) for i in range(2)]
    jobs = [e4m3_copy.on_copy(grouped_job(ctx, i, ref)) for i, ref in enumerate(results)]
    if can_fuse_gate(*jobs) and gated_e4m3.fits(ctx, jobs):
        return gated_e4m3.gated_e4m3(ctx, jobs, forms, act, ctx.scratch)
    narrow = any(form.dtype.name in HALVES for form in forms)
    alone = ctx.upper_bound(meta.rows) == 1 and not ctx.deterministic
    one: Callable[[KernelContext, Sequence[Job], int], Launch] | None = None
    if linear_bytes.fits(ctx, jobs[0]):
        one = _product_of_bytes
    elif alone and not narrow and not linear_bytes.needs_upcast(ctx, jobs[0]):
        one = gemv
    if one and can_fuse_gate(*jobs):
        if not ctx.attrs["dtypes"]:
            return [one(ctx, [replace(jobs[0], out=ctx.out), jobs[1]], act)]
        made, width = jobs[0].out, meta.inner[0]
        return [one(ctx, jobs, act),
                *(quantise(ctx, made.address, 4 * width, form) for form in forms)]  # fmt: skip
    if (
        x.dtype.name in HALVES
        and not forms[0].dtype.quantised
        and _can_fuse_small_batch(ctx, jobs, forms)
    ):
        pair = [replace(jobs[0], out=forms[0]), jobs[1]]
        if jobs[0].w.dtype.quantised:
            room = ctx.scratch + 2 * size
            return [*small_batch_blocks.blocks(ctx, [pair], room, act, gated=True)]
        return [small_batch.small_batch(ctx, pair, act, gated=True)]
    work = launches(ctx, jobs, ctx.scratch + 2 * size)
    if meta.dtype == F32:
        gate, up = results
        return [*work, *gated_unit(ctx, gate, up, gate.address)]
    return [*work, gated_halves(ctx, *results)]


def _product_of_bytes(ctx: KernelContext, jobs: Sequence[Job], act: int) -> Launch:
    return linear_bytes.launch(ctx, jobs, act, gated=True)


def _can_fuse_small_batch(ctx: KernelContext, jobs: list[Job], forms: list[OperandRef]) -> bool:
    """Whether one kernel for a small batch can compute both linears of the gated unit."""
    gate, up = jobs
    same = (gate.x.address, gate.w.meta) == (up.x.address, up.w.meta)
    fits = small_batch.fits(ctx, gate) or small_batch_blocks.fits(ctx, gate)
    return same and len(forms) == 1 and fits
