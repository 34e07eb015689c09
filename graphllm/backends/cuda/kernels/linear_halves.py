"""Linears of many tokens whose results are f16 or bf16, as activations of the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....backends.alignment import aligned
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.work import Work
from . import gemm_halves
from .elementwise import ACTIVATIONS
from .fused_norm import unit_in_place
from .gemm import PLAIN, Job, gemms, grouped_job, workspace_nbytes
from .linear import dtype_mismatch
from .matrices import MAX_TOKENS
from .quantize import HALVES, quantise
from .weight_packing import PACK, QUANTISED

Builder = Callable[[KernelContext], list[Work]]


def _many_halves(node: Tensor, options: Options) -> str | None:
    """Why cuBLASLt cannot store f16 or bf16; None if it can."""
    x, kind = node.src[0], node.attrs["dtype"]
    assert x is not None
    if x.dtype.name not in HALVES or kind != x.dtype.name:
        return f"x is {x.dtype}, the result {kind}"
    few = KernelContext.upper_bound(x.meta.rows) <= MAX_TOKENS
    columns = [int(w.meta.shape[0]) for _, w in _pairs(node)]  # type: ignore[arg-type]
    if few or options.deterministic or any(count % 8 for count in columns):
        return "cuBLASLt does not compute it"
    return next(filter(None, (dtype_mismatch(*pair, options) for pair in _pairs(node))), None)


def _pairs(node: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Activation and weight of each linear."""
    if node.op == "linears_quantise":
        return list(zip(node.src[::3], node.src[1::3]))  # type: ignore[arg-type]
    return [node.src[:2]]  # type: ignore[list-item]


def _scratch(node: Tensor, options: Options) -> int:
    return sum(_bias_nbytes(w.meta) for _, w in _pairs(node)) + workspace_nbytes(*_pairs(node))


def _bias_nbytes(w: Meta) -> int:
    """Bytes of the bias of a weight as f16 or bf16."""
    return aligned(2 * int(w.shape[0]))  # type: ignore[arg-type]


def _products(
    ctx: KernelContext, jobs: Sequence[Job], act: tuple[str, str] = ("", "")
) -> list[Work]:
    """Work of linears with dense results; ``act``: their activation, and the kind of a gelu.

    Where cuBLASLt multiplies, it adds biases in the dtype of the results, or they are added before
    the activation, in float32.
    """
    unit = ACTIVATIONS[act] if act[0] else gemm_halves.NO_UNIT
    if gemm_halves.fits(ctx, jobs):
        return [gemm_halves.gemm(ctx, jobs, unit)]
    work: list[Work] = []
    workspace = ctx.scratch + sum(_bias_nbytes(job.w.meta) for job in jobs)
    at = ctx.scratch
    for job in jobs:
        narrow, bias = None, job.bias
        if bias is not None and not act[0]:
            narrow = OperandRef(at, Meta.of((1, job.rows), job.out.dtype), bias.operand)
            work.append(quantise(ctx, bias.address, 0, narrow))
        at += _bias_nbytes(job.w.meta)
        work += gemms(ctx, [replace(job, bias=narrow)], workspace)
        if act[0]:
            work.append(unit_in_place(ctx, job.out, bias, unit))
    return work


def _rows(out: OperandRef) -> OperandRef:
    """A result, with heads or without, as rows [T, N]."""
    inner = (out.row_stride, out.dtype.nbytes)
    meta = replace(out.meta, shape=(out.meta.rows, out.width), strides=inner)
    return replace(out, meta=meta)


def _kernels(op: str) -> Callable[[Builder], Builder]:
    """Register a builder for plain weights, and for block weights, which are packed."""
    rules: dict[str, Any] = {
        "when": _many_halves, "layout": {"x": ROWS, "r": ROWS}, "scratch": _scratch,
    }  # fmt: skip
    rest = {"r": "f16", "bias": "f32"}

    def register(build: Builder) -> Builder:
        plain, blocks = {"w": PLAIN, **rest}, {"w": QUANTISED, **rest}
        BACKEND.kernel(op, name=f"{op}_plain", dtypes=plain, **rules)(build)
        BACKEND.kernel(op, name=f"{op}_blocks", dtypes=blocks, pack={"w": PACK}, **rules)(build)
        return build

    return register


@_kernels("linear_quantise")
def linear_quantise(ctx: KernelContext) -> list[Work]:
    job = Job(ctx.x, ctx.w, ctx.op("bias"), _rows(ctx.out))
    return _products(ctx, [job], (ctx.attrs["act"], ctx.attrs["kind"]))


@_kernels("linears_quantise")
def linears_quantise(ctx: KernelContext) -> list[Work]:
    return _products(ctx, [grouped_job(ctx, i, _rows(out)) for i, out in enumerate(ctx.results)])


@_kernels("linear_add_quantise")
def linear_add_quantise(ctx: KernelContext) -> list[Work]:
    return _products(ctx, [Job(ctx.x, ctx.w, ctx.op("bias"), _rows(ctx.out), ctx.r)])
