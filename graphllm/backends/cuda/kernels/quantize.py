"""Activations in fewer bits: int8 in blocks, or halves."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

from ... import ROWS
from .. import BACKEND
from ..runtime.device import Launch, Site, Spot, ceil
from ..runtime.source import module

_MODULE = module("quantise")
_WARPS = 4  # of a block of threads; each does one block of activations
HALVES = {"f16": 1, "bf16": 2}  # what quantise.cuh calls them


def quantise(site: Site, x: int, stride: int, out: Spot) -> Launch:
    """Float rows at address ``x``, ``stride`` bytes apart, to ``out``, whose dtype says how."""
    kind, rows = HALVES.get(out.dtype.name, 0), site.most(out.meta.rows)
    args: list[int] = [x, stride, out.address, out.row_stride, site.live(out.meta.rows)]
    if kind:
        grid = (rows, ceil(out.width, 256 * _WARPS))
        return Launch(_MODULE["narrow"], grid, (32 * _WARPS,), [*args, out.width, kind])
    *lines, width = out.meta.inner  # each line is in blocks for itself
    size, count = out.dtype.block, prod(lines)
    grid = (rows * count, ceil(width, size * _WARPS))
    args += [count, width, out.dtype.row_nbytes(width)]
    return Launch(_MODULE[f"quantise_{size}"], grid, (32 * _WARPS,), args)


@BACKEND.kernel("quantise_act", layout={"x": ROWS}, dtypes={"x": "f32"})
def quantise_act(site: Site) -> Launch:
    return quantise(site, site.x.address, site.x.row_stride, site.out)


def target(spot: Spot) -> bytes:
    """The struct Target of quantise.cuh."""
    block = spot.dtype.block if spot.dtype.quantised else HALVES.get(spot.dtype.name, 0)
    line = spot.dtype.row_nbytes(spot.meta.inner[-1])
    return struct.pack("<Qqii", spot.address, spot.row_stride, block, line)


def targets(spots: Sequence[Spot]) -> bytes:
    """The struct Targets of quantise.cuh for at most two results."""
    assert len(spots) <= 2, spots
    return b"".join(map(target, spots)).ljust(48, b"\0") + struct.pack("<ii", len(spots), 0)


def unit(spots: Sequence[Spot]) -> int:
    """The N of quantise.cuh: a warp emits 32 N elements at a time."""
    return 8 if any(s.dtype.name in ("a8_256", *HALVES) for s in spots) else 1
