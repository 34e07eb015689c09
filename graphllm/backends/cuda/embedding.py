"""Rows of a table, by token id."""

from __future__ import annotations

from ...quant import WEIGHT_FORMATS
from . import BACKEND
from .device import Launch, Site, ceil
from .source import module

_MODULE = module("embedding")
_THREADS = 128


@BACKEND.kernel("embedding", dtypes={"w": WEIGHT_FORMATS})
def embedding(site: Site) -> Launch:
    """The table lies as it does in the file: rows of blocks."""
    w, ids = site.w, site.ids
    count, width = w.meta.shape
    args = (ids.address, w.address, w.row_stride, count, site.out.address,
            site.live(ids.meta.rows), width)  # fmt: skip
    grid = (site.most(ids.meta.rows), ceil(width, _THREADS))
    return Launch(_MODULE[f"embedding_{w.dtype.name}"], grid, (_THREADS,), args)
