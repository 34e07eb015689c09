"""Quantization of activations: int8 in blocks, or f16 and bf16."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("quantize")
_TARGET = ArgumentStruct("quantize.cuh", "Target")
_TARGETS = ArgumentStruct("quantize.cuh", "Targets")
_WARPS = 4  # of a thread block; each quantizes one block of activations
HALVES = {"f16": 1, "bf16": 2}  # kinds of quantize.cuh


def quantise(ctx: KernelContext, x: int, stride: int, out: OperandRef) -> Launch:
    """Quantize float32 rows to the dtype of ``out``.

    Args:
        ctx: the step.
        x: address of the rows.
        stride: bytes from one row to the next.
        out: the result.
    """
    kind, rows = HALVES.get(out.dtype.name, 0), ctx.upper_bound(out.meta.rows)
    args: list[int] = [x, stride, out.address, out.row_stride, ctx.live_address(out.meta.rows)]
    if kind:
        grid = (rows, ceil(out.width, 256 * _WARPS))
        return Launch(_MODULE["narrow"], grid, (32 * _WARPS,), [*args, out.width, kind])
    *lines, width = out.meta.inner  # blocks do not cross lines
    size, count = out.dtype.block, prod(lines)
    grid = (rows * count, ceil(width, size * _WARPS))
    args += [count, width, out.dtype.row_nbytes(width)]
    return Launch(_MODULE[f"quantise_{size}"], grid, (32 * _WARPS,), args)


@BACKEND.kernel("quantise_act", layout={"x": ROWS}, dtypes={"x": "f32"})
def quantise_act(ctx: KernelContext) -> Launch:
    return quantise(ctx, ctx.x.address, ctx.x.row_stride, ctx.out)


def target(ref: OperandRef) -> bytes:
    """Where and how a kernel writes the result ``ref``."""
    block = ref.dtype.block if ref.dtype.quantised else HALVES.get(ref.dtype.name, 0)
    line = ref.dtype.row_nbytes(ref.meta.inner[-1])
    return _TARGET.pack(at=ref.address, stride=ref.row_stride, block=block, line=line)


def targets(refs: Sequence[OperandRef]) -> bytes:
    """The `target` of each of at most two results."""
    return _TARGETS.pack(t=[target(ref) for ref in refs], count=len(refs))


def unit(refs: Sequence[OperandRef]) -> int:
    """N of quantize.cuh: a warp writes 32 N elements at a time."""
    return 8 if any(s.dtype.name in ("a8_256", *HALVES) for s in refs) else 1
