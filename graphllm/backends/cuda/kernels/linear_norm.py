"""Linears around the RMS norm of one token, which needs no launch of its own (split_norm.cuh)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ....backends.alignment import aligned
from ....formats import activation_of
from ....formats.activations import A8_32
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ..runtime.device import KernelContext, OperandRef
from ..runtime.work import Launch, Work, ceil
from . import fused_norm, split_norm
from .elementwise import ACTIVATIONS
from .fused_norm import two_at_most
from .gemm import Job
from .linear import Pair, dtype_mismatch, gemv, launches, linear_kernels
from .norm import register_units
from .quantize import quantise
from .split_norm import SplitNorm
from .weight_packing import INTEGERS

_GROUP = 5  # operands of a linear: x, w, r, g, bias
# Least share of the multiprocessors that the thread blocks of the linear before the norm occupy on
# average, one block on each. Estimated: below it, idle multiprocessors cost more than a launch.
_MIN_OCCUPANCY = 0.9


def _pairs(node: Tensor) -> list[Pair]:
    """Weight of each linear, with the activation of the first one."""
    return [(node.src[0], w) for w in node.src[1::_GROUP]]


def _when(node: Tensor, options: Options) -> str | None:
    (x, first), *later = _pairs(node)
    assert first is not None
    width = first.shape[0]
    assert isinstance(width, int)
    if KernelContext.upper_bound(node.meta.rows) > 1 or options.deterministic:
        return "several tokens, or results that must not depend on their number"
    if width % split_norm.ROWS or not register_units(width)[0]:
        return f"rows of {width}"
    weights = [w for _, w in later if w is not None]
    other = next((w.dtype for w in (first, *weights) if w.dtype.name not in INTEGERS), None)
    if other is not None:
        return f"a weight is {other}"
    if node.attrs["dtype"] != A8_32.name or any(activation_of(w.dtype) != A8_32 for w in weights):
        return "a norm in another format than a8_32"
    return dtype_mismatch(x, first, options)


def _gated_when(node: Tensor, options: Options) -> str | None:
    _, (_, gate), (_, up) = _pairs(node)
    assert gate is not None and up is not None
    alike = None if gate.meta == up.meta else "weights of two kinds or shapes"
    return _when(node, options) or two_at_most(node, options) or alike


@dataclass(frozen=True)
class _Room:
    """Addresses in the workspace: the int8 of the norm, its sums of squares, and floats of a gated
    unit whose result is quantized."""

    row: int
    squares: int
    floats: int

    @staticmethod
    def nbytes(node: Tensor) -> tuple[int, int, int]:
        (_, first), (_, gate), *_ = _pairs(node)
        assert first is not None and gate is not None
        width, units = int(first.shape[0]), int(gate.shape[0])  # type: ignore[arg-type]
        floats = 4 * units if "act" in node.attrs else 0
        return (aligned(A8_32.row_nbytes(width)), aligned(4 * width // split_norm.ROWS),
                aligned(floats))  # fmt: skip

    @classmethod
    def of(cls, ctx: KernelContext) -> _Room:
        row, squares, _ = cls.nbytes(ctx.node)
        return cls(ctx.scratch, ctx.scratch + row, ctx.scratch + row + squares)


_RULES: dict[str, Any] = {
    "layout": {"x": ROWS, "r": ROWS},
    "dtypes": {"r": "f32", "bias": "f32", "g": "f32"},
    "scratch": lambda node, options: sum(_Room.nbytes(node)),
}


def _int8(ctx: KernelContext, room: _Room) -> OperandRef:
    """The int8 of the norm in the workspace."""
    h, *_ = ctx.results
    return OperandRef(room.row, Meta.of(h.meta.shape, A8_32), h.operand)


def _jobs(ctx: KernelContext, outs: Sequence[OperandRef], room: _Room) -> tuple[Job, list[Job]]:
    """The linear with the residual, whose result is the step's first, and those of the norm."""
    h, x = ctx.results[0], _int8(ctx, room)
    weights, biases = ctx.inputs[_GROUP + 1 :: _GROUP], ctx.inputs[_GROUP + 4 :: _GROUP]
    later = [Job(x, w, bias, out) for w, bias, out in zip(weights, biases, outs) if w]
    return Job(ctx.x, ctx.w, ctx.op("bias"), h, ctx.r), later


def _launches(
    ctx: KernelContext, first: Job, room: _Room, later: Callable[[SplitNorm | None], list[Work]]
) -> list[Work]:
    """The linear before the norm, and the linears after it: ``later`` of the norm, or of None if
    this has a launch."""
    norm = SplitNorm(ctx.g, room.row, room.squares, float(ctx.attrs["eps"]))
    blocks, processors = ceil(first.rows, split_norm.ROWS), ctx.device.gpu.processors
    if blocks >= _MIN_OCCUPANCY * ceil(blocks, processors) * processors:
        return [gemv(ctx, [first], after=norm), *later(norm)]
    made = _int8(ctx, room)
    return [
        gemv(ctx, [first]),
        fused_norm.norm(ctx, first.out, ctx.g, [made], norm.eps),
        *later(None),
    ]


@linear_kernels("linear_add_norm_linears", _pairs, _when, **_RULES)
def linear_add_norm_linears(ctx: KernelContext) -> list[Work]:
    room = _Room.of(ctx)
    first, jobs = _jobs(ctx, ctx.results[1:], room)
    return _launches(ctx, first, room, lambda norm: launches(ctx, jobs, 0, norm))


@linear_kernels("linear_add_norm_gated", _pairs, _gated_when, **_RULES)
def linear_add_norm_gated(ctx: KernelContext) -> list[Work]:
    room, forms = _Room.of(ctx), ctx.results[1:]
    made, after = forms[0], list[Launch]()
    if ctx.attrs["dtypes"]:
        made = OperandRef(room.floats, Meta.of(made.meta.shape, F32), made.operand)
        after = [quantise(ctx, made.address, made.row_stride, form) for form in forms]
    first, jobs = _jobs(ctx, [made, made], room)
    act = ACTIVATIONS[ctx.attrs["act"], ctx.attrs["kind"]]
    work = _launches(ctx, first, room, lambda norm: [gemv(ctx, jobs, act, before=norm)])
    return [*work, *after]
