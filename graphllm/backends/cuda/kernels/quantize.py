"""Activations in fewer bits: int8 in blocks, or halves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("quantize")
_WARPS = 4  # of a block of threads; each does one block of activations
HALVES = {"f16": 1, "bf16": 2}  # what quantize.cuh calls them


def quantise(ctx: KernelContext, x: int, stride: int, out: OperandRef) -> Launch:
    """Float rows at address ``x``, ``stride`` bytes apart, to ``out``, whose dtype says how."""
    kind, rows = HALVES.get(out.dtype.name, 0), ctx.upper_bound(out.meta.rows)
    args: list[int] = [x, stride, out.address, out.row_stride, ctx.live_address(out.meta.rows)]
    if kind:
        grid = (rows, ceil(out.width, 256 * _WARPS))
        return Launch(_MODULE["narrow"], grid, (32 * _WARPS,), [*args, out.width, kind])
    *lines, width = out.meta.inner  # each line is in blocks for itself
    size, count = out.dtype.block, prod(lines)
    grid = (rows * count, ceil(width, size * _WARPS))
    args += [count, width, out.dtype.row_nbytes(width)]
    return Launch(_MODULE[f"quantise_{size}"], grid, (32 * _WARPS,), args)


@BACKEND.kernel("quantise_act", layout={"x": ROWS}, dtypes={"x": "f32"})
def quantise_act(ctx: KernelContext) -> Launch:
    return quantise(ctx, ctx.x.address, ctx.x.row_stride, ctx.out)


def target(ref: OperandRef) -> bytes:
    """The struct Target of quantize.cuh."""
    block = ref.dtype.block if ref.dtype.quantised else HALVES.get(ref.dtype.name, 0)
    line = ref.dtype.row_nbytes(ref.meta.inner[-1])
    return struct.pack("<Qqii", ref.address, ref.row_stride, block, line)


def targets(refs: Sequence[OperandRef]) -> bytes:
    """The struct Targets of quantize.cuh for at most two results."""
    assert len(refs) <= 2, refs
    return b"".join(map(target, refs)).ljust(48, b"\0") + struct.pack("<ii", len(refs), 0)


def unit(refs: Sequence[OperandRef]) -> int:
    """The N of quantize.cuh: a warp emits 32 N elements at a time."""
    return 8 if any(s.dtype.name in ("a8_256", *HALVES) for s in refs) else 1
