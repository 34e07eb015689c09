"""Kernels of fused ops: `graphllm.ops.fused.linear` says what each of them does."""

from __future__ import annotations

from functools import cache
from math import prod, sqrt
from typing import Any

from numba import float32

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, args, as_f32, f32_bits, f32s, helper, kernel, load_i64
from . import linear
from .elementwise import activation_function, thread_range
from .linear_microkernels import workspace
from .quantize import quantise_block
from .weight_packing import pack

_BLOCK = 256  # columns that are finished at a time: a multiple of every block of activations
_ROOM = 4 * _BLOCK  # bytes

# ---------------------------------------------------------------------------------------- finishes

# Where a finished row goes: an address, the bytes from row to row, and 0, 32 or 256: as it is, or
# quantised in blocks of so many. Two of them; the second's address is 0 where there is only one.
Target = tuple[int, int, int]
_NOWHERE: Target = (0, 0, 0)


def _block_of(meta: Meta) -> int:
    return meta.dtype.block if meta.dtype.name.startswith("a8_") else 0


@helper
def _write_row(values, y, block, column, count, width):
    """``count`` values of a row of ``width``, from ``column`` on, as the row at y wants them."""
    if block == 0:
        source, target = f32s(values), f32s(y + 4 * column)
        for i in range(count):
            target[i] = source[i]
    elif block == 32:
        d, s = y + width, y + width + width // 32 * 4
        for b in range(count // 32):
            at = column // 32 + b
            quantise_block(32, values + 128 * b, y + 32 * at, d + 4 * at, s + 4 * at)
    else:
        at = column // 256
        d, s = y + width, y + width + width // 256 * 4
        quantise_block(256, values, y + column, d + 4 * at, s + 32 * at)


# ------------------------------------------------------------------------------------------- norms


@helper
def rms_norm_factor(row, width, eps):
    """What a root-mean-square norm multiplies a row with."""
    values, total = f32s(row), float32(0)
    for i in range(width):
        total += values[i] * values[i]
    return float32(1) / float32(sqrt(total / float32(width) + eps))


@helper
def normalize(row, w, factor, column, count, room):
    """``count`` elements of a row from ``column`` on, normed, to ``room``."""
    values, weight, target = f32s(row + 4 * column), f32s(w + 4 * column), f32s(room)
    for i in range(count):
        target[i] = values[i] * factor * weight[i]


@kernel
def _norms(p, thread, threads):
    """x + norm(h) to ``total`` if there is an h, and the norm of that, or of x, to two targets."""
    w = args(p, 18)
    h, h_stride, weight, x, x_stride, total, total_stride, eps = w[:8]
    weight2, eps2, y, y_stride, block, y2, y2_stride, block2 = w[8:16]
    rows_at, width = w[16], w[17]
    room = workspace(_ROOM)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    for t in range(first, last):
        row = x + t * x_stride
        if h != 0:
            old, new, target = f32s(row), f32s(h + t * h_stride), f32s(total + t * total_stride)
            factor, scale = rms_norm_factor(h + t * h_stride, width, as_f32(eps)), f32s(weight)
            for i in range(width):
                target[i] = old[i] + new[i] * factor * scale[i]
            row = total + t * total_stride
        if y == 0:
            continue
        factor = rms_norm_factor(row, width, as_f32(eps2))
        for column in range(0, width, _BLOCK):
            count = min(_BLOCK, width - column)
            normalize(row, weight2, factor, column, count, room)
            _write_row(room, y + t * y_stride, block, column, count, width)
            if y2 != 0:
                _write_row(room, y2 + t * y2_stride, block2, column, count, width)


def _norms_launch(
    ctx: KernelContext, added: bool, weight2: int, eps2: float, total: Target, targets: list[Target]
) -> Launch:
    words: list[int] = []
    if added:
        words += [ctx.h.address, ctx.h.row_stride, ctx.w.address]
    else:
        words += [0, 0, 0]
    words += [ctx.x.address, ctx.x.row_stride, *total[:2], f32_bits(ctx.attrs["eps"])]
    words += [weight2, f32_bits(eps2)]
    for target in [*targets, _NOWHERE, _NOWHERE][:2]:
        words += target
    meta = ctx.x.meta
    return Launch(_norms, [*words, ctx.live(meta.rows), meta.shape[1]])


def _one_or_two(node: Tensor, options: Options) -> str | None:
    """A finished row goes to two targets at most."""
    return "three forms of one row" if len(node.attrs["dtypes"]) > 2 else None


_FLOATS: dict[str, Any] = {
    "dtypes": dict.fromkeys(("h", "x", "w", "w2", "gate", "up"), "f32"),
    "layout": dict.fromkeys(("h", "x", "gate", "up"), ROWS),
}


@BACKEND.kernel("norm_add_norm", when=_one_or_two, **_FLOATS)
def norm_add_norm(ctx: KernelContext) -> Launch:
    total, *targets = _targets(ctx)
    return _norms_launch(ctx, True, ctx.w2.address, ctx.attrs["eps2"], total, targets)


@BACKEND.kernel("norm_add", **_FLOATS)
def norm_add(ctx: KernelContext) -> Launch:
    return _norms_launch(ctx, True, 0, 0.0, _targets(ctx)[0], [])


@BACKEND.kernel("norm_quantise", when=_one_or_two, **_FLOATS)
def norm_quantise(ctx: KernelContext) -> Launch:
    return _norms_launch(ctx, False, ctx.w.address, ctx.attrs["eps"], _NOWHERE, _targets(ctx))


def _targets(ctx: KernelContext) -> list[Target]:
    """Where the op's own results go."""
    return [(ref.address, ref.row_stride, _block_of(ref.meta)) for ref in ctx.results]


# ----------------------------------------------------------------------------------------- linears


def _unmatched(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight does not meet these activations."""
    assert x is not None and w is not None
    fits = w.dtype.name in FORMATS and x.dtype.name in ("f32", linear.activation_format(w.dtype))
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _all_matched(node: Tensor, options: Options) -> str | None:
    reasons = [_unmatched(x, w) for x, w in zip(node.src[::3], node.src[1::3])]
    return next(filter(None, reasons), None)


@BACKEND.kernel("linears", when=_all_matched, **linear.RULES)
def linears(ctx: KernelContext) -> list[Launch]:
    """One after the other without a meeting in between."""
    found = []
    for i, out in enumerate(ctx.results):
        x, w, bias = ctx.inputs[3 * i : 3 * i + 3]
        assert x is not None and w is not None
        found.append(linear.launch(ctx, x, w, bias, out, overlaps_previous=i > 0))
    return found


@BACKEND.kernel(
    "linear_add",
    dtypes={"r": "f32"},
    when=lambda node, options: _unmatched(*node.src[:2]),
    layout={"x": ROWS, "r": ROWS},
    pack={"w": pack},
)
def linear_add(ctx: KernelContext) -> Launch:
    return linear.launch(ctx, ctx.x, ctx.w, ctx.op("bias"), ctx.out, ctx.r)


# --------------------------------------------------------------------------------------------- glu


@cache
def _glu(act: str, kind: str) -> Kernel:
    activate = activation_function(act, kind)

    @kernel(key=("glu", act, kind))
    def glu(p, thread, threads):
        w = args(p, 15)
        gate, gate_stride, up, up_stride, rows_at, inner, width = w[:7]
        y, y_stride, block, y_line, y2, y2_stride, block2, y2_line = w[7:]
        room = workspace(_ROOM)
        target = f32s(room)
        pieces = (width + _BLOCK - 1) // _BLOCK
        first, last = thread_range(load_i64(rows_at) * inner * pieces, thread, threads)
        for item in range(first, last):
            line, column = item // pieces, item % pieces * _BLOCK
            t, j, count = line // inner, line % inner, min(_BLOCK, width - column)
            at = 4 * (j * width + column)
            a, b = f32s(gate + t * gate_stride + at), f32s(up + t * up_stride + at)
            for i in range(count):
                target[i] = activate(a[i], float32(0)) * b[i]
            _write_row(room, y + t * y_stride + j * y_line, block, column, count, width)
            if y2 != 0:
                _write_row(room, y2 + t * y2_stride + j * y2_line, block2, column, count, width)

    return glu


@BACKEND.kernel("glu", when=_one_or_two, **_FLOATS)
def glu(ctx: KernelContext) -> Launch:
    return _glu_launch(ctx, ctx.gate, ctx.up)


def _glu_launch(ctx: KernelContext, gate: OperandRef, up: OperandRef) -> Launch:
    *between, width = gate.meta.inner
    words = [gate.address, gate.row_stride, up.address, up.row_stride]
    words += [ctx.live(gate.meta.rows), prod(between), width]
    lines = [ref.dtype.row_nbytes(width) for ref in ctx.results]
    for target, line in list(zip([*_targets(ctx), _NOWHERE], [*lines, 0]))[:2]:
        words += [*target, line]
    return Launch(_glu(ctx.attrs["act"], ctx.attrs["kind"]), words)


def _gated_when(node: Tensor, options: Options) -> str | None:
    return _all_matched(node, options) or _one_or_two(node, options)


def _half(node: Tensor) -> Meta:
    """Of what one of the two linears gives."""
    x, w = node.src[:2]
    assert x is not None and w is not None
    return Meta.of((x.meta.rows, w.meta.bound().shape[0]), F32)


@BACKEND.kernel(
    "gated",
    when=_gated_when,
    scratch=lambda node, options: 2 * aligned(_half(node).bound().nbytes),
    **linear.RULES,
)
def gated(ctx: KernelContext) -> list[Launch]:
    """Both linears without a meeting between, then their product."""
    meta = _half(ctx.node)
    found, halves = [], []
    for i in range(2):
        x, w, bias = ctx.inputs[3 * i : 3 * i + 3]
        assert x is not None and w is not None
        half = OperandRef(ctx.scratch + i * aligned(meta.bound().nbytes), meta, ctx.out.operand)
        halves.append(half)
        found.append(linear.launch(ctx, x, w, bias, half, overlaps_previous=i > 0))
    return [*found, _glu_launch(ctx, *halves)]
