"""Fused ops around mixtures of experts; experts.py has the kernels of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..runtime.device import KernelContext
from ..runtime.source import Module, module
from ..runtime.work import Launch, ceil
from .elementwise import ACTIVATIONS
from .experts import (
    Gate,
    combine_launch,
    dtype_mismatch,
    expert_products,
    floats_aligned,
    no_summed_gemv,
    summed_gemv,
    workspace_nbytes,
)
from .fused_norm import two_at_most
from .gemm import PLAIN
from .grouped_experts import pairs_per_token
from .quantize import HALVES, has_row_scales, quantise, targets
from .weight_packing import INTEGERS, PACK, QUANTISED

Build = Callable[[KernelContext], list[Launch]]
CLAMPED = -1  # CLAMPED of experts.cuh
_MOST_EXPERTS, _ROUTER_ITEMS = 256, (4, 8, 16)  # of norm_router.cu


def _result_meta(node: Tensor) -> Meta:
    """Meta of the kernel's result: f16 or bf16 if requested, else float32."""
    _, w, _, ids = node.sources[:4]
    forms = node.attrs["dtypes"]
    form = forms[0] if len(forms) == 1 and forms[0] in HALVES else F32
    return Meta.of((*ids.meta.shape, w.meta.shape[1]), form)


def _when(node: Tensor, options: Options) -> str | None:
    """Both weights must have one shape and dtype, and rows aligned to 16 bytes."""
    x, w, w2 = node.sources[:3]
    if w.meta.shape != w2.meta.shape or w.dtype != w2.dtype:
        return f"w is {w.meta}, w2 {w2.meta}"
    columns = int(w.shape[2])  # type: ignore[arg-type]
    depth = w.dtype.row_nbytes(columns) if w.dtype.name in PLAIN else 0
    if depth % 16 or not (x.dtype.quantised or floats_aligned(x.meta)):
        return "rows are not aligned to 16 bytes"
    return dtype_mismatch(node, options) or two_at_most(node, options)


def _scratch(node: Tensor, options: Options) -> int:
    plain = node.attrs["dtypes"] and _result_meta(node).dtype == F32
    room = aligned(workspace_nbytes(node, options))
    return room + (aligned(_result_meta(node).bound().nbytes) if plain else 0)


def _gated(op: str) -> Callable[[Build], Build]:
    """Register a builder for plain weights, and for block weights, which are packed."""

    def register(build: Build) -> Build:
        rules: dict[str, Any] = {
            "layout": {"x": ROWS, "ids": ROWS}, "when": _when, "scratch": _scratch
        }  # fmt: skip
        f32 = {"bias": "f32", "bias2": "f32"}
        BACKEND.kernel(op, name=f"{op}_plain", dtypes={"w": PLAIN, **f32}, **rules)(build)
        blocks, pack = {"w": QUANTISED, **f32}, {"w": PACK, "w2": PACK}
        BACKEND.kernel(op, name=f"{op}_blocks", dtypes=blocks, pack=pack, **rules)(build)
        return build

    return register


def _gated_unit(ctx: KernelContext, *act: Any) -> list[Launch]:
    """The gated unit in one kernel, and the quantization of its result if one is requested.

    A float32 result that is quantised is in the workspace, behind that of the products.
    """
    forms, made = ctx.results, _result_meta(ctx.node)
    gate = Gate(ctx.w2, ctx.op("bias2"), made.dtype, *act)
    if made.dtype == forms[0].dtype:
        return expert_products(ctx, ctx.ids, ctx.op("bias"), forms[0].address, gate)
    y = ctx.scratch + aligned(workspace_nbytes(ctx.node, ctx.device.options))
    work = expert_products(ctx, ctx.ids, ctx.op("bias"), y, gate)
    return [*work, *(quantise(ctx, y, int(made.strides[0]), form) for form in forms)]


@_gated("expert_gated")
def expert_gated(ctx: KernelContext) -> list[Launch]:
    return _gated_unit(ctx, ACTIVATIONS[ctx.attrs["act"], ctx.attrs["kind"]])


@_gated("expert_clamped")
def expert_clamped(ctx: KernelContext) -> list[Launch]:
    return _gated_unit(ctx, CLAMPED, float(ctx.attrs["alpha"]), float(ctx.attrs["limit"]))


@BACKEND.kernel(
    "combine_add", layout=dict.fromkeys(("y", "weights", "r"), ROWS),
    dtypes=dict.fromkeys(("y", "weights", "r"), "f32"),
)  # fmt: skip
def combine_add(ctx: KernelContext) -> Launch:
    return combine_launch(ctx, ctx.r)


@BACKEND.kernel(
    "expert_linear_add", layout={"x": ROWS, "ids": ROWS, "weights": ROWS, "r": ROWS},
    dtypes={"w": INTEGERS, "weights": "f32", "r": "f32", "bias": "f32"}, pack={"w": PACK},
    when=no_summed_gemv,
)  # fmt: skip
def expert_linear_add(ctx: KernelContext) -> Launch:
    each = pairs_per_token(ctx.node)
    return summed_gemv(ctx, ctx.ids, ctx.weights, ctx.op("bias"), each)


def _few_products(node: Tensor, options: Options) -> str | None:
    """The kernel of norm_router has a block per row of the router, for one token."""
    h, _, w = node.sources[:3]
    experts, width = map(int, w.meta.bound().shape)  # type: ignore[arg-type]
    if KernelContext.upper_bound(h.meta.rows) > 1 or options.deterministic:
        return "several tokens"
    if experts > _MOST_EXPERTS or width % 4 or width > 512 * _ROUTER_ITEMS[-1]:
        return f"{experts} rows of {width}"
    if not floats_aligned(h.meta) or has_row_scales(*node.attrs["dtypes"]):
        return "rows are not aligned to 16 bytes, or need a scale"
    return two_at_most(node, options)


def _router_module(kind: str, items: int) -> Module:
    return module("norm_router", HALVES=HALVES.get(kind, 0), ITEMS=items)


@BACKEND.kernel(
    "norm_router", layout={"h": ROWS}, when=_few_products,
    dtypes={"h": "f32", "g": "f32", "w": PLAIN, "bias": "f32"},
)  # fmt: skip
def norm_router(ctx: KernelContext) -> Launch:
    *forms, logits = ctx.results
    experts, width = ctx.w.meta.shape
    items = next(n for n in _ROUTER_ITEMS if width <= 512 * n)
    args = (
        ctx.h.address, ctx.g.address, targets(forms), ctx.w.address, address(ctx.op("bias")),
        logits.address, ctx.live_address(ctx.h.meta.rows), width, experts, float(ctx.attrs["eps"]),
    )  # fmt: skip
    known = [ref for ref in (ctx.g, ctx.w, ctx.op("bias")) if ref is not None]
    grid = (experts + ceil(width, 1024),)
    kernel = _router_module(ctx.w.dtype.name, items)["norm_router"]
    return Launch(kernel, grid, (128,), args, prefetches=known)


for _kind in PLAIN:
    for _items in _ROUTER_ITEMS:
        _router_module(_kind, _items)  # so that tests compile every module
