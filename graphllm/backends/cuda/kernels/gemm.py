"""Linears of many tokens: the library's matrix products, on weights as they are or expanded.

Weights in blocks are expanded to f16, as many at a time as there is room for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....backends.alignment import aligned
from ....graph.dtype import F16, F32, DType
from ....graph.tensor import Tensor
from ..runtime import cublaslt
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import HostCall, Launch, Work, ceil
from .weight_packing import item_elements, planes

PLAIN = ("f32", "f16", "bf16")
_TILE = 128 << 20  # bytes of expanded weights at a time
_MAX_BATCH_STRIDE = 1 << 38  # bytes between two matrices of one product, at most


@dataclass(frozen=True)
class Job:
    """out = added + x w^T + bias."""

    x: OperandRef
    w: OperandRef
    bias: OperandRef | None
    out: OperandRef
    added: OperandRef | None = None

    @property
    def rows(self) -> int:
        return int(self.w.meta.shape[0])  # type: ignore[arg-type]

    @property
    def depth(self) -> int:
        return int(self.w.meta.shape[1])  # type: ignore[arg-type]


def matmul_dtype(kind: DType) -> DType:
    """What weights of ``kind`` are multiplied as."""
    return kind if kind.name in PLAIN else F16


def dequantize_module(kind: DType) -> Any:
    return module("gemm", FORMAT=kind.name.upper())


# ---------------------------------------------------------------------------------------- products


def gemms(ctx: KernelContext, jobs: Sequence[Job], room: int) -> list[Work]:
    """Linears of one activation, which is of the kind that each weight is multiplied as."""
    work: list[Work] = []
    ready: list[cublaslt.Matmul] = []
    at = room
    for job in jobs:
        if job.w.dtype.name in PLAIN:
            ready.append(_product(job, job.w.address))
            continue
        size = _dequantized_nbytes(job.rows, job.depth)
        if at + size > room + _TILE:
            work += _multiply(ctx, job.x, ready)
            ready, at = [], room
        if size > _TILE:
            work += _in_tiles(ctx, job, room)
            continue
        work.append(_dequantize(job, 0, job.rows, at))
        ready.append(_product(job, at))
        at += size
    return work + _multiply(ctx, jobs[0].x, ready)


def _product(job: Job, w: int, first: int = 0, count: int = 0) -> cublaslt.Matmul:
    """The job's, or of its ``count`` rows from ``first`` on, which lie at ``w``."""
    bias, added = job.bias, job.added
    shift = F32.nbytes * first
    return cublaslt.Matmul(
        job.x.dtype, job.out.dtype, count or job.rows, job.depth, job.x.address, job.x.row_stride,
        w, job.out.address + job.out.dtype.nbytes * first, job.out.row_stride,
        bias.address + shift if bias else 0,
        added.address + shift if added else 0, added.row_stride if added else 0,
    )  # fmt: skip


def _multiply(ctx: KernelContext, x: OperandRef, products: Sequence[cublaslt.Matmul]) -> list[Work]:
    """The products in order, two of one shape together."""
    work: list[Work] = []
    left = list(products)
    while left:
        p = left.pop(0)
        both = _as_batch(p, left[0]) if left else None
        if both:
            left.pop(0)
        work.append(_call(ctx, x, both or p))
    return work


def _call(ctx: KernelContext, x: OperandRef, p: cublaslt.Matmul) -> HostCall:
    rows = x.meta.rows
    ctx.live_address(rows)  # so that its value is known in each run
    return HostCall(lambda: cublaslt.matmul(ctx.device, p, ctx.live_value(rows)))


def _as_batch(a: cublaslt.Matmul, b: cublaslt.Matmul) -> cublaslt.Matmul | None:
    """One product in the place of two: small ones would leave processors without work."""
    if b.w < a.w:
        a, b = b, a
    two = replace(a, batch=2, w_batch_stride=b.w - a.w, y_batch_stride=b.y - a.y)
    fits = not (a.bias or a.residual) and replace(a, w=b.w, y=b.y) == b
    return (
        two
        if fits
        and 0 < two.w_batch_stride < _MAX_BATCH_STRIDE
        and 0 < two.y_batch_stride < _MAX_BATCH_STRIDE
        else None
    )


# --------------------------------------------------------------------------------------- expansion


def _dequantized_nbytes(rows: int, depth: int) -> int:
    return aligned(2 * rows * depth)


def _dequantize(job: Job, first: int, count: int, to: int) -> Launch:
    """Rows of the matrix as f16."""
    items = job.depth // item_elements(job.w.dtype)
    parts = struct.pack("<4Q", *planes(job.w.address, job.w.meta))
    args = (parts, first * items, count * items, items, to)
    kernel = dequantize_module(job.w.dtype)["dequantize"]
    return Launch(kernel, (ceil(count * items, 128),), (128,), args)


def _in_tiles(ctx: KernelContext, job: Job, room: int) -> list[Work]:
    """A matrix that is too large to be expanded at once."""
    work: list[Work] = []
    rows = max(1, _TILE // (2 * job.depth))
    for first in range(0, job.rows, rows):
        count = min(rows, job.rows - first)
        work.append(_dequantize(job, first, count, room))
        work.append(_call(ctx, job.x, _product(job, room, first, count)))
    return work


def workspace_nbytes(*pairs: tuple[Tensor | None, Tensor | None]) -> int:
    """Bytes of workspace for linears of these activations and weights, in one step."""
    total = 0
    for x, w in pairs:
        assert x is not None and w is not None
        if x.dtype.quantised or x.dtype == F32 or w.dtype.name in PLAIN:
            continue
        rows, depth = w.meta.bound().shape
        assert isinstance(rows, int) and isinstance(depth, int)
        total += _dequantized_nbytes(rows, depth)
    return min(total, _TILE)
