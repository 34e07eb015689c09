"""Root-mean-square norm: one thread to a row, whole rows, so the order of the sum is fixed."""

from __future__ import annotations

from math import prod, sqrt

from numba import float32

from . import BACKEND
from .device import Launch, Site
from .elementwise import share
from .jit import args, as_f32, f32_bits, f32s, kernel, load_i64


@kernel
def _rms_norm(p, thread, threads):
    x, stride, w, y, rows_at, inner, width, eps = args(p, 8)
    weight = f32s(w)
    first, last = share(load_i64(rows_at) * inner, thread, threads)
    for line in range(first, last):
        source = f32s(x + line // inner * stride + line % inner * width * 4)
        target = f32s(y + line * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i] * source[i]
        factor = float32(1) / float32(sqrt(total / float32(width) + as_f32(eps)))
        for i in range(width):
            target[i] = source[i] * factor * weight[i]


@BACKEND.kernel("rms_norm", dtypes={"x": "f32", "w": "f32"}, layout={"x": "rows"})
def rms_norm(site: Site) -> Launch:
    x = site.x
    width = x.meta.shape[-1]
    inner = prod(x.meta.inner) // max(width, 1)
    words = [x.address, x.row_stride, site.w.address, site.out.address, site.live(x.meta.rows)]
    return Launch(_rms_norm, [*words, inner, width, f32_bits(site.attrs["eps"])])
