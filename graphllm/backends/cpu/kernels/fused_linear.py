"""Kernels of the ops fused with linear and norms; see `graphllm.ops.fused.linear`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod, sqrt
from typing import Any, NamedTuple

from ....backends.alignment import aligned
from ....formats import activation_of
from ....graph.dtype import DTYPES, F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32s, helper, kernel, load_i64
from ..runtime.lazy_numba import float32
from . import linear, quantize_rows
from .elementwise import activation_function, thread_range
from .linear_microkernels import workspace
from .quantize import quantise_block
from .weight_packing import pack

_COLUMNS = 256  # columns that are computed at a time: whole blocks of activations
_STACK_BYTES = 4 * _COLUMNS

# ---------------------------------------------------------------------------------- result formats


class Target(NamedTuple):
    """Where result rows are written, and whether they are quantised. A kernel has two of them."""

    address: int  # 0: this target is not used
    stride: int
    block: int  # block of the quantised activations, 0: rows stay float32


_UNUSED = Target(0, 0, 0)


def _one_or_two(node: Tensor, options: Options) -> str | None:
    """Rule of kernels that write each row to at most two targets."""
    kinds = [DTYPES[name] for name in node.attrs["dtypes"]]
    if len(kinds) > 2:
        return "a row has more than two result formats"
    by_rows = [kind in quantize_rows.BY_ROWS for kind in kinds if kind != F32]
    return "results are quantised by rows and by blocks" if len(set(by_rows)) > 1 else None


def _float_bytes(node: Tensor, options: Options) -> int:
    """Bytes of scratch for float rows that are quantised as a whole; 0 if they are a result."""
    names = node.attrs["dtypes"]
    if "f32" in names or not any(DTYPES[name] in quantize_rows.BY_ROWS for name in names):
        return 0
    assert node.src[0] is not None
    return _float_rows(node.src[0].meta).bound().nbytes


def _float_rows(meta: Meta) -> Meta:
    return Meta.of(meta.shape, F32)


def _targets(
    ctx: KernelContext, refs: Sequence[OperandRef], like: Meta, scratch: int, same_rows: bool
) -> tuple[list[Target], list[Launch]]:
    """Return targets for results, and launches that quantise rows as a whole after the kernel.

    Args:
        ctx: context of the step.
        refs: results, of the shape of ``like``.
        like: Meta of the float rows.
        scratch: address of `_float_bytes`.
        same_rows: whether each thread of the kernel writes the rows that it quantises afterwards.
    """
    by_rows = [ref for ref in refs if ref.dtype in quantize_rows.BY_ROWS]
    if not by_rows:
        blocks = (0 if ref.dtype == F32 else ref.dtype.block for ref in refs)
        return [Target(ref.address, ref.row_stride, b) for ref, b in zip(refs, blocks)], []
    floats = next((ref for ref in refs if ref.dtype == F32), None)
    meta, live = _float_rows(like), ctx.live(like.rows)
    at, stride = (
        floats.address if floats else scratch,
        floats.row_stride if floats else meta.strides[0],
    )
    launches = [
        quantize_rows.launch(
            meta, at, stride, live, ref.address, ref.row_stride, ref.dtype, same_rows
        )
        for ref in by_rows
    ]
    return [Target(at, stride, 0)], launches


@helper
def _write_row(values, y, block, column, count, width):
    """Write ``count`` values from ``column`` on to a row at ``y``, quantised in blocks if not 0."""
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
    """The factor by which a root-mean-square norm scales a row."""
    values, total = f32s(row), float32(0)
    for i in range(width):
        total += values[i] * values[i]
    return float32(1) / float32(sqrt(total / float32(width) + eps))


@helper
def normalize(row, w, factor, column, count, out):
    """Write ``count`` normed elements of a row, from ``column`` on, to ``out``."""
    values, weight, target = f32s(row + 4 * column), f32s(w + 4 * column), f32s(out)
    for i in range(count):
        target[i] = values[i] * factor * weight[i]


class NormsArgs(NamedTuple):
    """Argument block of norm_add_norm, norm_add and norm_quantise."""

    h: int  # 0: nothing is added to x
    h_stride: int
    weight: int  # of the norm of h
    eps: float
    x: int
    x_stride: int
    total: int  # x + norm(h)
    total_stride: int
    rows: int  # address of the live count
    width: int
    weight2: int  # of the norm of the total, or of x
    eps2: float
    y: int  # 0: there is no second norm
    y_stride: int
    y_block: int  # see `Target`
    y2: int  # 0: one target
    y2_stride: int
    y2_block: int


_read_norms = argument_reader(NormsArgs)


@kernel
def _norms(p, thread, threads):
    """Write x + norm(h) to ``total`` if there is an h, and the norm of that or of x to targets."""
    a = _read_norms(p)
    width, values = a.width, workspace(_STACK_BYTES)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for t in range(first, last):
        row = a.x + t * a.x_stride
        if a.h != 0:
            h, total = a.h + t * a.h_stride, a.total + t * a.total_stride
            old, new, target = f32s(row), f32s(h), f32s(total)
            factor, scale = rms_norm_factor(h, width, a.eps), f32s(a.weight)
            for i in range(width):
                target[i] = old[i] + new[i] * factor * scale[i]
            row = total
        if a.y == 0:
            continue
        factor = rms_norm_factor(row, width, a.eps2)
        for column in range(0, width, _COLUMNS):
            count = min(_COLUMNS, width - column)
            normalize(row, a.weight2, factor, column, count, values)
            _write_row(values, a.y + t * a.y_stride, a.y_block, column, count, width)
            if a.y2 != 0:
                _write_row(values, a.y2 + t * a.y2_stride, a.y2_block, column, count, width)


def _norms_launch(
    ctx: KernelContext,
    weight2: int,
    eps2: float,
    refs: Sequence[OperandRef],
    total: OperandRef | None = None,
) -> list[Launch]:
    """Launch the kernel, which writes the norm to ``refs``; ``total`` gets x + norm(h)."""
    x = ctx.x
    targets, quantising = _targets(ctx, refs, x.meta, ctx.scratch, same_rows=True)
    y, y2 = [*targets, _UNUSED, _UNUSED][:2]
    block = NormsArgs(
        h=ctx.h.address if total else 0,
        h_stride=ctx.h.row_stride if total else 0,
        weight=ctx.w.address if total else 0,
        eps=ctx.attrs["eps"],
        x=x.address,
        x_stride=x.row_stride,
        total=total.address if total else 0,
        total_stride=total.row_stride if total else 0,
        rows=ctx.live(x.meta.rows),
        width=x.meta.shape[1],
        weight2=weight2,
        eps2=eps2,
        y=y.address,
        y_stride=y.stride,
        y_block=y.block,
        y2=y2.address,
        y2_stride=y2.stride,
        y2_block=y2.block,
    )
    return [Launch(_norms, block), *quantising]


_FLOATS: dict[str, Any] = {
    "dtypes": dict.fromkeys(("h", "x", "w", "w2", "gate", "up"), "f32"),
    "layout": dict.fromkeys(("h", "x", "gate", "up"), ROWS),
}


@BACKEND.kernel("norm_add_norm", when=_one_or_two, scratch=_float_bytes, **_FLOATS)
def norm_add_norm(ctx: KernelContext) -> list[Launch]:
    total, *refs = ctx.results
    return _norms_launch(ctx, ctx.w2.address, ctx.attrs["eps2"], refs, total)


@BACKEND.kernel("norm_add", **_FLOATS)
def norm_add(ctx: KernelContext) -> list[Launch]:
    return _norms_launch(ctx, 0, 0.0, [], ctx.results[0])


@BACKEND.kernel("norm_quantise", when=_one_or_two, scratch=_float_bytes, **_FLOATS)
def norm_quantise(ctx: KernelContext) -> list[Launch]:
    return _norms_launch(ctx, ctx.w.address, ctx.attrs["eps"], ctx.results)


# ----------------------------------------------------------------------------------------- linears


def _unmatched(x: Tensor | None, w: Tensor | None) -> str | None:
    """Why the weight cannot be multiplied with these activations."""
    assert x is not None and w is not None
    fits = w.dtype.name in FORMATS and (
        x.dtype == F32 or (w.dtype.quantised and x.dtype == activation_of(w.dtype))
    )
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _all_matched(node: Tensor, options: Options) -> str | None:
    reasons = [_unmatched(x, w) for x, w in zip(node.src[::3], node.src[1::3])]
    return next(filter(None, reasons), None)


@BACKEND.kernel("linears", when=_all_matched, **linear.RULES)
def linears(ctx: KernelContext) -> list[Launch]:
    """Launch one linear after the other, without barriers between them."""
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


class GluArgs(NamedTuple):
    """Argument block of `glu`: gate and up [rows, inner, width]."""

    gate: int
    gate_stride: int
    up: int
    up_stride: int
    rows: int  # address of the live length of axis 0
    inner: int
    width: int
    y: int
    y_stride: int
    y_block: int  # see `Target`
    y_line: int  # bytes from line to line in a row of y
    y2: int  # 0: one target
    y2_stride: int
    y2_block: int
    y2_line: int


_read_glu = argument_reader(GluArgs)


@cache
def _glu(act: str, kind: str) -> Kernel:
    activate = activation_function(act, kind)

    @kernel(key=("glu", act, kind))
    def glu(p, thread, threads):
        w = _read_glu(p)
        inner, width, values = w.inner, w.width, workspace(_STACK_BYTES)
        target = f32s(values)
        chunks = (width + _COLUMNS - 1) // _COLUMNS
        first, last = thread_range(load_i64(w.rows) * inner * chunks, thread, threads)
        for item in range(first, last):
            line, column = item // chunks, item % chunks * _COLUMNS
            t, j, count = line // inner, line % inner, min(_COLUMNS, width - column)
            at = 4 * (j * width + column)
            gate, up = f32s(w.gate + t * w.gate_stride + at), f32s(w.up + t * w.up_stride + at)
            for i in range(count):
                target[i] = activate(gate[i], float32(0)) * up[i]
            y = w.y + t * w.y_stride + j * w.y_line
            _write_row(values, y, w.y_block, column, count, width)
            if w.y2 != 0:
                y2 = w.y2 + t * w.y2_stride + j * w.y2_line
                _write_row(values, y2, w.y2_block, column, count, width)

    return glu


@BACKEND.kernel("glu", when=_one_or_two, scratch=_float_bytes, **_FLOATS)
def glu(ctx: KernelContext) -> list[Launch]:
    return _glu_launch(ctx, ctx.gate, ctx.up, ctx.scratch)


def _glu_launch(ctx: KernelContext, gate: OperandRef, up: OperandRef, scratch: int) -> list[Launch]:
    """Launch the product of act(gate) and up; ``scratch``: see `_targets`."""
    *between, width = gate.meta.inner
    targets, quantising = _targets(ctx, ctx.results, gate.meta, scratch, same_rows=False)
    y, y2 = [*targets, _UNUSED][:2]
    lines = [4 * width if quantising else ref.dtype.row_nbytes(width) for ref in ctx.results]
    block = GluArgs(
        gate=gate.address,
        gate_stride=gate.row_stride,
        up=up.address,
        up_stride=up.row_stride,
        rows=ctx.live(gate.meta.rows),
        inner=prod(between),
        width=width,
        y=y.address,
        y_stride=y.stride,
        y_block=y.block,
        y_line=lines[0],
        y2=y2.address,
        y2_stride=y2.stride,
        y2_block=y2.block,
        y2_line=lines[-1],
    )
    return [Launch(_glu(ctx.attrs["act"], ctx.attrs["kind"]), block), *quantising]


def _gated_when(node: Tensor, options: Options) -> str | None:
    return _all_matched(node, options) or _one_or_two(node, options)


def _half(node: Tensor) -> Meta:
    """Meta of the result of one of the two linears."""
    x, w = node.src[:2]
    assert x is not None and w is not None
    return Meta.of((x.meta.rows, w.meta.bound().shape[0]), F32)


@BACKEND.kernel(
    "gated",
    when=_gated_when,
    scratch=lambda node, options: 3 * aligned(_half(node).bound().nbytes),
    **linear.RULES,
)
def gated(ctx: KernelContext) -> list[Launch]:
    """Launch both linears without a barrier between them, then their gated product."""
    meta = _half(ctx.node)
    found, halves, nbytes = [], [], aligned(meta.bound().nbytes)
    for i in range(2):
        x, w, bias = ctx.inputs[3 * i : 3 * i + 3]
        assert x is not None and w is not None
        half = OperandRef(ctx.scratch + i * nbytes, meta, ctx.out.operand)
        halves.append(half)
        found.append(linear.launch(ctx, x, w, bias, half, overlaps_previous=i > 0))
    return [*found, *_glu_launch(ctx, halves[0], halves[1], ctx.scratch + 2 * nbytes)]
