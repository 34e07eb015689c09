"""Rotary position embedding."""

from __future__ import annotations

import struct

from ...ops.rope import inverse_frequencies
from .. import ROWS
from . import BACKEND
from .device import Launch, Site
from .elementwise import rows_grid
from .source import module

_MODULE = module("rope")
_THREADS = 128


def turn(site: Site, head: int) -> bytes:
    """The struct Turn of rope.cuh for heads of ``head`` elements."""
    attrs = site.attrs
    dims = attrs["dims"] or head
    inverse = site.keep(inverse_frequencies(dims, attrs["base"], attrs["scale"]))
    interleaved = attrs["style"] == "interleaved"
    addresses = site.need("pos").address, inverse, site.address("factors")
    return struct.pack("<QQQii", *addresses, dims // 2, interleaved)


@BACKEND.kernel("rope", layout={"x": ROWS}, dtypes={"x": "f32"})
def rope(site: Site) -> Launch:
    x, head = site.x, site.x.meta.inner[-1]
    args = (x.address, x.row_stride, site.out.address, site.live(x.meta.rows), x.width, head,
            turn(site, head))  # fmt: skip
    return Launch(_MODULE["rope"], rows_grid(site, x, _THREADS), (_THREADS,), args)
