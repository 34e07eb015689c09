"""Gated units of fp8 with many tokens: products of cuBLASLt, then a kernel that scales them.

The library multiplies e4m3 faster than gemm_bytes.cu, which would also store a gated unit as
float32, and read it again to quantise its rows. Its scales of rows are slower than none, and need
cuBLAS 12.9; so products are stored without scales, as f16.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

from ....formats import ROW_FORMATS
from ....formats.activations import F8_ROW
from ....graph.dtype import F16
from ..runtime.arguments import ArgumentStruct
from ..runtime.cublaslt import E4M3, Matmul
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Launch, Work
from .gemm import Job, multiply
from .matrices import MAX_TOKENS, has_wgmma
from .norm import register_units
from .quantize import targets
from .weight_packing import planes

_MODULE = module("gated_e4m3")
_PRODUCT = ArgumentStruct("gated_e4m3.cu", "UnscaledProduct")
_LARGEST_F16, _LARGEST_E4M3 = 65504, 448
_ALIGNMENT = 16  # bytes of rows of factors and results, as the library asks for


def fits(ctx: KernelContext, jobs: Sequence[Job]) -> bool:
    """Whether `gated_e4m3` computes a gated unit of two linears of one shape and activation.

    Its results differ in their last bits from those of other kernels, so not if ``deterministic``.
    """
    gate, form = jobs[0], ROW_FORMATS.get(jobs[0].w.dtype.name)
    return (
        form is not None and form.activation == F8_ROW == gate.x.dtype
        and not any(job.bias for job in jobs)
        and ctx.upper_bound(gate.x.meta.rows) > MAX_TOKENS
        and has_wgmma(ctx) and not ctx.deterministic
        and gate.rows % _ALIGNMENT == 0 and register_units(gate.rows)[0] > 0
    )  # fmt: skip


def gated_e4m3(
    ctx: KernelContext, jobs: Sequence[Job], forms: Sequence[OperandRef], act: int, workspace: int
) -> list[Work]:
    """act(gate) * up, written to the step's results.

    Args:
        ctx: the step.
        jobs: the two linears.
        forms: at most two results.
        act: activation, as in `elementwise.ACTIVATIONS`.
        workspace: address of two results of the linears as f16.
    """
    gate, x = jobs[0], jobs[0].x
    tokens = ctx.upper_bound(x.meta.rows)
    shift = ceil(log2(_LARGEST_E4M3**2 * gate.depth / _LARGEST_F16))  # so that no sum is infinite
    results = [workspace + i * F16.nbytes * tokens * gate.rows for i in range(2)]
    pairs = [planes(job.w.address, job.w.meta) for job in jobs]
    if pairs[1][0] < pairs[0][0]:
        results.reverse()  # ascending as the weights are, so that one batch computes both
    products = [
        Matmul(E4M3, F16, gate.rows, gate.depth, x.address, x.row_stride, quants, result,
               F16.nbytes * gate.rows, scale=2.0**-shift)
        for (quants, *_), result in zip(pairs, results)
    ]  # fmt: skip
    return [*multiply(ctx, x, products), _scaled(ctx, jobs, forms, act, results, 2.0**shift)]


def _scaled(
    ctx: KernelContext, jobs: Sequence[Job], forms: Sequence[OperandRef], act: int,
    results: Sequence[int], factor: float,
) -> Launch:  # fmt: skip
    x, width = jobs[0].x, jobs[0].rows
    units, threads = register_units(width)
    scales = [planes(job.w.address, job.w.meta)[1] for job in jobs]
    gate, up = (_PRODUCT.pack(y=y, scales=own) for y, own in zip(results, scales))
    args = (gate, up, x.address + jobs[0].depth, x.row_stride, factor, targets(forms),
            ctx.live_address(x.meta.rows), width, act)  # fmt: skip
    grid = (ctx.upper_bound(x.meta.rows),)
    return Launch(_MODULE[f"gated_e4m3_{units}"], grid, (threads,), args)
