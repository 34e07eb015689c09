"""Norms, softmax, and the ops fused with norms (`graphllm.ops.fused.norm`).

One thread computes a whole row, so the order of each sum is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt
from typing import Any, NamedTuple

from ....formats import A8_32, A8_256
from ....graph.dtype import DTYPES, F32
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import f32s, helper, kernel, load_i64
from ..runtime.lazy_numba import float32
from ..simd.math import exp32
from .elementwise import thread_range
from .linear_microkernels import workspace
from .quantize import rotate_blocks
from .quantize_rows import (
    COLUMNS,
    ROW_BYTES,
    UNUSED,
    Target,
    float_bytes,
    one_or_two,
    targets,
    write_row,
)


class NormArgs(NamedTuple):
    """Argument block of rms_norm and softmax over rows of ``width`` elements."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live length of axis 0
    inner: int  # rows in each index of axis 0
    width: int
    weight: int = 0
    eps: float = 0.0


_read_norm = argument_reader(NormArgs)


@kernel
def _rms_norm(p, thread, threads):
    a = _read_norm(p)
    inner, width, weight = a.inner, a.width, f32s(a.weight)
    first, last = thread_range(load_i64(a.rows) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(a.x + line // inner * a.x_stride + line % inner * width * 4)
        target = f32s(a.y + line * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i] * source[i]
        factor = float32(1) / float32(sqrt(total / float32(width) + a.eps))
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@kernel
def _softmax(p, thread, threads):
    a = _read_norm(p)
    inner, width = a.inner, a.width
    first, last = thread_range(load_i64(a.rows) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(a.x + line // inner * a.x_stride + line % inner * width * 4)
        target = f32s(a.y + line * width * 4)
        largest = source[0]
        for i in range(width):
            largest = max(largest, source[i])
        total = float32(0)
        for i in range(width):
            target[i] = exp32(source[i] - largest)
            total += target[i]
        for i in range(width):
            target[i] /= total


def _arguments(ctx: KernelContext) -> NormArgs:
    x = ctx.x.meta
    width = x.shape[-1]
    rows, inner = ctx.live(x.rows), prod(x.inner) // max(width, 1)
    return NormArgs(ctx.x.address, ctx.x.row_stride, ctx.out.address, rows, inner, width)


@BACKEND.kernel("rms_norm", dtypes={"x": "f32", "w": "f32"}, layout={"x": "rows"})
def rms_norm(ctx: KernelContext) -> Launch:
    block = _arguments(ctx)._replace(weight=ctx.w.address, eps=ctx.attrs["eps"])
    return Launch(_rms_norm, block)


@BACKEND.kernel("softmax", dtypes={"x": "f32"}, layout={"x": "rows"})
def softmax(ctx: KernelContext) -> Launch:
    return Launch(_softmax, _arguments(ctx))


# ------------------------------------------------------------------------------------------- fused


@helper
def rms_norm_factor(row, width, eps):
    """The factor by which a root-mean-square norm scales a row."""
    values, total = f32s(row), float32(0)
    for i in range(width):
        total += values[i] * values[i]
    return float32(1) / float32(sqrt(total / float32(width) + eps))


@helper
def normalize(row, w, factor, column, count, out):
    """Write ``count`` normed elements of a row, from ``column`` on, to ``out``."""
    values, weight, target = f32s(row + 4 * column), f32s(w + 4 * column), f32s(out)
    for i in range(count):
        target[i] = values[i] * factor * weight[i]


class NormsArgs(NamedTuple):
    """Argument block of norm_add_norm, norm_add and norm_quantise."""

    h: int  # 0: nothing is added to x
    h_stride: int
    weight: int  # of the norm of h
    eps: float
    x: int
    x_stride: int
    total: int  # x + norm(h)
    total_stride: int
    rows: int  # address of the live count
    width: int
    weight2: int  # of the norm of the total, or of x
    eps2: float
    y: int  # 0: there is no second norm
    y_stride: int
    y_block: int  # see `Target`
    y2: int  # 0: one target
    y2_stride: int
    y2_block: int


_read_norms = argument_reader(NormsArgs)


@kernel
def _norms(p, thread, threads):
    """Write x + norm(h) to ``total`` if there is an h, and the norm of that or of x to targets."""
    a = _read_norms(p)
    width, values = a.width, workspace(ROW_BYTES)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for t in range(first, last):
        row = a.x + t * a.x_stride
        if a.h != 0:
            h, total = a.h + t * a.h_stride, a.total + t * a.total_stride
            old, new, target = f32s(row), f32s(h), f32s(total)
            factor, scale = rms_norm_factor(h, width, a.eps), f32s(a.weight)
            for i in range(width):
                target[i] = old[i] + new[i] * factor * scale[i]
            row = total
        if a.y == 0:
            continue
        factor = rms_norm_factor(row, width, a.eps2)
        for column in range(0, width, COLUMNS):
            count = min(COLUMNS, width - column)
            normalize(row, a.weight2, factor, column, count, values)
            write_row(values, a.y + t * a.y_stride, a.y_block, column, count, width)
            if a.y2 != 0:
                write_row(values, a.y2 + t * a.y2_stride, a.y2_block, column, count, width)


def _norms_launch(
    ctx: KernelContext,
    weight2: int,
    eps2: float,
    refs: Sequence[OperandRef],
    total: OperandRef | None = None,
) -> list[Launch]:
    """Launch the kernel, which writes the norm to ``refs``; ``total`` gets x + norm(h)."""
    x = ctx.x
    own, quantising = targets(ctx, refs, x.meta, ctx.scratch, same_rows=True)
    y, y2 = [*own, UNUSED, UNUSED][:2]
    block = NormsArgs(
        h=ctx.h.address if total else 0,
        h_stride=ctx.h.row_stride if total else 0,
        weight=ctx.w.address if total else 0,
        eps=ctx.attrs["eps"],
        x=x.address,
        x_stride=x.row_stride,
        total=total.address if total else 0,
        total_stride=total.row_stride if total else 0,
        rows=ctx.live(x.meta.rows),
        width=x.meta.shape[1],
        weight2=weight2,
        eps2=eps2,
        y=y.address,
        y_stride=y.stride,
        y_block=y.block,
        y2=y2.address,
        y2_stride=y2.stride,
        y2_block=y2.block,
    )
    return [Launch(_norms, block), *quantising]


_FLOATS: dict[str, Any] = {
    "dtypes": dict.fromkeys(("h", "x", "w", "w2"), "f32"),
    "layout": dict.fromkeys(("h", "x"), ROWS),
}


@BACKEND.kernel("norm_add_norm", when=one_or_two, scratch=float_bytes, **_FLOATS)
def norm_add_norm(ctx: KernelContext) -> list[Launch]:
    total, *refs = ctx.results
    return _norms_launch(ctx, ctx.w2.address, ctx.attrs["eps2"], refs, total)


@BACKEND.kernel("norm_add", **_FLOATS)
def norm_add(ctx: KernelContext) -> list[Launch]:
    return _norms_launch(ctx, 0, 0.0, [], ctx.results[0])


@BACKEND.kernel("norm_quantise", when=one_or_two, scratch=float_bytes, **_FLOATS)
def norm_quantise(ctx: KernelContext) -> list[Launch]:
    return _norms_launch(ctx, ctx.w.address, ctx.attrs["eps"], ctx.results)


# -------------------------------------------------------------------------------------- layer norm


class LayerNormArgs(NamedTuple):
    """Argument block of layer_norm, layer_norm_quantise and layer_norm_hadamard.

    y is written as the norm is, y2 after a rotation if ``rotated``.
    """

    x: int
    x_stride: int
    rows: int  # address of the live length of axis 0
    inner: int  # rows in each index of axis 0
    width: int
    weight: int
    bias: int  # 0: none
    eps: float
    y: int  # 0: unused, as y2
    y_stride: int
    y_block: int  # see `Target`
    y2: int
    y2_stride: int
    y2_block: int
    rotated: int


_read_layer_norm = argument_reader(LayerNormArgs)


@helper
def _center_and_scale(row, width, eps):
    """Mean of a row, and the factor by which a layer norm scales what differs from it."""
    values, total = f32s(row), float32(0)
    for i in range(width):
        total += values[i]
    mean, squares = total / float32(width), float32(0)
    # A difference of sums would cancel.
    for i in range(width):
        squares += (values[i] - mean) * (values[i] - mean)
    return mean, float32(1) / float32(sqrt(squares / float32(width) + eps))


@kernel
def _layer_norm(p, thread, threads):
    a = _read_layer_norm(p)
    width, inner, normed = a.width, a.inner, workspace(ROW_BYTES)
    target = f32s(normed)
    first, last = thread_range(load_i64(a.rows) * inner, thread, threads)
    for line in range(first, last):
        row = a.x + line // inner * a.x_stride + line % inner * width * 4
        mean, factor = _center_and_scale(row, width, a.eps)
        for column in range(0, width, COLUMNS):
            count, at = min(COLUMNS, width - column), 4 * column
            source, weight, bias = f32s(row + at), f32s(a.weight + at), f32s(a.bias + at)
            for i in range(count):
                target[i] = (source[i] - mean) * factor * weight[i]
            if a.bias != 0:
                for i in range(count):
                    target[i] += bias[i]
            if a.y != 0:
                write_row(normed, a.y + line * a.y_stride, a.y_block, column, count, width)
            if a.rotated != 0:
                rotate_blocks(normed, normed, count)
            if a.y2 != 0:
                write_row(normed, a.y2 + line * a.y2_stride, a.y2_block, column, count, width)


@BACKEND.kernel("layer_norm", dtypes=dict.fromkeys(("x", "w", "b"), "f32"), layout={"x": "rows"})
def layer_norm(ctx: KernelContext) -> Launch:
    width = ctx.x.meta.shape[-1]
    return _layer_norm_launch(ctx, [Target(ctx.out.address, 4 * width, 0)])


@BACKEND.kernel(
    "layer_norm_quantise",
    when=one_or_two,
    scratch=float_bytes,
    dtypes=dict.fromkeys(("x", "w", "b"), "f32"),
    layout={"x": ROWS},
)
def layer_norm_quantise(ctx: KernelContext) -> list[Launch]:
    own, quantising = targets(ctx, ctx.results, ctx.x.meta, ctx.scratch, same_rows=True)
    return [_layer_norm_launch(ctx, own), *quantising]


def _one_in_blocks(node: Tensor, options: Options) -> str | None:
    kinds = [DTYPES[name] for name in node.attrs["dtypes"] if name != F32.name]
    if len(kinds) > 1:
        return "a row is quantised to several formats"
    return None if kinds[0] in (A8_32, A8_256) else f"results are {kinds[0]}"


@BACKEND.kernel(
    "layer_norm_hadamard",
    when=_one_in_blocks,
    dtypes=dict.fromkeys(("x", "w", "b"), "f32"),
    layout={"x": ROWS},
)
def layer_norm_hadamard(ctx: KernelContext) -> Launch:
    own, _ = targets(ctx, ctx.results, ctx.x.meta, ctx.scratch, same_rows=True)
    return _layer_norm_launch(ctx, [UNUSED, *own][-2:], rotated=True)


def _layer_norm_launch(ctx: KernelContext, own: Sequence[Target], rotated: bool = False) -> Launch:
    """Launch the kernel, which writes each row to the targets, to the second one ``rotated``."""
    x, (y, y2) = ctx.x, [*own, UNUSED][:2]
    width = x.meta.shape[-1]
    block = LayerNormArgs(
        x=x.address,
        x_stride=x.row_stride,
        rows=ctx.live(x.meta.rows),
        inner=prod(x.meta.inner) // max(width, 1),
        width=width,
        weight=ctx.w.address,
        bias=ctx.address("b"),
        eps=ctx.attrs["eps"],
        y=y.address,
        y_stride=y.stride,
        y_block=y.block,
        y2=y2.address,
        y2_stride=y2.stride,
        y2_block=y2.block,
        rotated=int(rotated),
    )
    return Launch(_layer_norm, block)
