"""Writes into the pools of keys and values."""

from __future__ import annotations

from numba import int64

from . import BACKEND
from .device import Launch, Site
from .elementwise import share
from .jit import Kernel, args, f32_to_f16, f32s, i32s, kernel, load_i64, u16s


def _store(half: bool) -> Kernel:
    @kernel
    def store(p, thread, threads):
        pool, x, stride, slots, rows_at, width = args(p, 6)
        first, last = share(load_i64(rows_at), thread, threads)
        for row in range(first, last):
            slot = int64(i32s(slots)[row])
            source = f32s(x + row * stride)
            if slot >= 0:
                if half:
                    halves = u16s(pool + slot * width * 2)
                    for i in range(width):
                        halves[i] = f32_to_f16(source[i])
                else:
                    floats = f32s(pool + slot * width * 4)
                    for i in range(width):
                        floats[i] = source[i]

    return store


_STORE = {half: _store(half) for half in (False, True)}


@BACKEND.kernel("kv_write", layout={"x": "rows"})
def kv_write(site: Site) -> Launch:
    pool, x = site.pool, site.x
    heads, depth = x.meta.inner
    words = [pool.address, x.address, x.row_stride, site.slot.address]
    return Launch(_STORE[pool.dtype.name == "f16"], [*words, site.live(x.meta.rows), heads * depth])
