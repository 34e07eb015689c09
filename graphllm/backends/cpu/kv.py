"""Writes into the pools of keys and values."""

from __future__ import annotations

from math import prod

from numba import int64

from . import BACKEND
from .device import Launch, Site, Spot
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


def store(pool: Spot, x: int, stride: int, slot: Spot, rows: int, joined: bool = False) -> Launch:
    """Rows at address ``x`` to their slots; ``rows``: the address of their live count.

    Every thread stores what `share` gives it of the rows.
    """
    width = prod(pool.meta.inner)
    words = [pool.address, x, stride, slot.address, rows, width]
    return Launch(_STORE[pool.dtype.name == "f16"], words, joined)


@BACKEND.kernel("kv_write", layout={"x": "rows"})
def kv_write(site: Site) -> Launch:
    x = site.x
    return store(site.pool, x.address, x.row_stride, site.slot, site.live(x.meta.rows))
