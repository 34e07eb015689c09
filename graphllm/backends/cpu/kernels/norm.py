"""Norms and softmax: one thread to a row, whole rows, so the order of each sum is fixed."""

from __future__ import annotations

from math import prod, sqrt

from numba import float32

from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import args, as_f32, f32_bits, f32s, kernel, load_i64
from ..simd.math import exp32
from .elementwise import thread_range


@kernel
def _rms_norm(p, thread, threads):
    x, stride, w, y, rows_at, inner, width, eps = args(p, 8)
    weight = f32s(w)
    first, last = thread_range(load_i64(rows_at) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(x + line // inner * stride + line % inner * width * 4)
        target = f32s(y + line * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i] * source[i]
        factor = float32(1) / float32(sqrt(total / float32(width) + as_f32(eps)))
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@kernel
def _layer_norm(p, thread, threads):
    x, stride, w, b, y, rows_at, inner, width, eps = args(p, 9)
    weight, bias = f32s(w), f32s(b)
    first, last = thread_range(load_i64(rows_at) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(x + line // inner * stride + line % inner * width * 4)
        target = f32s(y + line * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i]
        mean = total / float32(width)
        squares = float32(0)  # in a pass of its own: a difference of sums would lose digits
        for i in range(width):
            squares += (source[i] - mean) * (source[i] - mean)
        factor = float32(1) / float32(sqrt(squares / float32(width) + as_f32(eps)))
        for i in range(width):
            target[i] = (source[i] - mean) * factor * weight[i]
        if b != 0:
            for i in range(width):
                target[i] += bias[i]


@kernel
def _softmax(p, thread, threads):
    x, stride, y, rows_at, inner, width = args(p, 6)
    first, last = thread_range(load_i64(rows_at) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(x + line // inner * stride + line % inner * width * 4)
        target = f32s(y + line * width * 4)
        largest = source[0]
        for i in range(width):
            largest = max(largest, source[i])
        total = float32(0)
        for i in range(width):
            target[i] = exp32(source[i] - largest)
            total += target[i]
        for i in range(width):
            target[i] /= total


def _lines(ctx: KernelContext) -> list[int]:
    """Where rows are, how many in each index of axis 0, and how wide."""
    x = ctx.x.meta
    width = x.shape[-1]
    return [ctx.live(x.rows), prod(x.inner) // max(width, 1), width]


@BACKEND.kernel("rms_norm", dtypes={"x": "f32", "w": "f32"}, layout={"x": "rows"})
def rms_norm(ctx: KernelContext) -> Launch:
    words = [ctx.x.address, ctx.x.row_stride, ctx.w.address, ctx.out.address]
    return Launch(_rms_norm, [*words, *_lines(ctx), f32_bits(ctx.attrs["eps"])])


@BACKEND.kernel("layer_norm", dtypes={"x": "f32", "w": "f32", "b": "f32"}, layout={"x": "rows"})
def layer_norm(ctx: KernelContext) -> Launch:
    words = [ctx.x.address, ctx.x.row_stride, ctx.w.address, ctx.address("b")]
    eps = f32_bits(ctx.attrs["eps"])
    return Launch(_layer_norm, [*words, ctx.out.address, *_lines(ctx), eps])


@BACKEND.kernel("softmax", dtypes={"x": "f32"}, layout={"x": "rows"})
def softmax(ctx: KernelContext) -> Launch:
    words = [ctx.x.address, ctx.x.row_stride, ctx.out.address]
    return Launch(_softmax, [*words, *_lines(ctx)])
