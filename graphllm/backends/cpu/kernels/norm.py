"""Norms and softmax. One thread computes a whole row, so the order of each sum is fixed."""

from __future__ import annotations

from math import prod, sqrt
from typing import NamedTuple

from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32s, kernel, load_i64
from ..runtime.lazy_numba import float32
from ..simd.math import exp32
from .elementwise import thread_range


class NormArgs(NamedTuple):
    """Argument block of rms_norm, layer_norm and softmax over rows of ``width`` elements."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live length of axis 0
    inner: int  # rows in each index of axis 0
    width: int
    weight: int = 0
    bias: int = 0  # 0: none
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
def _layer_norm(p, thread, threads):
    a = _read_norm(p)
    inner, width, weight, bias = a.inner, a.width, f32s(a.weight), f32s(a.bias)
    first, last = thread_range(load_i64(a.rows) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(a.x + line // inner * a.x_stride + line % inner * width * 4)
        target = f32s(a.y + line * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i]
        mean = total / float32(width)
        squares = float32(0)  # in a second pass: a difference of sums would cancel
        for i in range(width):
            squares += (source[i] - mean) * (source[i] - mean)
        factor = float32(1) / float32(sqrt(squares / float32(width) + a.eps))
        for i in range(width):
            target[i] = (source[i] - mean) * factor * weight[i]
        if a.bias != 0:
            for i in range(width):
                target[i] += bias[i]


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


@BACKEND.kernel("layer_norm", dtypes={"x": "f32", "w": "f32", "b": "f32"}, layout={"x": "rows"})
def layer_norm(ctx: KernelContext) -> Launch:
    block = _arguments(ctx)._replace(weight=ctx.w.address, bias=ctx.address("b"))
    return Launch(_layer_norm, block._replace(eps=ctx.attrs["eps"]))


@BACKEND.kernel("softmax", dtypes={"x": "f32"}, layout={"x": "rows"})
def softmax(ctx: KernelContext) -> Launch:
    return Launch(_softmax, _arguments(ctx))
