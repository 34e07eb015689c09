"""Quantization of activations: int8 and e4m3 in blocks or rows, or f16 and bf16."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ....graph.dtype import DType
from ....graph.tensor import Meta
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
_ROW_THREADS = 1024  # most threads of a block that quantizes a row
HALVES = {"f16": 1, "bf16": 2}  # kinds of quantize.cuh
_ROW_KINDS = {"a8_row": 3, "f8_row": 4, "f8_128": 5}  # enum RowKind
_OF_ROWS = ("a8_row", "f8_row")  # those with a scale per row, which only some kernels write


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
    args += [count, width, out.dtype.row_nbytes(width)]
    if out.dtype.name in _OF_ROWS:
        threads = min(_ROW_THREADS, ceil(width, 256) * 32)
        args.append(_ROW_KINDS[out.dtype.name])
        return Launch(_MODULE["quantise_row"], (rows * count,), (threads,), args)
    grid = (rows * count, ceil(width, max(size, 32 * unit([out])) * _WARPS))
    return Launch(_MODULE[f"quantise_{size}"], grid, (32 * _WARPS,), args)


@BACKEND.kernel("quantise_act", layout={"x": ROWS}, dtypes={"x": "f32"})
def quantise_act(ctx: KernelContext) -> Launch:
    return quantise(ctx, ctx.x.address, ctx.x.row_stride, ctx.out)


def dequantise(
    ctx: KernelContext, x: OperandRef, to: int, dtype: DType
) -> tuple[Launch, OperandRef]:
    """Store quantized activations as dense floats.

    Args:
        ctx: the step.
        x: activations in a format of rows of bytes.
        to: address of the floats.
        dtype: F32, or F16, to whose range values are clamped.

    Returns:
        The launch, and the floats.
    """
    *lines, width = x.meta.inner
    made = OperandRef(to, Meta.of(x.meta.shape, dtype), x.operand)
    args = (x.address, x.row_stride, x.dtype.row_nbytes(width), to, ctx.live_address(x.meta.rows),
            prod(lines), width, _ROW_KINDS[x.dtype.name], HALVES.get(dtype.name, 0))  # fmt: skip
    grid = (ctx.upper_bound(x.meta.rows) * prod(lines), ceil(width, 8 * 32 * _WARPS))
    return Launch(_MODULE["dequantise"], grid, (32 * _WARPS,), args), made


def has_row_scales(*names: str) -> bool:
    """Whether one of the dtypes has a scale per row, which needs the whole row."""
    return any(name in _OF_ROWS for name in names)


def target(ref: OperandRef) -> bytes:
    """Where and how a kernel writes the result ``ref``."""
    kinds = {**HALVES, **_ROW_KINDS}
    block = kinds.get(ref.dtype.name, ref.dtype.block if ref.dtype.quantised else 0)
    line = ref.dtype.row_nbytes(ref.meta.inner[-1])
    return _TARGET.pack(at=ref.address, stride=ref.row_stride, block=block, line=line)


def targets(refs: Sequence[OperandRef]) -> bytes:
    """The `target` of each of at most two results."""
    return _TARGETS.pack(t=[target(ref) for ref in refs], count=len(refs))


def unit(refs: Sequence[OperandRef]) -> int:
    """N of quantize.cuh: a warp writes 32 N elements at a time."""
    wide = ("a8_256", *HALVES, *_ROW_KINDS)
    return 8 if any(s.dtype.name in wide for s in refs) else 1
