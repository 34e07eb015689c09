"""Rotary position embedding. A row's cosines and sines are computed once and used by every head."""

from __future__ import annotations

from typing import Any

from numba import float32, float64

from ...ops.rope import inverse_frequencies
from ...tensor import Tensor
from .. import Options
from ..site import constant_factors
from . import BACKEND
from .device import Launch, Site
from .elementwise import share
from .isa import threads_for
from .jit import args, f32s, helper, i32s, kernel, load_i64
from .maths import cos_sin


@helper
def angles(position, inverse, half, c, s):
    """Cosines and sines of a position, ``half`` of each, to addresses ``c`` and ``s``."""
    frequency, cosines, sines = f32s(inverse), f32s(c), f32s(s)
    for i in range(half):
        cosines[i], sines[i] = cos_sin(float64(float32(position) * frequency[i]))


@helper
def turn(x, y, width, half, step, c, s):
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
    x, stride, pos, inverse, y, rows_at, heads, width, half, step, scratch = args(p, 11)
    first, last = share(load_i64(rows_at), thread, threads)
    c, s = scratch + thread * half * 8, scratch + (thread * 2 + 1) * half * 4
    for row in range(first, last):
        angles(i32s(pos)[row], inverse, half, c, s)
        for head in range(heads):
            at = 4 * head * width
            turn(x + row * stride + at, y + 4 * row * heads * width + at, width, half, step, c, s)


def rotated(node: Any) -> int:
    """How many elements of a head turn."""
    return node.attrs["dims"] or node.src[0].shape[-1]


def _scratch(node: Tensor, options: Options) -> int:
    return threads_for(options) * rotated(node) * 4


def frequencies(site: Site) -> int:
    """The address of the radians a position of each pair."""
    attrs = site.attrs
    inverse = inverse_frequencies(rotated(site.node), attrs["base"], attrs["scale"])
    if site.factors is not None:  # a weight, so it can be read now
        inverse = inverse / site.factors.array()
    return site.keep(inverse)


@BACKEND.kernel("rope", layout={"x": "rows"}, scratch=_scratch, when=constant_factors)
def rope(site: Site) -> Launch:
    x, dims = site.x, rotated(site.node)
    heads, width = x.meta.inner
    step = 1 if site.attrs["style"] == "half" else 2
    words = [x.address, x.row_stride, site.pos.address, frequencies(site), site.out.address]
    words += [site.live(x.meta.rows), heads, width, dims // 2, step, site.scratch]
    return Launch(_rope, words)
