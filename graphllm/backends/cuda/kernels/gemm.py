"""Linears of many tokens: cuBLASLt, on plain weights or on block weights dequantized to f16.

Block weights are dequantized into a workspace, as many matrices at a time as fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ....backends.alignment import aligned
from ....formats import ROW_FORMATS
from ....graph.dtype import F16, F32, DType
from ....graph.tensor import Meta, Tensor
from ..runtime import cublaslt
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import HostCall, Launch, Work, ceil
from .weight_packing import item_elements, planes

MAX_BLOCK_TOKENS = 128  # tokens of a thread block of small_batch_blocks.cu

PLAIN = ("f32", "f16", "bf16")
_PLANES = ArgumentStruct("formats.cuh", "Planes")
_TILE = 256 << 20  # bytes of dequantized weights at a time
_TILE_ROWS = 256  # their rows are a multiple, so that results are aligned as cuBLASLt needs it
_MAX_BATCH_STRIDE = 1 << 38  # bytes between two matrices of a batched product


@dataclass(frozen=True)
class Job:
    """One linear: out = residual + x w^T + bias. cuBLASLt takes a bias of the dtype of ``out``."""

    x: OperandRef
    w: OperandRef
    bias: OperandRef | None
    out: OperandRef
    residual: OperandRef | None = None

    @property
    def rows(self) -> int:
        return int(self.w.meta.shape[0])  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return int(self.w.meta.shape[1])  # type: ignore[arg-type]


def grouped_job(ctx: KernelContext, index: int, out: OperandRef) -> Job:
    """The linear with operands number ``3 * index`` and the next two: x, w and bias."""
    x, w, bias = ctx.inputs[3 * index : 3 * index + 3]
    assert x is not None and w is not None
    return Job(x, w, bias, out)


def planes_argument(w: OperandRef | None) -> bytes:
    """The struct Planes of a weight; null pointers for None."""
    return bytes(_PLANES.size) if w is None else planes_struct(w.address, w.meta)


def planes_struct(address: int, meta: Meta) -> bytes:
    """The struct Planes of a weight at ``address``."""
    return _PLANES.pack(**dict(zip("abcd", planes(address, meta))))


def matmul_dtype(kind: DType) -> DType:
    """dtype that weights of ``kind`` are multiplied in."""
    return kind if kind.name in PLAIN else F16


def dequantize_module(kind: DType) -> Any:
    return module("gemm", FORMAT=kind.name.upper())


# ---------------------------------------------------------------------------------------- products


def gemms(ctx: KernelContext, jobs: Sequence[Job], workspace: int) -> list[Work]:
    """Work of linears of one activation, which has `matmul_dtype` of each weight.

    Args:
        ctx: the step.
        jobs: the linears.
        workspace: address of `workspace_nbytes` bytes.
    """
    work: list[Work] = []
    ready: list[cublaslt.Matmul] = []
    at = workspace
    for job in jobs:
        if job.w.dtype.name in PLAIN:
            ready.append(_product(job, job.w.address))
            continue
        size = _dequantized_nbytes(job.rows, job.depth)
        if at + size > workspace + _TILE:
            work += multiply(ctx, job.x, ready)
            ready, at = [], workspace
        if size > _TILE:
            work += _in_tiles(ctx, job, workspace)
            continue
        work.append(_dequantize(job, 0, job.rows, at))
        ready.append(_product(job, at))
        at += size
    return work + multiply(ctx, jobs[0].x, ready)


def _product(job: Job, w: int, first: int = 0, count: int = 0) -> cublaslt.Matmul:
    """The product of a job, or of its ``count`` rows from ``first`` on, stored at address ``w``."""
    bias, residual = job.bias, job.residual
    shift = job.out.dtype.nbytes * first
    return cublaslt.Matmul(
        job.x.dtype, job.out.dtype, count or job.rows, job.depth, job.x.address, job.x.row_stride,
        w, job.out.address + job.out.dtype.nbytes * first, job.out.row_stride,
        bias.address + shift if bias else 0,
        residual.address + shift if residual else 0, residual.row_stride if residual else 0,
    )  # fmt: skip


def multiply(ctx: KernelContext, x: OperandRef, products: Sequence[cublaslt.Matmul]) -> list[Work]:
    """The products in order; two adjacent ones of one shape are batched."""
    work: list[Work] = []
    left = list(products)
    while left:
        p = left.pop(0)
        batch = _as_batch(p, left[0]) if left else None
        if batch:
            left.pop(0)
        work.append(_call(ctx, x, batch or p))
    return work


def _call(ctx: KernelContext, x: OperandRef, p: cublaslt.Matmul) -> HostCall:
    rows = x.meta.rows
    ctx.live_address(rows)  # adds the dimension to the header
    return HostCall(lambda: cublaslt.matmul(ctx.device, p, ctx.live_value(rows)), rows)


def _as_batch(a: cublaslt.Matmul, b: cublaslt.Matmul) -> cublaslt.Matmul | None:
    """Both as one batched product, since one alone may not occupy the GPU; None if they differ."""
    if b.w < a.w:
        a, b = b, a
    pair = replace(a, batch=2, w_batch_stride=b.w - a.w, y_batch_stride=b.y - a.y)
    fits = not (a.bias or a.residual) and replace(a, w=b.w, y=b.y) == b
    strides = (pair.w_batch_stride, pair.y_batch_stride)
    return pair if fits and all(0 < s < _MAX_BATCH_STRIDE for s in strides) else None


# ----------------------------------------------------------------------------------- dequantization


def _dequantized_nbytes(rows: int, depth: int) -> int:
    return aligned(2 * rows * depth)


def _dequantize(job: Job, first: int, count: int, to: int) -> Launch:
    """Dequantize ``count`` rows from ``first`` on to f16 at address ``to``."""
    items = job.depth // item_elements(job.w.dtype)
    args = (planes_argument(job.w), first * items, count * items, items, to)
    kernel = dequantize_module(job.w.dtype)["dequantize"]
    return Launch(kernel, (ceil(count * items, 128),), (128,), args)


def _in_tiles(ctx: KernelContext, job: Job, workspace: int) -> list[Work]:
    """A matrix that is larger than the workspace: dequantize and multiply some rows at a time."""
    work: list[Work] = []
    fit = max(1, _TILE // (2 * job.depth))
    rows = fit // _TILE_ROWS * _TILE_ROWS or fit
    for first in range(0, job.rows, rows):
        count = min(rows, job.rows - first)
        work.append(_dequantize(job, first, count, workspace))
        work.append(_call(ctx, job.x, _product(job, workspace, first, count)))
    return work


def permuted_nbytes(tokens: int, depth: int) -> int:
    """Bytes of an activation that permute_activations.cu has stored: whole chunks, whole blocks."""
    return 2 * ceil(tokens, MAX_BLOCK_TOKENS) * MAX_BLOCK_TOKENS * ceil(depth, 256) * 256


def workspace_nbytes(*pairs: tuple[Tensor | None, Tensor | None]) -> int:
    """Bytes of workspace for one step's linears, given as (activation, weight).

    It holds dequantized weights, or permuted activations, of which each weight may need its own, or
    activations of e4m3 as float32.
    """
    total = most = 0
    for x, w in pairs:
        assert x is not None and w is not None
        form = ROW_FORMATS.get(w.dtype.name)
        if x.dtype.quantised and form is not None and form.element != np.int8:
            most = max(most, Meta.of(x.shape, F32).bound().nbytes)
        if x.dtype.quantised or x.dtype == F32 or w.dtype.name in PLAIN:
            continue
        rows, depth = w.meta.bound().shape
        assert isinstance(rows, int) and isinstance(depth, int)
        total += _dequantized_nbytes(rows, depth)
        most += permuted_nbytes(KernelContext.upper_bound(x.meta.rows), depth)
    return max(min(total, _TILE), most)
