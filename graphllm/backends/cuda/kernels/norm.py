"""Norms and softmax over the last axis."""

from __future__ import annotations

from math import prod
from typing import Any

from .... import ops
from ....graph.dtype import F16
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("norm")


def threads(width: int) -> int:
    """Threads for a row of ``width``: about four elements each, in whole warps."""
    return min(1024, max(32, -(-width // 128) * 32))


_UNIT, _WARPS = 256, 32  # norm.cuh: elements of a unit; warps of a block


def register_units(width: int) -> tuple[int, int]:
    """(units of a row in the registers of a warp, threads); 0 units if the row is too wide."""
    units = ceil(width, _UNIT)
    each = ceil(units, _WARPS)
    return (each, 32 * ceil(units, each)) if each <= 2 else (0, 32 * _WARPS)


def _launch(
    ctx: KernelContext, name: str, weights: tuple[str, ...], *extra: float, block: int = 0
) -> Launch:
    x = ctx.x
    *parts, width = x.meta.inner
    lines = prod(parts)
    args = (x.address, x.row_stride, *map(ctx.address, weights), ctx.out.address,
            ctx.live_address(x.meta.rows), lines, width, *extra)  # fmt: skip
    block = block or threads(width)
    prefetches = [ref for ref in map(ctx.op, weights) if ref is not None]
    grid = (ctx.upper_bound(x.meta.rows) * lines,)
    return Launch(_MODULE[name], grid, (block,), args, prefetches=prefetches)


def _with_rows(node: Tensor, options: Options) -> str | None:
    return None if len(node.shape) > 1 else "x has one axis"


_RULES: dict[str, Any] = {
    "layout": {"x": ROWS},
    "dtypes": {"x": "f32", "w": "f32", "b": "f32"},
    "when": _with_rows,
}


@BACKEND.kernel("rms_norm", **_RULES)
def rms_norm(ctx: KernelContext) -> Launch:
    each, block = register_units(ctx.x.meta.inner[-1])
    return _launch(ctx, f"rms_norm_{each}", ("w",), float(ctx.attrs["eps"]), block=block)


def _lower_layer_norm(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """The sum with a residual in f16 as f16, see `elementwise.half_residual`."""
    x, *rest = node.src
    assert x is not None
    narrow = x.op == "add" and x.sources[0].dtype == F16
    return (ops.quantise_act(x, dtype=F16.name) if narrow else x, *rest)


_FLOATS = {"x": ("f32", "f16"), "w": "f32", "b": "f32"}


@BACKEND.kernel("layer_norm", **(_RULES | {"dtypes": _FLOATS}), lower=_lower_layer_norm)
def layer_norm(ctx: KernelContext) -> Launch:
    return _launch(ctx, f"layer_norm_{ctx.x.dtype.name}", ("w", "b"), float(ctx.attrs["eps"]))


@BACKEND.kernel("softmax", **_RULES)
def softmax(ctx: KernelContext) -> Launch:
    return _launch(ctx, "softmax", ())
