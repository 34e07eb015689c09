"""Kernels of the fused ops around norms and gated units; those around linears are in linear.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.device import Arg, Launch, Site, Spot, ceil
from ..runtime.source import module
from .elementwise import ACTIVATIONS
from .norm import held
from .quantize import targets, unit

_MODULE = module("fused")
_WARPS = 4
_HALVES_THREADS = 256


def two_at_most(node: Tensor, options: Options) -> str | None:
    """Why the kernels cannot give the forms that are asked for."""
    count = len(node.attrs["dtypes"])
    return f"{count} quantised forms" if count > 2 else None


def _fits(node: Tensor, options: Options) -> str | None:
    width = node.sources[0].shape[1]
    assert isinstance(width, int)
    return None if held(width)[0] else f"rows of {width} do not fit in registers"


def _norms(node: Tensor, options: Options) -> str | None:
    return _fits(node, options) or two_at_most(node, options)


_FLOATS = dict.fromkeys(("h", "w", "x", "w2", "gate", "up"), "f32")


def _rules(*rows: str, **more: Any) -> dict[str, Any]:
    return {"layout": dict.fromkeys(rows, ROWS), "dtypes": _FLOATS, **more}


def _launch(name: str, site: Site, width: int, args: Sequence[Arg]) -> Launch:
    """A block for each row, which its threads hold in registers."""
    each, threads = held(width)
    return Launch(_MODULE[f"{name}_{each}"], (site.most(site.out.meta.rows),), (threads,), args)


@BACKEND.kernel("norm_add", **_rules("h", "x", when=_fits))
def norm_add(site: Site) -> Launch:
    h, x, rows, width = site.h, site.x, site.h.meta.rows, site.h.width
    args = (h.address, h.row_stride, site.w.address, x.address, x.row_stride, site.out.address,
            site.out.row_stride, site.live(rows), width, float(site.attrs["eps"]))  # fmt: skip
    return _launch("norm_add", site, width, args)


@BACKEND.kernel("norm_quantise", **_rules("x", when=_norms))
def norm_quantise(site: Site) -> Launch:
    x, rows, width, forms = site.x, site.x.meta.rows, site.x.width, site.results
    args = (x.address, x.row_stride, site.w.address, targets(forms), site.live(rows), width,
            float(site.attrs["eps"]))  # fmt: skip
    return _launch("norm_quantise", site, width, args)


@BACKEND.kernel("norm_add_norm", **_rules("h", "x", when=_norms))
def norm_add_norm(site: Site) -> Launch:
    h, x, rows, width = site.h, site.x, site.h.meta.rows, site.h.width
    total, *forms = site.results
    args = (
        h.address, h.row_stride, site.w.address, x.address, x.row_stride, site.w2.address,
        total.address, total.row_stride, targets(forms), site.live(rows), width,
        float(site.attrs["eps"]), float(site.attrs["eps2"]),
    )  # fmt: skip
    return _launch("norm_add_norm", site, width, args)


@BACKEND.kernel("glu", **_rules("gate", "up", when=two_at_most))
def glu(site: Site) -> Launch:
    return gated_unit(site, site.gate, site.up)


def gated_unit(site: Site, gate: Spot, up: Spot) -> Launch:
    """act(gate) * up to the site's results."""
    forms = site.results
    rows, (*lines, width) = gate.meta.rows, gate.meta.inner
    size, count = unit(forms), prod(lines)
    args = (gate.address, gate.row_stride, up.address, up.row_stride, targets(forms),
            site.live(rows), count, width,
            ACTIVATIONS[site.attrs["act"], site.attrs["kind"]])  # fmt: skip
    grid = (site.most(rows) * count, ceil(width, 32 * size * _WARPS))
    return Launch(_MODULE[f"glu_{size}"], grid, (32 * _WARPS,), args)


def gated_halves(site: Site, gate: Spot, up: Spot) -> Launch:
    """The same for halves of one kind, dense, to halves: a thread does eight columns."""
    rows, width, (out,) = gate.meta.rows, gate.width, site.results
    args = (gate.address, up.address, out.address, out.row_stride, site.live(rows), width,
            ACTIVATIONS[site.attrs["act"], site.attrs["kind"]])  # fmt: skip
    grid = (site.most(rows), ceil(width, 8 * _HALVES_THREADS))
    return Launch(_MODULE[f"glu_{gate.dtype.name}"], grid, (_HALVES_THREADS,), args)
