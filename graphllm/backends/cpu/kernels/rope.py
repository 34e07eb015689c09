"""Rotary embeddings and other positions. The cosines and sines of a row serve all its heads."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....graph.tensor import Tensor
from ....ops.rope import inverse_frequencies, sinusoid_frequencies
from ... import Options
from ...kernel_context import requires_constant_factors
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32s, helper, i32s, kernel, load_i64
from ..runtime.lazy_numba import float32, float64
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
    """Rotate one head at ``x`` to ``y``; ``step``: 1 if pairs are half a head apart, else 2."""
    source, target, cosines, sines = f32s(x), f32s(y), f32s(c), f32s(s)
    second = half if step == 1 else 1  # distance from the first element of a pair to the second
    for i in range(half):
        a, b = source[i * step], source[i * step + second]
        target[i * step] = a * cosines[i] - b * sines[i]
        target[i * step + second] = a * sines[i] + b * cosines[i]
    for i in range(2 * half, width):
        target[i] = source[i]


class RopeArgs(NamedTuple):
    """Argument block of `rope`."""

    x: int
    x_stride: int
    pos: int
    inverse_frequencies: int  # radians per position of each pair
    y: int
    rows: int  # address of the live count
    heads: int
    width: int
    half: int  # pairs that are rotated
    step: int  # see `rotate_head`
    attention_factor: float
    scratch: int  # cosines and sines of each thread


_read_rope = argument_reader(RopeArgs)


@kernel
def _rope(p, thread, threads):
    a = _read_rope(p)
    heads, width, half = a.heads, a.width, a.half
    first, last = thread_range(load_i64(a.rows), thread, threads)
    c, s = a.scratch + thread * half * 8, a.scratch + (thread * 2 + 1) * half * 4
    for row in range(first, last):
        cos_sin_table(i32s(a.pos)[row], a.inverse_frequencies, half, a.attention_factor, c, s)
        x, y = a.x + row * a.x_stride, a.y + 4 * row * heads * width
        for head in range(heads):
            at = 4 * head * width
            rotate_head(x + at, y + at, width, half, a.step, c, s)


def rotary_dims(node: Any) -> int:
    """Number of elements of a head that are rotated."""
    return node.attrs["dims"] or node.src[0].shape[-1]


def _scratch(node: Tensor, options: Options) -> int:
    return thread_count(options) * rotary_dims(node) * 4


def inverse_frequencies_address(ctx: KernelContext) -> int:
    """Address of the radians per position of each pair."""
    attrs = ctx.attrs
    inverse = inverse_frequencies(rotary_dims(ctx.node), attrs["base"], attrs["scale"])
    if ctx.factors is not None:  # a weight, so its values are known already
        inverse = inverse / ctx.factors.array()
    return ctx.keep(inverse)


def pair_step(ctx: KernelContext) -> int:
    """The ``step`` of `rotate_head` for the op's pairing of elements."""
    return 1 if ctx.attrs["style"] == "half" else 2


@BACKEND.kernel("rope", layout={"x": "rows"}, scratch=_scratch, when=requires_constant_factors)
def rope(ctx: KernelContext) -> Launch:
    x, (heads, width) = ctx.x, ctx.x.meta.inner
    block = RopeArgs(
        x=x.address,
        x_stride=x.row_stride,
        pos=ctx.pos.address,
        inverse_frequencies=inverse_frequencies_address(ctx),
        y=ctx.out.address,
        rows=ctx.live(x.meta.rows),
        heads=heads,
        width=width,
        half=rotary_dims(ctx.node) // 2,
        step=pair_step(ctx),
        attention_factor=ctx.attrs["attention_factor"],
        scratch=ctx.scratch,
    )
    return Launch(_rope, block)


class Positions2dArgs(NamedTuple):
    """Argument block of `positions_2d`."""

    pos: int
    q_start: int
    prefix_len: int
    y: int
    rows: int  # address of the live count of tokens
    sequences: int  # address of the live count
    part: int  # 0: positions in the prompt, 1: after it


_read_positions_2d = argument_reader(Positions2dArgs)


@kernel
def _positions_2d(p, thread, threads):
    a = _read_positions_2d(p)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    source, target, q_start = i32s(a.pos), i32s(a.y), i32s(a.q_start)
    for s in range(load_i64(a.sequences)):
        prompt_end = i32s(a.prefix_len)[s] - 1  # last position in the prompt
        for t in range(max(first, q_start[s]), min(last, q_start[s + 1])):
            after = max(source[t] - prompt_end, 0) if prompt_end >= 0 else 0
            target[t] = source[t] - after if a.part == 0 else after


@BACKEND.kernel("positions_2d")
def positions_2d(ctx: KernelContext) -> Launch:
    block = Positions2dArgs(
        pos=ctx.pos.address,
        q_start=ctx.q_start.address,
        prefix_len=ctx.prefix_len.address,
        y=ctx.out.address,
        rows=ctx.live(ctx.pos.meta.rows),
        sequences=ctx.live(ctx.prefix_len.meta.rows),
        part=ctx.attrs["part"],
    )
    return Launch(_positions_2d, block)


class SinusoidArgs(NamedTuple):
    """Argument block of `sinusoids`."""

    pos: int
    frequencies: int
    y: int
    rows: int  # address of the live count
    width: int
    offset: int


_read_sinusoids = argument_reader(SinusoidArgs)


@kernel
def _sinusoids(p, thread, threads):
    a = _read_sinusoids(p)
    width, half = a.width, a.width // 2
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        at = a.y + 4 * row * width
        position = i32s(a.pos)[row] + a.offset
        cos_sin_table(position, a.frequencies, half, float32(1), at + 4 * half, at)
        if width % 2 != 0:
            f32s(at)[width - 1] = float32(0)


@BACKEND.kernel("sinusoids")
def sinusoids(ctx: KernelContext) -> Launch:
    width, rows = ctx.attrs["width"], ctx.live(ctx.pos.meta.rows)
    frequencies = ctx.keep(sinusoid_frequencies(width))
    block = SinusoidArgs(
        ctx.pos.address, frequencies, ctx.out.address, rows, width, ctx.attrs["offset"]
    )
    return Launch(_sinusoids, block)
