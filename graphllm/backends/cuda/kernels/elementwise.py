"""Elementwise sums, products and activations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from .... import ops
from ....graph.dtype import F16
from ....graph.tensor import Tensor
from ... import CONTIGUOUS, ROWS, Options
from ...kernel_context import requires_equal_shapes, requires_row
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Arg, Launch, ceil
from .matrices import MAX_TOKENS

_MODULE = module("elementwise")
_THREADS = 256
_FOUR_PER_THREAD = 1 << 18  # elements of the operand from which on a thread takes four

# enum Activation of common.cuh, by op and kind of gelu.
ACTIVATIONS = {("silu", ""): 0, ("gelu", "tanh"): 1, ("gelu", "erf"): 2, ("relu", ""): 3}


def rows_grid(ctx: KernelContext, x: OperandRef, columns: int) -> tuple[int, int]:
    """Grid with one block for every row and every ``columns`` columns of ``x``."""
    return ctx.upper_bound(x.meta.rows), ceil(x.width, columns)


def _launch(ctx: KernelContext, x: OperandRef, name: str, args: Sequence[Arg]) -> Launch:
    each = 4 if ctx.upper_bound(x.meta.rows) * x.width >= _FOUR_PER_THREAD else 1
    grid = rows_grid(ctx, x, _THREADS * each)
    return Launch(_MODULE[f"{name}_{each}"], grid, (_THREADS,), args)


def _unary(ctx: KernelContext, name: str, parameter: float = 0.0) -> Launch:
    x, rows = ctx.x, ctx.live_address(ctx.x.meta.rows)
    args = (x.address, x.row_stride, ctx.out.address, rows, x.width, float(parameter))
    return _launch(ctx, x, name, args)


_ROWS: dict[str, Any] = {"layout": {"x": ROWS}, "dtypes": {"x": "f32"}}


@BACKEND.kernel("scale", **_ROWS)
def scale(ctx: KernelContext) -> Launch:
    return _unary(ctx, "scale", ctx.attrs["factor"])


@BACKEND.kernel("softcap", **_ROWS)
def softcap(ctx: KernelContext) -> Launch:
    return _unary(ctx, "softcap", ctx.attrs["cap"])


@BACKEND.kernel("relu", **_ROWS)
def relu(ctx: KernelContext) -> Launch:
    return _unary(ctx, "relu")


@BACKEND.kernel("silu", **_ROWS)
def silu(ctx: KernelContext) -> Launch:
    return _unary(ctx, "silu")


@BACKEND.kernel("sigmoid", **_ROWS)
def sigmoid(ctx: KernelContext) -> Launch:
    return _unary(ctx, "sigmoid")


@BACKEND.kernel("gelu", **_ROWS)
def gelu(ctx: KernelContext) -> Launch:
    return _unary(ctx, f"gelu_{ctx.attrs['kind']}")


@BACKEND.kernel("hadamard", **_ROWS)
def hadamard(ctx: KernelContext) -> Launch:
    x = ctx.x
    args = (x.address, x.row_stride, ctx.out.address, ctx.live_address(x.meta.rows), x.width)
    return Launch(_MODULE["hadamard"], rows_grid(ctx, x, _THREADS), (_THREADS,), args)


# ------------------------------------------------------------------------------------ two operands


_FLOATS = {"a": "f32", "b": "f32"}
_ROW: dict[str, Any] = {
    "layout": {"a": ROWS, "b": CONTIGUOUS},
    "dtypes": _FLOATS,
    "when": requires_row,
}
_PAIR: dict[str, Any] = {
    "layout": {"a": ROWS, "b": ROWS},
    "dtypes": _FLOATS,
    "when": requires_equal_shapes,
}


def _binary(ctx: KernelContext, name: str, stride: int, inner: int) -> Launch:
    a, b = ctx.a, ctx.b
    args = (a.address, a.row_stride, b.address, stride, ctx.out.address,
            ctx.live_address(a.meta.rows), a.width, inner)  # fmt: skip
    return _launch(ctx, a, name, args)


def _lower_add(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """The residual of a post-norm layer in f16, as its linears multiply f16; see `half_residual`.

    The sum is stored in f16, too: half the bytes, with an error as large as that of the product.
    """
    a, b = node.sources
    return (ops.quantise_act(a, dtype=F16.name) if half_residual(a, b, options) else a), b


def half_residual(a: Tensor, b: Tensor, options: Options) -> bool:
    """Whether a + b is a norm and the product of many tokens in f16 that is added to it."""
    many = KernelContext.upper_bound(a.meta.rows) > MAX_TOKENS and not options.deterministic
    if not (many and a.op == "layer_norm" and b.op == "linear" and len(a.shape) == 2):
        return False
    whole = a.shape == b.shape and int(a.meta.inner[0]) % 8 == 0
    return whole and b.sources[0].dtype == F16


@BACKEND.kernel("add", **_PAIR, lower=_lower_add)
def add(ctx: KernelContext) -> Launch:
    return _binary(ctx, "add", ctx.b.row_stride, 0)


@BACKEND.kernel("add", **(_PAIR | {"dtypes": {"a": "f16", "b": "f32"}}))
def add_half(ctx: KernelContext) -> Launch:
    return _binary(ctx, "add_half", ctx.b.row_stride, 0)


@BACKEND.kernel("add", **_ROW)
def add_row(ctx: KernelContext) -> Launch:
    return _binary(ctx, "add", 0, prod(ctx.b.meta.shape))


@BACKEND.kernel("mul", **_PAIR)
def mul(ctx: KernelContext) -> Launch:
    return _binary(ctx, "mul", ctx.b.row_stride, 0)


@BACKEND.kernel("mul", **_ROW)
def mul_row(ctx: KernelContext) -> Launch:
    return _binary(ctx, "mul", 0, prod(ctx.b.meta.shape))


@BACKEND.kernel(
    "clamped_glu", layout={"gate": ROWS, "up": ROWS}, dtypes={"gate": "f32", "up": "f32"}
)
def clamped_glu(ctx: KernelContext) -> Launch:
    gate, up = ctx.gate, ctx.up
    args = (gate.address, gate.row_stride, up.address, up.row_stride, ctx.out.address,
            ctx.live_address(gate.meta.rows), gate.width, float(ctx.attrs["alpha"]),
            float(ctx.attrs["limit"]))  # fmt: skip
    return _launch(ctx, gate, "clamped_glu", args)
