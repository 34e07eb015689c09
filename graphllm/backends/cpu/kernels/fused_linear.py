"""Kernels of the ops fused with linear; see `graphllm.ops.fused.linear`."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from ....backends.alignment import aligned
from ....formats import activation_of
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32s, kernel, load_i64
from ..runtime.lazy_numba import float32
from . import linear
from .elementwise import activation_function, thread_range
from .linear_microkernels import workspace
from .quantize_rows import (
    COLUMNS,
    ROW_BYTES,
    UNUSED,
    float_bytes,
    one_or_two,
    targets,
    write_row,
)
from .weight_packing import pack

# ----------------------------------------------------------------------------------------- linears


def _unmatched(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight cannot be multiplied with these activations."""
    assert x is not None and w is not None
    fits = w.dtype.name in FORMATS and (
        x.dtype == F32 or (w.dtype.quantised and x.dtype == activation_of(w.dtype))
    )
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _all_matched(node: Tensor, options: Options) -> str | None:
    reasons = [_unmatched(x, w) for x, w in zip(node.src[::3], node.src[1::3])]
    return next(filter(None, reasons), None)


@BACKEND.kernel("linears", when=_all_matched, **linear.RULES)
def linears(ctx: KernelContext) -> list[Launch]:
    """Launch one linear after the other, without barriers between them."""
    found = []
    for i, out in enumerate(ctx.results):
        x, w, bias = ctx.inputs[3 * i : 3 * i + 3]
        assert x is not None and w is not None
        found.append(linear.launch(ctx, x, w, bias, out, overlaps_previous=i > 0))
    return found


@BACKEND.kernel(
    "linear_add",
    dtypes={"r": "f32"},
    when=lambda node, options: _unmatched(*node.src[:2]),
    layout={"x": ROWS, "r": ROWS},
    pack={"w": pack},
)
def linear_add(ctx: KernelContext) -> Launch:
    return linear.launch(ctx, ctx.x, ctx.w, ctx.op("bias"), ctx.out, ctx.r)


# --------------------------------------------------------------------------------------------- glu


class GluArgs(NamedTuple):
    """Argument block of `glu`: gate and up [rows, inner, width]."""

    gate: int
    gate_stride: int
    up: int
    up_stride: int
    rows: int  # address of the live length of axis 0
    inner: int
    width: int
    y: int
    y_stride: int
    y_block: int  # see `Target`
    y_line: int  # bytes from line to line in a row of y
    y2: int  # 0: one target
    y2_stride: int
    y2_block: int
    y2_line: int


_read_glu = argument_reader(GluArgs)


@cache
def _glu(act: str, kind: str) -> Kernel:
    activate = activation_function(act, kind)

    @kernel(key=("glu", act, kind))
    def glu(p, thread, threads):
        w = _read_glu(p)
        inner, width, values = w.inner, w.width, workspace(ROW_BYTES)
        target = f32s(values)
        chunks = (width + COLUMNS - 1) // COLUMNS
        first, last = thread_range(load_i64(w.rows) * inner * chunks, thread, threads)
        for item in range(first, last):
            line, column = item // chunks, item % chunks * COLUMNS
            t, j, count = line // inner, line % inner, min(COLUMNS, width - column)
            at = 4 * (j * width + column)
            gate, up = f32s(w.gate + t * w.gate_stride + at), f32s(w.up + t * w.up_stride + at)
            for i in range(count):
                target[i] = activate(gate[i], float32(0)) * up[i]
            y = w.y + t * w.y_stride + j * w.y_line
            write_row(values, y, w.y_block, column, count, width)
            if w.y2 != 0:
                y2 = w.y2 + t * w.y2_stride + j * w.y2_line
                write_row(values, y2, w.y2_block, column, count, width)

    return glu


_GATES: dict[str, Any] = {
    "dtypes": {"gate": "f32", "up": "f32"},
    "layout": {"gate": ROWS, "up": ROWS},
}


@BACKEND.kernel("glu", when=one_or_two, scratch=float_bytes, **_GATES)
def glu(ctx: KernelContext) -> list[Launch]:
    return _glu_launch(ctx, ctx.gate, ctx.up, ctx.scratch)


def _glu_launch(ctx: KernelContext, gate: OperandRef, up: OperandRef, scratch: int) -> list[Launch]:
    """Launch the product of act(gate) and up; ``scratch``: see `_targets`."""
    *between, width = gate.meta.inner
    own, quantising = targets(ctx, ctx.results, gate.meta, scratch, same_rows=False)
    y, y2 = [*own, UNUSED][:2]
    lines = [4 * width if quantising else ref.dtype.row_nbytes(width) for ref in ctx.results]
    block = GluArgs(
        gate=gate.address,
        gate_stride=gate.row_stride,
        up=up.address,
        up_stride=up.row_stride,
        rows=ctx.live(gate.meta.rows),
        inner=prod(between),
        width=width,
        y=y.address,
        y_stride=y.stride,
        y_block=y.block,
        y_line=lines[0],
        y2=y2.address,
        y2_stride=y2.stride,
        y2_block=y2.block,
        y2_line=lines[-1],
    )
    return [Launch(_glu(ctx.attrs["act"], ctx.attrs["kind"]), block), *quantising]


def _gated_when(node: Tensor, options: Options) -> str | None:
    return _all_matched(node, options) or one_or_two(node, options)


def _half(node: Tensor) -> Meta:
    """Meta of the result of one of the two linears."""
    x, w = node.src[:2]
    assert x is not None and w is not None
    return Meta.of((x.meta.rows, w.meta.bound().shape[0]), F32)


@BACKEND.kernel(
    "gated",
    when=_gated_when,
    scratch=lambda node, options: 3 * aligned(_half(node).bound().nbytes),
    **linear.RULES,
)
def gated(ctx: KernelContext) -> list[Launch]:
    """Launch both linears without a barrier between them, then their gated product."""
    meta = _half(ctx.node)
    found, halves, nbytes = [], [], aligned(meta.bound().nbytes)
    for i in range(2):
        x, w, bias = ctx.inputs[3 * i : 3 * i + 3]
        assert x is not None and w is not None
        half = OperandRef(ctx.scratch + i * nbytes, meta, ctx.out.operand)
        halves.append(half)
        found.append(linear.launch(ctx, x, w, bias, half, overlaps_previous=i > 0))
    return [*found, *_glu_launch(ctx, halves[0], halves[1], ctx.scratch + 2 * nbytes)]
