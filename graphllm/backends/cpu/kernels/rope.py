"""Positions. A row's cosines and sines are computed once and used by every head."""

from __future__ import annotations

from typing import Any

from numba import float32, float64

from ....graph.tensor import Tensor
from ....ops.rope import inverse_frequencies, sinusoid_frequencies
from ... import Options
from ...kernel_context import requires_constant_factors
from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import thread_count
from ..runtime.jit import args, as_f32, f32_bits, f32s, helper, i32s, kernel, load_i64
from ..simd.math import cos_sin
from .elementwise import thread_range


@helper
def cos_sin_table(position, inverse, half, attention_factor, c, s):
    """Write ``half`` cosines and sines of a position, times the factor, to ``c`` and ``s``."""
    frequency, cosines, sines = f32s(inverse), f32s(c), f32s(s)
    for i in range(half):
        cosine, sine = cos_sin(float64(float32(position) * frequency[i]))
        cosines[i], sines[i] = cosine * attention_factor, sine * attention_factor


@helper
def rotate_head(x, y, width, half, step, c, s):
    """One head at ``x`` turned to ``y``; ``step``: 1 where a pair is half a head apart, else 2."""
    source, target, cosines, sines = f32s(x), f32s(y), f32s(c), f32s(s)
    second = half if step == 1 else 1  # from a pair's first element to its second
    for i in range(half):
        a, b = source[i * step], source[i * step + second]
        target[i * step] = a * cosines[i] - b * sines[i]
        target[i * step + second] = a * sines[i] + b * cosines[i]
    for i in range(2 * half, width):
        target[i] = source[i]


@kernel
def _rope(p, thread, threads):
    x, stride, pos, inverse, y, rows_at, heads, width, half, step, attention_factor, scratch = args(
        p, 12
    )
    first, last = thread_range(load_i64(rows_at), thread, threads)
    c, s = scratch + thread * half * 8, scratch + (thread * 2 + 1) * half * 4
    for row in range(first, last):
        cos_sin_table(i32s(pos)[row], inverse, half, as_f32(attention_factor), c, s)
        for head in range(heads):
            at = 4 * head * width
            rotate_head(
                x + row * stride + at, y + 4 * row * heads * width + at, width, half, step, c, s
            )


def rotary_dims(node: Any) -> int:
    """How many elements of a head turn."""
    return node.attrs["dims"] or node.src[0].shape[-1]


def _scratch(node: Tensor, options: Options) -> int:
    return thread_count(options) * rotary_dims(node) * 4


def inverse_frequencies_address(ctx: KernelContext) -> int:
    """The address of the radians a position of each pair."""
    attrs = ctx.attrs
    inverse = inverse_frequencies(rotary_dims(ctx.node), attrs["base"], attrs["scale"])
    if ctx.factors is not None:  # a weight, so it can be read now
        inverse = inverse / ctx.factors.array()
    return ctx.keep(inverse)


@BACKEND.kernel("rope", layout={"x": "rows"}, scratch=_scratch, when=requires_constant_factors)
def rope(ctx: KernelContext) -> Launch:
    x, dims = ctx.x, rotary_dims(ctx.node)
    heads, width = x.meta.inner
    step = 1 if ctx.attrs["style"] == "half" else 2
    words = [
        x.address,
        x.row_stride,
        ctx.pos.address,
        inverse_frequencies_address(ctx),
        ctx.out.address,
    ]
    words += [ctx.live(x.meta.rows), heads, width, dims // 2, step]
    return Launch(_rope, [*words, f32_bits(ctx.attrs["attention_factor"]), ctx.scratch])


@kernel
def _positions_2d(p, thread, threads):
    pos, q_start, prefix_len, y, rows_at, sequences_at, part = args(p, 7)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    source, target = i32s(pos), i32s(y)
    for s in range(load_i64(sequences_at)):
        most = i32s(prefix_len)[s] - 1  # in the prompt
        for t in range(max(first, i32s(q_start)[s]), min(last, i32s(q_start)[s + 1])):
            after = max(source[t] - most, 0) if most >= 0 else 0
            target[t] = source[t] - after if part == 0 else after


@BACKEND.kernel("positions_2d")
def positions_2d(ctx: KernelContext) -> Launch:
    words = [ctx.need(name).address for name in ("pos", "q_start", "prefix_len")]
    words += [ctx.out.address, ctx.live(ctx.pos.meta.rows)]
    return Launch(_positions_2d, [*words, ctx.live(ctx.prefix_len.meta.rows), ctx.attrs["part"]])


@kernel
def _sinusoids(p, thread, threads):
    pos, frequency, y, rows_at, width, offset = args(p, 6)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    for row in range(first, last):
        at, half = y + 4 * row * width, width // 2
        cos_sin_table(i32s(pos)[row] + offset, frequency, half, float32(1), at + 4 * half, at)
        if width % 2 != 0:
            f32s(at)[width - 1] = float32(0)


@BACKEND.kernel("sinusoids")
def sinusoids(ctx: KernelContext) -> Launch:
    width = ctx.attrs["width"]
    words = [ctx.pos.address, ctx.keep(sinusoid_frequencies(width)), ctx.out.address]
    words += [ctx.live(ctx.pos.meta.rows), width, ctx.attrs["offset"]]
    return Launch(_sinusoids, words)
