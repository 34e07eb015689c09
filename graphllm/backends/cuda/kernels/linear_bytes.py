"""Linears with weights in row formats and quantised activations, on tensor cores.

small_batch.cu multiplies few tokens, or any number; gemm_bytes.cu more on GPUs of capability 9.0.
Sums of int8 are exact, so that w8a8 has the same bits in both, and in gemv.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....formats import ROW_FORMATS, activation_of
from ..runtime.device import KernelContext
from ..runtime.work import Launch
from . import gemm_bytes, small_batch
from .gemm import Job
from .matrices import MAX_TOKENS, has_tensor_cores, has_wgmma


def is_exact(name: str) -> bool:
    """Whether the products of a row format with its activations are integers."""
    return name in ROW_FORMATS and ROW_FORMATS[name].element.kind == "i"


def needs_upcast(ctx: KernelContext, job: Job) -> bool:
    """Whether the activation is of e4m3, and the GPU has no tensor cores that multiply it."""
    quantised = job.w.dtype.name in ROW_FORMATS and job.x.dtype.quantised
    return quantised and not is_exact(job.w.dtype.name) and not has_tensor_cores(ctx)


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether these kernels multiply the linear. One token of integers is multiplied by gemv.cu."""
    kind = job.w.dtype
    if kind.name not in ROW_FORMATS or job.x.dtype != activation_of(kind):
        return False
    several = ctx.upper_bound(job.x.meta.rows) > 1 or ctx.deterministic
    return has_tensor_cores(ctx) and (several or not is_exact(kind.name))


def launch(ctx: KernelContext, jobs: Sequence[Job], act: int = 0, gated: bool = False) -> Launch:
    """Linears of one activation and format, or a gated unit, in one launch.

    Args:
        ctx: the step.
        jobs: at most `matrices.MAX_FUSED_LINEARS` linears for which `fits` holds.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second, as float32, to the first job's result.
    """
    many = ctx.upper_bound(jobs[0].x.meta.rows) > MAX_TOKENS and has_wgmma(ctx)
    if many and (is_exact(jobs[0].w.dtype.name) or not ctx.deterministic):
        return gemm_bytes.gemm(ctx, jobs, act, gated)
    return small_batch.small_batch(ctx, jobs, act, gated)


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for form in ROW_FORMATS.values():
        gemm_bytes.register(form.dtype)
