"""Sums, products and activations. One pass; rows may be strided.

Work is cut into pieces of a row at fixed columns, so that an element is computed by the same code
whatever the number of rows or threads.
"""

from __future__ import annotations

from math import prod
from typing import Any

from numba import float32

from ..site import one_row, paired
from . import BACKEND
from .device import Launch, Site, Spot
from .jit import Kernel, args, as_f32, f32_bits, f32s, helper, inlined, kernel, load_i64
from .maths import exp32, gelu_erf32, gelu_tanh32, silu32, tanh32

COLUMNS = 2048  # of a piece


@helper
def share(total, thread, threads):
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


def _unary(name: str, function: Any) -> Kernel:
    """A kernel for out = function(x, parameter)."""

    @kernel(key=(name,))
    def unary(p, thread, threads):
        x, stride, y, rows_at, width, bits = args(p, 6)
        parameter = as_f32(bits)
        pieces = (width + COLUMNS - 1) // COLUMNS
        first, last = share(load_i64(rows_at) * pieces, thread, threads)
        for item in range(first, last):
            row, column = item // pieces, item % pieces * COLUMNS
            source = f32s(x + row * stride + column * 4)
            target = f32s(y + (row * width + column) * 4)
            for i in range(min(COLUMNS, width - column)):
                target[i] = function(source[i], parameter)

    return unary


_SCALE = _unary("scale", _scaled)
_SOFTCAP = _unary("softcap", _capped)
_SIGMOID = _unary("sigmoid", _sigmoid)
_SILU = _unary("silu", _silu)
_GELU = {"tanh": _unary("gelu_tanh", _gelu_tanh), "erf": _unary("gelu_erf", _gelu_erf)}


def activation(name: str, kind: str) -> Any:
    """silu, or gelu of one ``kind``, as an inlined function of a value and an unused one."""
    return {("silu", ""): _silu, ("gelu", "tanh"): _gelu_tanh, ("gelu", "erf"): _gelu_erf}[
        name, kind
    ]


_ROWS: dict[str, Any] = {"layout": {"x": "rows"}, "dtypes": {"x": "f32"}}


def _launch(site: Site, made: Kernel, parameter: float = 0.0) -> Launch:
    x, width = site.x, prod(site.x.meta.inner)
    rows = site.live(x.meta.rows)
    words = [x.address, x.row_stride, site.out.address, rows, width, f32_bits(parameter)]
    return Launch(made, words)


@BACKEND.kernel("scale", **_ROWS)
def scale(site: Site) -> Launch:
    return _launch(site, _SCALE, site.attrs["factor"])


@BACKEND.kernel("softcap", **_ROWS)
def softcap(site: Site) -> Launch:
    return _launch(site, _SOFTCAP, site.attrs["cap"])


@BACKEND.kernel("sigmoid", **_ROWS)
def sigmoid(site: Site) -> Launch:
    return _launch(site, _SIGMOID)


@BACKEND.kernel("silu", **_ROWS)
def silu(site: Site) -> Launch:
    return _launch(site, _SILU)


@BACKEND.kernel("gelu", **_ROWS)
def gelu(site: Site) -> Launch:
    return _launch(site, _GELU[site.attrs["kind"]])


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


def _binary(name: str, function: Any) -> Kernel:
    """A kernel for out = function(a, b, two parameters); ``inner`` rows of b's width make a row of
    a."""

    @kernel(key=(name,))
    def binary(p, thread, threads):
        a, a_stride, b, b_stride, y, rows_at, inner, width, first_bits, second_bits = args(p, 10)
        one, other = as_f32(first_bits), as_f32(second_bits)
        pieces = (width + COLUMNS - 1) // COLUMNS
        first, last = share(load_i64(rows_at) * inner * pieces, thread, threads)
        for item in range(first, last):
            line, column = item // pieces, item % pieces * COLUMNS
            row, part = line // inner, line % inner
            left = f32s(a + row * a_stride + (part * width + column) * 4)
            right = f32s(b + row * b_stride + column * 4)
            target = f32s(y + (line * width + column) * 4)
            for i in range(min(COLUMNS, width - column)):
                target[i] = function(left[i], right[i], one, other)

    return binary


_ADD, _MUL = _binary("add", _sum), _binary("mul", _product)
_CLAMPED_GLU = _binary("clamped_glu", _clamped_glu)


_ROW: dict[str, Any] = {
    "layout": {"a": "rows"},
    "dtypes": {"a": "f32", "b": "f32"},
    "when": one_row,
}
_PAIR: dict[str, Any] = {
    "layout": {"a": "rows", "b": "rows"},
    "dtypes": {"a": "f32", "b": "f32"},
    "when": paired,
}


def _launch_pair(
    site: Site, made: Kernel, a: Spot, b: Spot, one: float = 0.0, other: float = 0.0
) -> Launch:
    width, inner, stride = a.width, 1, b.row_stride
    if b.meta.shape != a.meta.shape:  # one row of b for all
        width = a.meta.inner[-1]
        inner, stride = a.width // max(width, 1), 0
    words = [a.address, a.row_stride, b.address, stride, site.out.address]
    words += [site.live(a.meta.rows), inner, width, f32_bits(one), f32_bits(other)]
    return Launch(made, words)


@BACKEND.kernel("add", **_PAIR)
@BACKEND.kernel("add", name="add_row", **_ROW)
def add(site: Site) -> Launch:
    return _launch_pair(site, _ADD, site.a, site.b)


@BACKEND.kernel("mul", **_PAIR)
@BACKEND.kernel("mul", name="mul_row", **_ROW)
def mul(site: Site) -> Launch:
    return _launch_pair(site, _MUL, site.a, site.b)


@BACKEND.kernel(
    "clamped_glu", dtypes={"gate": "f32", "up": "f32"}, layout={"gate": "rows", "up": "rows"}
)
def clamped_glu(site: Site) -> Launch:
    alpha, limit = site.attrs["alpha"], site.attrs["limit"]
    return _launch_pair(site, _CLAMPED_GLU, site.gate, site.up, alpha, limit)
