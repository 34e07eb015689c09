"""Sums, products and activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ... import CONTIGUOUS, ROWS
from ...site import one_row, paired
from .. import BACKEND
from ..runtime.device import Arg, Launch, Site, Spot, ceil
from ..runtime.source import module

_MODULE = module("elementwise")
_THREADS = 256
_MUCH = 1 << 18  # elements from which on a thread does four of them

# What `activate` in common.cuh calls them, by name and gelu's kind.
ACTIVATIONS = {("silu", ""): 0, ("gelu", "tanh"): 1, ("gelu", "erf"): 2}


def rows_grid(site: Site, x: Spot, columns: int) -> tuple[int, int]:
    """A block for each row and each so many columns of ``x``."""
    return site.most(x.meta.rows), ceil(x.width, columns)


def _launch(site: Site, x: Spot, name: str, args: Sequence[Arg]) -> Launch:
    each = 4 if site.most(x.meta.rows) * x.width >= _MUCH else 1
    grid = rows_grid(site, x, _THREADS * each)
    return Launch(_MODULE[f"{name}_{each}"], grid, (_THREADS,), args)


def _unary(site: Site, name: str, parameter: float = 0.0) -> Launch:
    x, rows = site.x, site.live(site.x.meta.rows)
    args = (x.address, x.row_stride, site.out.address, rows, x.width, float(parameter))
    return _launch(site, x, name, args)


_ROWS: dict[str, Any] = {"layout": {"x": ROWS}, "dtypes": {"x": "f32"}}


@BACKEND.kernel("scale", **_ROWS)
def scale(site: Site) -> Launch:
    return _unary(site, "scale", site.attrs["factor"])


@BACKEND.kernel("softcap", **_ROWS)
def softcap(site: Site) -> Launch:
    return _unary(site, "softcap", site.attrs["cap"])


@BACKEND.kernel("silu", **_ROWS)
def silu(site: Site) -> Launch:
    return _unary(site, "silu")


@BACKEND.kernel("sigmoid", **_ROWS)
def sigmoid(site: Site) -> Launch:
    return _unary(site, "sigmoid")


@BACKEND.kernel("gelu", **_ROWS)
def gelu(site: Site) -> Launch:
    return _unary(site, f"gelu_{site.attrs['kind']}")


# ------------------------------------------------------------------------------------ two operands


_FLOATS = {"a": "f32", "b": "f32"}
_ROW: dict[str, Any] = {"layout": {"a": ROWS, "b": CONTIGUOUS}, "dtypes": _FLOATS, "when": one_row}
_PAIR: dict[str, Any] = {"layout": {"a": ROWS, "b": ROWS}, "dtypes": _FLOATS, "when": paired}


def _binary(site: Site, name: str, stride: int, inner: int) -> Launch:
    a, b = site.a, site.b
    args = (a.address, a.row_stride, b.address, stride, site.out.address, site.live(a.meta.rows),
            a.width, inner)  # fmt: skip
    return _launch(site, a, name, args)


@BACKEND.kernel("add", **_PAIR)
def add(site: Site) -> Launch:
    return _binary(site, "add", site.b.row_stride, 0)


@BACKEND.kernel("add", **_ROW)
def add_row(site: Site) -> Launch:
    return _binary(site, "add", 0, prod(site.b.meta.shape))


@BACKEND.kernel("mul", **_PAIR)
def mul(site: Site) -> Launch:
    return _binary(site, "mul", site.b.row_stride, 0)


@BACKEND.kernel("mul", **_ROW)
def mul_row(site: Site) -> Launch:
    return _binary(site, "mul", 0, prod(site.b.meta.shape))


@BACKEND.kernel(
    "clamped_glu", layout={"gate": ROWS, "up": ROWS}, dtypes={"gate": "f32", "up": "f32"}
)
def clamped_glu(site: Site) -> Launch:
    gate, up = site.gate, site.up
    args = (gate.address, gate.row_stride, up.address, up.row_stride, site.out.address,
            site.live(gate.meta.rows), gate.width, float(site.attrs["alpha"]),
            float(site.attrs["limit"]))  # fmt: skip
    return _launch(site, gate, "clamped_glu", args)
