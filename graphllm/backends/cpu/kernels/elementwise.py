"""Sums, products and activations, and kernels of that kind for ops from elsewhere. One pass; rows
may be strided.

Work is cut into pieces of a row at fixed columns, so that an element is computed by the same code
whatever the number of rows or threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from numba import float32

from ....errors import GraphError
from ....graph.dtype import F32
from ....graph.tensor import Tensor
from ....ops import OpDef, get
from ... import Options
from ...kernel_context import requires_equal_shapes, requires_row
from .. import BACKEND
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, args, f32_args, f32_bits, f32s, helper, inlined, kernel, load_i64
from ..runtime.kernel_key import code_key
from ..simd.math import exp32, gelu_erf32, gelu_tanh32, silu32, tanh32

CHUNK_COLUMNS = 2048  # of a piece


@helper
def thread_range(total, thread, threads):
    """This thread's part of ``total`` pieces: (first, one after the last)."""
    return total * thread // threads, total * (thread + 1) // threads


@inlined
def _scaled(x, factor):
    return x * factor


@inlined
def _capped(x, cap):
    return cap * tanh32(x / cap)


@inlined
def _sigmoid(x, unused):
    return float32(1) / (float32(1) + exp32(-x))


@inlined
def _silu(x, unused):
    return silu32(x)


@inlined
def _gelu_tanh(x, unused):
    return gelu_tanh32(x)


@inlined
def _gelu_erf(x, unused):
    return gelu_erf32(x)


def _unary(name: str, function: Any, parameters: int = 1) -> Kernel:
    """A kernel for out = function(x, parameters)."""

    @kernel(key=(name,))
    def unary(p, thread, threads):
        x, stride, y, rows_at, width = args(p, 5)
        values = f32_args(p, 5, parameters)
        pieces = (width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(rows_at) * pieces, thread, threads)
        for item in range(first, last):
            row, column = item // pieces, item % pieces * CHUNK_COLUMNS
            source = f32s(x + row * stride + column * 4)
            target = f32s(y + (row * width + column) * 4)
            for i in range(min(CHUNK_COLUMNS, width - column)):
                target[i] = function(source[i], *values)

    return unary


_SCALE = _unary("scale", _scaled)
_SOFTCAP = _unary("softcap", _capped)
_SIGMOID = _unary("sigmoid", _sigmoid)
_SILU = _unary("silu", _silu)
_GELU = {"tanh": _unary("gelu_tanh", _gelu_tanh), "erf": _unary("gelu_erf", _gelu_erf)}


def activation_function(name: str, kind: str) -> Any:
    """silu, or gelu of one ``kind``, as an inlined function of a value and an unused one."""
    return {("silu", ""): _silu, ("gelu", "tanh"): _gelu_tanh, ("gelu", "erf"): _gelu_erf}[
        name, kind
    ]


_ROWS: dict[str, Any] = {"layout": {"x": "rows"}, "dtypes": {"x": "f32"}}


def _launch(ctx: KernelContext, made: Kernel, *parameters: float) -> Launch:
    x = ctx.inputs[0]
    assert x is not None
    words = [x.address, x.row_stride, ctx.out.address, ctx.live(x.meta.rows), prod(x.meta.inner)]
    return Launch(made, words + [f32_bits(value) for value in parameters])


@BACKEND.kernel("scale", **_ROWS)
def scale(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SCALE, ctx.attrs["factor"])


@BACKEND.kernel("softcap", **_ROWS)
def softcap(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SOFTCAP, ctx.attrs["cap"])


@BACKEND.kernel("sigmoid", **_ROWS)
def sigmoid(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SIGMOID, 0.0)


@BACKEND.kernel("silu", **_ROWS)
def silu(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SILU, 0.0)


@BACKEND.kernel("gelu", **_ROWS)
def gelu(ctx: KernelContext) -> Launch:
    return _launch(ctx, _GELU[ctx.attrs["kind"]], 0.0)


# ------------------------------------------------------------------------------------ two operands


@inlined
def _sum(a, b, *unused):
    return a + b


@inlined
def _product(a, b, *unused):
    return a * b


@inlined
def _clamped_glu(gate, up, alpha, limit):
    gate, up = limit if gate > limit else gate, limit if up > limit else up
    up = -limit if up < -limit else up
    return gate / (float32(1) + exp32(-alpha * gate)) * (up + float32(1))


def _binary(name: str, function: Any, parameters: int = 2, one: bool = False) -> Kernel:
    """A kernel for out = function(a, b, parameters); ``inner`` rows of b's width make a row of
    a. With ``one`` b is one element for all."""

    @kernel(key=(name, one))
    def binary(p, thread, threads):
        a, a_stride, b, b_stride, y, rows_at, inner, width = args(p, 8)
        values = f32_args(p, 8, parameters)
        pieces = (width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(rows_at) * inner * pieces, thread, threads)
        for item in range(first, last):
            line, column = item // pieces, item % pieces * CHUNK_COLUMNS
            row, part = line // inner, line % inner
            left = f32s(a + row * a_stride + (part * width + column) * 4)
            right = f32s(b + row * b_stride + (0 if one else column * 4))
            target = f32s(y + (line * width + column) * 4)
            for i in range(min(CHUNK_COLUMNS, width - column)):
                target[i] = function(left[i], right[0 if one else i], *values)

    return binary


_ADD = _binary("add", _sum), _binary("add", _sum, one=True)
_MUL = _binary("mul", _product), _binary("mul", _product, one=True)
_CLAMPED_GLU = _binary("clamped_glu", _clamped_glu)


_ROW: dict[str, Any] = {
    "layout": {"a": "rows"},
    "dtypes": {"a": "f32", "b": "f32"},
    "when": requires_row,
}
_PAIR: dict[str, Any] = {
    "layout": {"a": "rows", "b": "rows"},
    "dtypes": {"a": "f32", "b": "f32"},
    "when": requires_equal_shapes,
}


def _launch_pair(
    ctx: KernelContext, made: Kernel, a: OperandRef, b: OperandRef, *parameters: float
) -> Launch:
    width, inner, stride = a.width, 1, b.row_stride
    if b.meta.shape != a.meta.shape:  # one row of b for all
        width = a.meta.inner[-1]
        inner, stride = a.width // max(width, 1), 0
    words = [a.address, a.row_stride, b.address, stride, ctx.out.address]
    words += [ctx.live(a.meta.rows), inner, width]
    return Launch(made, words + [f32_bits(value) for value in parameters])


def _launch_sum(ctx: KernelContext, made: Kernel, with_one: Kernel) -> Launch:
    """A sum or a product: by ``with_one`` where b is one element for all."""
    a, b = ctx.a, ctx.b
    if b.meta.shape in (a.meta.shape, a.meta.inner[-1:]):
        return _launch_pair(ctx, made, a, b, 0.0, 0.0)
    words = [a.address, a.row_stride, b.address, 0, ctx.out.address]
    return Launch(with_one, [*words, ctx.live(a.meta.rows), 1, a.width, 0, 0])


@BACKEND.kernel("add", **_PAIR)
@BACKEND.kernel("add", name="add_row", **_ROW)
def add(ctx: KernelContext) -> Launch:
    return _launch_sum(ctx, *_ADD)


@BACKEND.kernel("mul", **_PAIR)
@BACKEND.kernel("mul", name="mul_row", **_ROW)
def mul(ctx: KernelContext) -> Launch:
    return _launch_sum(ctx, *_MUL)


@BACKEND.kernel(
    "clamped_glu", dtypes={"gate": "f32", "up": "f32"}, layout={"gate": "rows", "up": "rows"}
)
def clamped_glu(ctx: KernelContext) -> Launch:
    alpha, limit = ctx.attrs["alpha"], ctx.attrs["limit"]
    return _launch_pair(ctx, _CLAMPED_GLU, ctx.gate, ctx.up, alpha, limit)


# ------------------------------------------------------------------------------- ops from elsewhere


def elementwise(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a CPU kernel for an op of your own that computes each element by itself.

        @cpu.elementwise("leaky_relu")
        def leaky_relu(x, slope):
            return x if x > float32(0) else slope * x

    The decorated function is compiled by Numba and inlined into a loop over the elements. Its
    parameters are the op's operands (one or two), then its attributes, all by their names and as
    float32; it returns one element. A second operand may be one row [D] for all rows [..., D] of
    the first. Rows may be strided. Operands that are not float32, and results of another shape than
    the first operand's, are left to the next backend.

    The function is returned as it was. A file that is run again replaces its kernels. GraphError if
    the op is unknown or has another kernel, or the parameters are others.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        code = function.__code__
        where = f"{code.co_filename}:{code.co_firstlineno}: cpu.elementwise({op!r})"
        count, attributes = _parameters(get(op), function, where)
        kinds = _LAYOUTS[count]
        own = [f"{op}_{kind}" for kind in kinds]
        if any(known.name not in own for known in BACKEND.kernels.get(op, ())):
            raise GraphError(f"{where}: cpu has a kernel for {op} already")
        make = _unary if count == 1 else _binary
        made = make(f"{op} {code_key(function)}", inlined(function), len(attributes))
        made.name = made.label = where

        def build(ctx: KernelContext) -> Launch:
            values = [float(ctx.attrs[name]) for name in attributes]
            a, *others = (ref for ref in ctx.inputs if ref is not None)
            if not others:
                return _launch(ctx, made, *values)
            return _launch_pair(ctx, made, a, others[0], *values)

        for kind, (layout, fits) in kinds.items():
            names = get(op).params
            rules = {"dtypes": dict.fromkeys(names, "f32"), "layout": dict(zip(names, layout))}
            BACKEND.kernel(op, name=f"{op}_{kind}", when=fits, **rules)(build)
        return function

    return register


def _parameters(op: OpDef, function: Callable[..., Any], where: str) -> tuple[int, list[str]]:
    """(number of operands, names of attributes) of a function that computes one element of the
    op's result. GraphError if it cannot."""
    names = list(inspect.signature(function).parameters)
    count = len(op.params)
    if op.optional or op.variadic or op.writes or count not in _LAYOUTS:
        raise GraphError(f"{where}: the op must have one or two operands, and write to none")
    if tuple(names[:count]) != op.params or set(names[count:]) != set(op.defaults):
        want = ", ".join([*op.params, *op.defaults])
        raise GraphError(f"{where}: the parameters are ({', '.join(names)}), not ({want})")
    return count, names[count:]


def _alike(node: Tensor, options: Options, operands: slice = slice(None)) -> str | None:
    """Why elements of the result do not follow one by one from those of the operands."""
    for source in node.sources[operands]:
        if source.shape != node.shape or node.dtype != F32 or not node.shape:
            return f"the result is {node.meta}, an operand {source.meta}"
    texts = [name for name, value in node.attrs.items() if not isinstance(value, (int, float))]
    return f"the attribute {texts[0]} is no number" if texts else None


def _with_one_row(node: Tensor, options: Options) -> str | None:
    """As `_alike`, where the second operand is one row for all rows of the first."""
    a, b = node.sources
    if len(a.shape) < 2 or b.shape != a.shape[-1:]:
        return f"b is {b.meta}, not one row of a, {a.meta}"
    return _alike(node, options, slice(1))


# By the number of operands: how they lie, and which nodes fit.
_LAYOUTS: Mapping[int, Mapping[str, tuple[tuple[str, ...], Any]]] = {
    1: {"elements": (("rows",), _alike)},
    2: {"elements": (("rows", "rows"), _alike), "rows": (("rows", "contiguous"), _with_one_row)},
}
