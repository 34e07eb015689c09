"""Routing of tokens to experts: scores, the choice of experts, and their weights.

moe.py has kernels of one token that choose its experts themselves.
"""

from __future__ import annotations

from ... import ROWS
from ...kernel_context import address
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("experts")
_THREADS = 256
_ROUTE_WARPS = (1, 2, 4, 8)  # of the kernels that rank all experts at once
SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}  # enum Score of expert_choice.cuh


@BACKEND.kernel("top_k", layout={"x": ROWS}, dtypes={"x": "f32", "bias": "f32"})
def top_k(ctx: KernelContext) -> Launch:
    x, a = ctx.x, ctx.attrs
    args = (x.address, x.row_stride, ctx.address("bias"), ctx.out.address,
            ctx.live_address(x.meta.rows), x.width, a["k"], a["groups"], a["top_groups"],
            a["top_per_group"])  # fmt: skip
    warps = min(8, a["groups"])
    shared = 4 * (x.width + a["groups"])
    return Launch(_MODULE["top_k"], (ctx.upper_bound(x.meta.rows),), (32 * warps,), args, shared)


@BACKEND.kernel("pick", layout={"x": ROWS}, dtypes={"x": "f32"})
def pick(ctx: KernelContext) -> Launch:
    x, ids = ctx.x, ctx.ids
    args = (x.address, x.row_stride, ids.address, ctx.out.address, ctx.live_address(x.meta.rows),
            x.width, ids.width)  # fmt: skip
    grid = (ceil(ctx.upper_bound(x.meta.rows) * ids.width, _THREADS),)
    return Launch(_MODULE["pick"], grid, (_THREADS,), args)


@BACKEND.kernel("sum_norm", layout={"x": ROWS}, dtypes={"x": "f32"})
def sum_norm(ctx: KernelContext) -> Launch:
    x = ctx.x
    args = (x.address, x.row_stride, ctx.out.address, ctx.live_address(x.meta.rows), x.width,
            float(ctx.attrs["eps"]))  # fmt: skip
    return Launch(_MODULE["sum_norm"], (ceil(ctx.upper_bound(x.meta.rows), 4),), (128,), args)


@BACKEND.kernel("route", layout={"x": ROWS}, dtypes={"x": "f32", "bias": "f32"})
def route(ctx: KernelContext) -> Launch:
    x, a, (ids, weights) = ctx.x, ctx.attrs, ctx.results
    bias, normalised = ctx.op("bias"), a["eps"] is not None
    rows = (
        x.address, x.row_stride, address(bias), ids.address, weights.address, ids.row_stride,
        weights.row_stride, ctx.live_address(x.meta.rows), x.width, a["k"],
    )  # fmt: skip
    scale = (SCORES[a["score"]], int(normalised), float(a["eps"] or 0), float(a["factor"]))
    grid = (ctx.upper_bound(x.meta.rows),)
    each = next((p for p in _ROUTE_WARPS if x.width <= 32 * p), None)
    if each and a["groups"] == 1 and a["k"] <= min(32, x.width):
        kernel, known = _MODULE[f"route_{each}"], [bias] if bias else []
        return Launch(kernel, grid, (32 * each,), (*rows, *scale), prefetches=known)
    args = (*rows, a["groups"], a["top_groups"], a["top_per_group"], *scale)
    shared = 4 * (2 * x.width + a["groups"] + a["k"])
    return Launch(_MODULE["route"], grid, (32 * min(8, a["groups"]),), args, shared)
