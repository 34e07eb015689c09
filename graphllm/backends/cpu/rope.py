"""Rotary position embedding. A row's cosines and sines are computed once and used by every head."""

from __future__ import annotations

from typing import Any

from numba import float32, float64

from ...ops.rope import inverse_frequencies
from ...tensor import WEIGHT, Tensor
from .. import Options
from . import BACKEND
from .device import Launch, Site
from .elementwise import share
from .isa import threads_for
from .jit import args, f32s, i32s, kernel, load_i64
from .maths import cos_sin


@kernel
def _rope(p, thread, threads):
    x, stride, pos, inverse, y, rows_at, heads, width, half, step, scratch = args(p, 11)
    first, last = share(load_i64(rows_at), thread, threads)
    positions, frequency = i32s(pos), f32s(inverse)
    c, s = f32s(scratch + thread * half * 8), f32s(scratch + (thread * 2 + 1) * half * 4)
    second = half if step == 1 else 1  # from a pair's first element to its second
    for row in range(first, last):
        for i in range(half):
            c[i], s[i] = cos_sin(float64(float32(positions[row]) * frequency[i]))
        for head in range(heads):
            source = f32s(x + row * stride + head * width * 4)
            target = f32s(y + (row * heads + head) * width * 4)
            for i in range(half):
                a, b = source[i * step], source[i * step + second]
                target[i * step] = a * c[i] - b * s[i]
                target[i * step + second] = a * s[i] + b * c[i]
            for i in range(2 * half, width):
                target[i] = source[i]


def _dims(node: Any) -> int:
    return node.attrs["dims"] or node.src[0].shape[-1]


def _scratch(node: Tensor, options: Options) -> int:
    return threads_for(options) * _dims(node) * 4


def _constant_factors(node: Tensor, options: Options) -> str | None:
    factors = node.src[2]
    return "factors is not a weight" if factors is not None and factors.base.op != WEIGHT else None


@BACKEND.kernel("rope", layout={"x": "rows"}, scratch=_scratch, when=_constant_factors)
def rope(site: Site) -> Launch:
    x, attrs = site.x, site.attrs
    dims = _dims(site.node)
    inverse = inverse_frequencies(dims, attrs["base"], attrs["scale"])
    if site.factors is not None:  # a weight, so it can be read now
        inverse = inverse / site.factors.array()
    heads, width = x.meta.inner
    step = 1 if attrs["style"] == "half" else 2
    words = [x.address, x.row_stride, site.pos.address, site.keep(inverse), site.out.address]
    words += [site.live(x.meta.rows), heads, width, dims // 2, step, site.scratch]
    return Launch(_rope, words)
