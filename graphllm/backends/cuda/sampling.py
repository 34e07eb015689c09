"""From logits to token ids, on the device: `sampling.cu` says how."""

from __future__ import annotations

import struct

from ...tensor import Tensor
from .. import ROWS, Options
from . import BACKEND
from .device import Launch, Site, Spot, ceil
from .source import module

_MODULE = module("sampling")
_THREADS = 1024  # of a block of `pick`; slices of a row, at most
_WARPS = 8  # of a block of `peaks`, with a slice each
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "count")
_COLUMNS = 256  # threads of a block of `penalise`; each copies four logits


def _scratch(node: Tensor, options: Options) -> int:
    """Bytes of the largest keys of all slices."""
    return 4 * _THREADS * Site.most(node.meta.rows)


def _chosen(site: Site, x: Spot, settings: bytes) -> list[Launch]:
    rows, slice_ = site.most(x.meta.rows), 32 * ceil(x.width, 32 * _THREADS)
    blocks = ceil(ceil(x.width, slice_), _WARPS)
    args = (x.address, x.row_stride, x.width, settings, site.live(x.meta.rows), site.scratch)
    return [
        Launch(_MODULE["peaks"], (rows, blocks), (32 * _WARPS,), args),
        Launch(_MODULE["pick"], (rows,), (_THREADS,), (*args, site.out.address)),
    ]


@BACKEND.kernel("argmax", layout={"x": ROWS}, scratch=_scratch)
def argmax(site: Site) -> list[Launch]:
    return _chosen(site, site.x, bytes(8 * len(_SETTINGS)))


@BACKEND.kernel("sample", layout={"logits": ROWS}, scratch=_scratch)
def sample(site: Site) -> list[Launch]:
    settings = struct.pack("<6Q", *map(site.address, _SETTINGS))
    return _chosen(site, site.logits, settings)


@BACKEND.kernel("penalise", layout={"logits": ROWS})
def penalise(site: Site) -> Launch:
    x = site.logits
    names = ("history", "count", "stop", "repeat", "presence", "frequency", "min_tokens")
    penalties = struct.pack(
        "<7Q2i", *map(site.address, names), site.history.meta.inner[0], site.stop.meta.shape[0]
    )
    args = (x.address, x.row_stride, site.out.address, site.live(x.meta.rows), x.width, penalties)
    grid = (site.most(x.meta.rows), ceil(x.width, 4 * _COLUMNS))
    return Launch(_MODULE["penalise"], grid, (_COLUMNS,), args)
