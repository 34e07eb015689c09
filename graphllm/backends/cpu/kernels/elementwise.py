"""Elementwise kernels: sums, products, activations, and user-defined ops. Rows may be strided.

Rows are cut into chunks at fixed columns, so that the same code computes an element whatever the
number of rows or threads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from ....errors import GraphError
from ....graph.dtype import F32
from ....graph.tensor import Tensor
from ....ops import OpDef, get
from ... import Options
from ...kernel_context import requires_equal_shapes, requires_row
from .. import BACKEND
from ..runtime.argument_block import argument_reader, argument_words
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32_args, f32_bits, f32s, helper, inlined, kernel, load_i64
from ..runtime.lazy_numba import float32
from ..simd.math import exp32, gelu_erf32, gelu_tanh32, silu32, tanh32

CHUNK_COLUMNS = 2048


@helper
def thread_range(total, thread, threads):
    """Range of work items of a thread, out of ``total``: (first, end)."""
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
def _relu(x, unused):
    return float32(0) if x < float32(0) else x


@inlined
def _silu(x, unused):
    return silu32(x)


@inlined
def _gelu_tanh(x, unused):
    return gelu_tanh32(x)


@inlined
def _gelu_erf(x, unused):
    return gelu_erf32(x)


class UnaryArgs(NamedTuple):
    """Argument block of unary kernels; the function's parameters follow as float32."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live count
    width: int


_read_unary, _UNARY_WORDS = argument_reader(UnaryArgs), len(UnaryArgs._fields)


def _unary(name: str, function: Any, parameters: int = 1) -> Kernel:
    """Make a kernel for y = function(x, *parameters)."""

    @kernel(key=(name,))
    def unary(p, thread, threads):
        a, values = _read_unary(p), f32_args(p, _UNARY_WORDS, parameters)
        chunks = (a.width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(a.rows) * chunks, thread, threads)
        for item in range(first, last):
            row, column = item // chunks, item % chunks * CHUNK_COLUMNS
            source = f32s(a.x + row * a.x_stride + column * 4)
            target = f32s(a.y + (row * a.width + column) * 4)
            for i in range(min(CHUNK_COLUMNS, a.width - column)):
                target[i] = function(source[i], *values)

    return unary


_SCALE = _unary("scale", _scaled)
_SOFTCAP = _unary("softcap", _capped)
_SIGMOID = _unary("sigmoid", _sigmoid)
_RELU = _unary("relu", _relu)
_SILU = _unary("silu", _silu)
_GELU = {"tanh": _unary("gelu_tanh", _gelu_tanh), "erf": _unary("gelu_erf", _gelu_erf)}


def activation_function(name: str, kind: str) -> Any:
    """Return silu, or gelu of a ``kind``, as an inlined function of a value and an unused one."""
    return {("silu", ""): _silu, ("gelu", "tanh"): _gelu_tanh, ("gelu", "erf"): _gelu_erf}[
        name, kind
    ]


_ROWS: dict[str, Any] = {"layout": {"x": "rows"}, "dtypes": {"x": "f32"}}


def _launch(ctx: KernelContext, code: Kernel, *parameters: float) -> Launch:
    x = ctx.inputs[0]
    assert x is not None
    block = UnaryArgs(
        x.address, x.row_stride, ctx.out.address, ctx.live(x.meta.rows), prod(x.meta.inner)
    )
    return Launch(code, argument_words(block) + [f32_bits(value) for value in parameters])


@BACKEND.kernel("scale", **_ROWS)
def scale(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SCALE, ctx.attrs["factor"])


@BACKEND.kernel("softcap", **_ROWS)
def softcap(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SOFTCAP, ctx.attrs["cap"])


@BACKEND.kernel("sigmoid", **_ROWS)
def sigmoid(ctx: KernelContext) -> Launch:
    return _launch(ctx, _SIGMOID, 0.0)


@BACKEND.kernel("relu", **_ROWS)
def relu(ctx: KernelContext) -> Launch:
    return _launch(ctx, _RELU, 0.0)


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


class BinaryArgs(NamedTuple):
    """Argument block of binary kernels; the function's parameters follow as float32."""

    a: int
    a_stride: int
    b: int
    b_stride: int  # 0: one row of b for all
    y: int
    rows: int  # address of the live count
    inner: int  # rows of b's width in each row of a
    width: int


_read_binary, _BINARY_WORDS = argument_reader(BinaryArgs), len(BinaryArgs._fields)


def _binary(name: str, function: Any, parameters: int = 2, scalar: bool = False) -> Kernel:
    """Make a kernel for y = function(a, b, *parameters); with ``scalar`` b is a single element."""

    @kernel(key=(name, scalar))
    def binary(p, thread, threads):
        w, values = _read_binary(p), f32_args(p, _BINARY_WORDS, parameters)
        chunks = (w.width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
        first, last = thread_range(load_i64(w.rows) * w.inner * chunks, thread, threads)
        for item in range(first, last):
            line, column = item // chunks, item % chunks * CHUNK_COLUMNS
            row, part = line // w.inner, line % w.inner
            left = f32s(w.a + row * w.a_stride + (part * w.width + column) * 4)
            right = f32s(w.b + row * w.b_stride + (0 if scalar else column * 4))
            target = f32s(w.y + (line * w.width + column) * 4)
            for i in range(min(CHUNK_COLUMNS, w.width - column)):
                target[i] = function(left[i], right[0 if scalar else i], *values)

    return binary


_ADD = _binary("add", _sum), _binary("add", _sum, scalar=True)
_MUL = _binary("mul", _product), _binary("mul", _product, scalar=True)
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
    ctx: KernelContext, code: Kernel, a: OperandRef, b: OperandRef, *parameters: float
) -> Launch:
    width, inner, stride = a.width, 1, b.row_stride
    if b.meta.shape != a.meta.shape:  # one row of b for all rows of a
        width = a.meta.inner[-1]
        inner, stride = a.width // max(width, 1), 0
    rows = ctx.live(a.meta.rows)
    block = BinaryArgs(
        a.address, a.row_stride, b.address, stride, ctx.out.address, rows, inner, width
    )
    return Launch(code, argument_words(block) + [f32_bits(value) for value in parameters])


def _launch_sum(ctx: KernelContext, code: Kernel, scalar_code: Kernel) -> Launch:
    """Launch a sum or a product; ``scalar_code`` is for b of a single element."""
    a, b = ctx.a, ctx.b
    if b.meta.shape == a.meta.shape or (b.meta.ndim and b.meta.shape == a.meta.inner[-1:]):
        return _launch_pair(ctx, code, a, b, 0.0, 0.0)
    rows = ctx.live(a.meta.rows)
    block = BinaryArgs(a.address, a.row_stride, b.address, 0, ctx.out.address, rows, 1, a.width)
    return Launch(scalar_code, [*argument_words(block), 0, 0])


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


# --------------------------------------------------------------------------------- user-defined ops


def elementwise(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a CPU kernel for a user-defined op whose elements are computed independently.

        @cpu.elementwise("leaky_relu")
        def leaky_relu(x, slope):
            return x if x > float32(0) else slope * x

    The decorated function is compiled by Numba and inlined into a loop over the elements. Its
    parameters are the op's operands (one or two), then its attributes, by the same names and as
    float32; it returns one element. A second operand may be one row [D] for all rows [..., D] of
    the first. Rows may be strided. Operands that are not float32, and results of another shape than
    the first operand's, are left to the next backend.

    The function is returned unchanged. A file that is run again replaces its kernels.

    Raises:
        GraphError: the op is unknown or has another CPU kernel, or the parameters do not match.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        source = function.__code__
        where = f"{source.co_filename}:{source.co_firstlineno}: cpu.elementwise({op!r})"
        count, attributes = _parameters(get(op), function, where)
        kinds = _LAYOUTS[count]
        own = [f"{op}_{kind}" for kind in kinds]
        if any(known.name not in own for known in BACKEND.kernels.get(op, ())):
            raise GraphError(f"{where}: cpu has a kernel for {op} already")
        make = _unary if count == 1 else _binary
        from ..runtime.kernel_key import code_key  # imports Numba

        code = make(f"{op} {code_key(function)}", inlined(function), len(attributes))
        code.name = code.label = where

        def build(ctx: KernelContext) -> Launch:
            values = [float(ctx.attrs[name]) for name in attributes]
            a, *others = (ref for ref in ctx.inputs if ref is not None)
            if not others:
                return _launch(ctx, code, *values)
            return _launch_pair(ctx, code, a, others[0], *values)

        for kind, (layout, fits) in kinds.items():
            names = get(op).params
            rules = {"dtypes": dict.fromkeys(names, "f32"), "layout": dict(zip(names, layout))}
            BACKEND.kernel(op, name=f"{op}_{kind}", when=fits, **rules)(build)
        return function

    return register


def _parameters(op: OpDef, function: Callable[..., Any], where: str) -> tuple[int, list[str]]:
    """Return (number of operands, names of attributes) of a function that computes one element.

    Raises GraphError if the op or the function's parameters are not supported.
    """
    names = list(inspect.signature(function).parameters)
    count = len(op.params)
    if op.optional or op.variadic or op.writes or count not in _LAYOUTS:
        raise GraphError(f"{where}: the op must have one or two operands, and write to none")
    if tuple(names[:count]) != op.params or set(names[count:]) != set(op.defaults):
        want = ", ".join([*op.params, *op.defaults])
        raise GraphError(f"{where}: the parameters are ({', '.join(names)}), not ({want})")
    return count, names[count:]


def _same_shapes(node: Tensor, options: Options, operands: slice = slice(None)) -> str | None:
    """Why the elements of the result are not computed one by one from those of the operands."""
    for source in node.sources[operands]:
        if source.shape != node.shape or node.dtype != F32 or not node.shape:
            return f"the result is {node.meta}, an operand {source.meta}"
    texts = [name for name, value in node.attrs.items() if not isinstance(value, (int, float))]
    return f"the attribute {texts[0]} is not a number" if texts else None


def _with_one_row(node: Tensor, options: Options) -> str | None:
    """As `_same_shapes`, but the second operand is one row for all rows of the first."""
    a, b = node.sources
    if len(a.shape) < 2 or b.shape != a.shape[-1:]:
        return f"b is {b.meta}, not one row of a, {a.meta}"
    return _same_shapes(node, options, slice(1))


# By number of operands: their layouts, and the rule that selects nodes.
_LAYOUTS: Mapping[int, Mapping[str, tuple[tuple[str, ...], Any]]] = {
    1: {"elements": (("rows",), _same_shapes)},
    2: {
        "elements": (("rows", "rows"), _same_shapes),
        "rows": (("rows", "contiguous"), _with_one_row),
    },
}
