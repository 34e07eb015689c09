"""Positions: rotary, sinusoidal, and in two dimensions."""

from __future__ import annotations

import struct

from ....ops.rope import inverse_frequencies, sinusoid_frequencies
from ... import ROWS
from .. import BACKEND
from ..runtime.device import Launch, Site, ceil
from ..runtime.source import module
from .elementwise import rows_grid

_MODULE = module("rope")
_THREADS = 128


def turn(site: Site, head: int) -> bytes:
    """The struct Turn of rope.cuh for heads of ``head`` elements."""
    attrs = site.attrs
    dims = attrs["dims"] or head
    inverse = site.keep(inverse_frequencies(dims, attrs["base"], attrs["scale"]))
    interleaved = attrs["style"] == "interleaved"
    addresses = site.need("pos").address, inverse, site.address("factors")
    return struct.pack("<QQQiifi", *addresses, dims // 2, interleaved, attrs["attention_factor"], 0)


@BACKEND.kernel("rope", layout={"x": ROWS}, dtypes={"x": "f32"})
def rope(site: Site) -> Launch:
    x, head = site.x, site.x.meta.inner[-1]
    args = (x.address, x.row_stride, site.out.address, site.live(x.meta.rows), x.width, head,
            turn(site, head))  # fmt: skip
    return Launch(_MODULE["rope"], rows_grid(site, x, _THREADS), (_THREADS,), args)


@BACKEND.kernel("positions_2d")
def positions_2d(site: Site) -> Launch:
    rows, sequences = site.pos.meta.rows, site.prefix_len.meta.rows
    addresses = [site.address(name) for name in ("pos", "q_start", "prefix_len")]
    args = (*addresses, site.out.address, site.live(rows), site.live(sequences), site.attrs["part"])
    grid = (ceil(site.most(rows), _THREADS),)
    return Launch(_MODULE["positions_2d"], grid, (_THREADS,), args)


@BACKEND.kernel("sinusoids")
def sinusoids(site: Site) -> Launch:
    width, rows = site.out.width, site.pos.meta.rows
    frequencies = site.keep(sinusoid_frequencies(width))
    args = (site.pos.address, frequencies, site.out.address, site.live(rows), width,
            site.attrs["offset"])  # fmt: skip
    return Launch(_MODULE["sinusoids"], rows_grid(site, site.out, _THREADS), (_THREADS,), args)
