"""Fused ops around norms and gated units; those around linears are in fused_linear.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ....graph.dtype import F16, F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Arg, Launch, ceil
from .elementwise import ACTIVATIONS
from .matrices import MAX_TOKENS
from .norm import register_units
from .quantize import has_row_scales, quantise, targets, unit

_MODULE = module("fused_norm")
_WARPS = 4
_HALVES_THREADS, _UNIT_THREADS = 256, 128
_LAYER_NORM = ArgumentStruct("fused_norm.cu", "LayerNorm")
_ROW_UNITS, _ROW_WARPS = 4, 8  # most units of a row that a warp computes; warps of a block


def two_at_most(node: Tensor, options: Options) -> str | None:
    """Why the kernels cannot write the requested dtypes; None if they can."""
    count = len(node.attrs["dtypes"])
    return f"{count} quantised results" if count > 2 else None


def _fits(node: Tensor, options: Options) -> str | None:
    width = node.sources[0].shape[1]
    assert isinstance(width, int)
    return None if register_units(width)[0] else f"rows of {width} do not fit in registers"


def _norms(node: Tensor, options: Options) -> str | None:
    return _fits(node, options) or two_at_most(node, options)


_FLOATS = dict.fromkeys(("h", "w", "b", "x", "w2", "gate", "up"), "f32")


def _rules(*rows: str, **more: Any) -> dict[str, Any]:
    return {"layout": dict.fromkeys(rows, ROWS), "dtypes": _FLOATS, **more}


def _launch(
    name: str, ctx: KernelContext, width: int, args: Sequence[Arg], *weights: OperandRef
) -> Launch:
    """One block per row, which holds the row in registers."""
    each, threads = register_units(width)
    grid = (ctx.upper_bound(ctx.out.meta.rows),)
    return Launch(_MODULE[f"{name}_{each}"], grid, (threads,), args, prefetches=weights)


@BACKEND.kernel("norm_add", **_rules("h", "x", when=_fits))
def norm_add(ctx: KernelContext) -> Launch:
    h, x, rows, width = ctx.h, ctx.x, ctx.h.meta.rows, ctx.h.width
    args = (h.address, h.row_stride, ctx.w.address, x.address, x.row_stride, ctx.out.address,
            ctx.out.row_stride, ctx.live_address(rows), width, float(ctx.attrs["eps"]))  # fmt: skip
    return _launch("norm_add", ctx, width, args, ctx.w)


@BACKEND.kernel("norm_quantise", **_rules("x", when=_norms))
def norm_quantise(ctx: KernelContext) -> Launch:
    return norm(ctx, ctx.x, ctx.w, ctx.results, float(ctx.attrs["eps"]))


def norm(
    ctx: KernelContext, x: OperandRef, w: OperandRef, forms: Sequence[OperandRef], eps: float
) -> Launch:
    """The RMS norm of x with weight w, written to at most two results, f32 or quantized."""
    args = (x.address, x.row_stride, w.address, targets(forms), ctx.live_address(x.meta.rows),
            x.width, eps)  # fmt: skip
    return _launch("norm_quantise", ctx, x.width, args, w)


def _narrow_rows(node: Tensor, options: Options) -> str | None:
    width = node.sources[0].shape[1]
    assert isinstance(width, int)
    fits = register_units(width)[0] == 1
    return two_at_most(node, options) if fits else f"rows of {width} do not fit in registers"


@BACKEND.kernel(
    "layer_norm_quantise", layout={"x": ROWS}, when=_narrow_rows,
    dtypes={**_FLOATS, "x": ("f32", "f16")},
)  # fmt: skip
def layer_norm_quantise(ctx: KernelContext) -> Launch:
    """A warp computes each of many rows, else a block."""
    x, rows, width, forms = ctx.x, ctx.upper_bound(ctx.x.meta.rows), ctx.x.width, ctx.results
    arg = _LAYER_NORM.pack(
        x=x.address, x_stride=x.row_stride, w=ctx.w.address, b=ctx.address("b"),
        live=ctx.live_address(x.meta.rows), half=x.dtype == F16, width=width,
        eps=ctx.attrs["eps"],
    )  # fmt: skip
    units = ceil(width, 256)
    scaled = has_row_scales(*(form.dtype.name for form in forms))
    args = (arg, targets(forms))
    # The order of sums of one unit is the same in both kernels.
    same = units == 1 or not ctx.deterministic
    if rows > MAX_TOKENS and units <= _ROW_UNITS and not scaled and same:
        grid = (ceil(rows, _ROW_WARPS),)
        return Launch(_MODULE[f"layer_norm_rows_{units}"], grid, (32 * _ROW_WARPS,), args)
    weights = [ref for ref in (ctx.w, ctx.op("b")) if ref is not None]
    return _launch("layer_norm_quantise", ctx, width, args, *weights)


@BACKEND.kernel("norm_add_norm", **_rules("h", "x", when=_norms))
def norm_add_norm(ctx: KernelContext) -> Launch:
    h, x, rows, width = ctx.h, ctx.x, ctx.h.meta.rows, ctx.h.width
    total, *forms = ctx.results
    args = (
        h.address, h.row_stride, ctx.w.address, x.address, x.row_stride, ctx.w2.address,
        total.address, total.row_stride, targets(forms), ctx.live_address(rows), width,
        float(ctx.attrs["eps"]), float(ctx.attrs["eps2"]),
    )  # fmt: skip
    return _launch("norm_add_norm", ctx, width, args, ctx.w, ctx.w2)


def _glu_scratch(node: Tensor, options: Options) -> int:
    """Bytes of a float32 result that a kernel of its own quantizes."""
    if not has_row_scales(*node.attrs["dtypes"]):
        return 0
    return Meta.of(node.sources[0].shape, F32).bound().nbytes


@BACKEND.kernel("glu", **_rules("gate", "up", when=two_at_most, scratch=_glu_scratch))
def glu(ctx: KernelContext) -> list[Launch]:
    return gated_unit(ctx, ctx.gate, ctx.up, ctx.scratch)


def gated_unit(ctx: KernelContext, gate: OperandRef, up: OperandRef, floats: int) -> list[Launch]:
    """act(gate) * up, written to the step's results.

    Rows with one scale are quantized by a kernel of its own, from dense rows at address ``floats``,
    which may be those of ``gate``.
    """
    forms = ctx.results
    if not has_row_scales(*(form.dtype.name for form in forms)):
        return [_gated_unit(ctx, gate, up, forms)]
    made = OperandRef(floats, Meta.of(gate.meta.shape, F32), gate.operand)
    each = (quantise(ctx, floats, made.row_stride, form) for form in forms)
    return [_gated_unit(ctx, gate, up, [made]), *each]


def _gated_unit(
    ctx: KernelContext, gate: OperandRef, up: OperandRef, forms: Sequence[OperandRef]
) -> Launch:
    rows, (*lines, width) = gate.meta.rows, gate.meta.inner
    size, count = unit(forms), prod(lines)
    args = (gate.address, gate.row_stride, up.address, up.row_stride, targets(forms),
            ctx.live_address(rows), count, width,
            ACTIVATIONS[ctx.attrs["act"], ctx.attrs["kind"]])  # fmt: skip
    grid = (ctx.upper_bound(rows) * count, ceil(width, 32 * size * _WARPS))
    return Launch(_MODULE[f"glu_{size}"], grid, (32 * _WARPS,), args)


def gated_halves(ctx: KernelContext, gate: OperandRef, up: OperandRef) -> Launch:
    """act(gate) * up for dense f16 or bf16, written as the same dtype."""
    rows, width, (out,) = gate.meta.rows, gate.width, ctx.results
    args = (gate.address, up.address, out.address, out.row_stride, ctx.live_address(rows), width,
            ACTIVATIONS[ctx.attrs["act"], ctx.attrs["kind"]])  # fmt: skip
    grid = (ctx.upper_bound(rows), ceil(width, 8 * _HALVES_THREADS))
    return Launch(_MODULE[f"glu_{gate.dtype.name}"], grid, (_HALVES_THREADS,), args)


def unit_in_place(ctx: KernelContext, x: OperandRef, bias: OperandRef | None, act: int) -> Launch:
    """act(x + bias) for dense f16 or bf16, of whose columns there are a multiple of eight."""
    args = (x.address, bias.address if bias else 0, ctx.live_address(x.meta.rows), x.width, act)
    grid = (ctx.upper_bound(x.meta.rows), ceil(x.width, 8 * _UNIT_THREADS))
    return Launch(_MODULE[f"unit_{x.dtype.name}"], grid, (_UNIT_THREADS,), args)
