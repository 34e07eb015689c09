"""Mixture of experts: products and their weighted sum; and head_linear.

A pair is one token and one of its experts' matrices; each pair has a row of results. With few
pairs, each pair reads the rows of its matrix in a GEMV; many pairs share them, see grouped_experts.
The host never knows which experts were chosen, so grids are made for the largest possible number of
groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....backends.alignment import aligned
from ....formats import ROW_FORMATS, activation_of
from ....graph.dtype import F16, F32, DType, dtype
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, Module, module
from ..runtime.work import Launch, ceil
from .gemm import PLAIN, matmul_dtype, planes_argument
from .gemv_shapes import default_next, default_tile
from .grouped_experts import (
    can_group,
    few_pairs,
    grouped_products,
    groups_nbytes,
    max_pairs,
    pairs_per_token,
    register_modules,
    rows_aligned,
    x_strides,
)  # fmt: skip
from .linear import WARPS, lower_activation
from .quantize import HALVES, dequantise
from .weight_packing import INTEGERS, PACK, QUANTISED, item_elements

_MODULE = module("experts")
_THREADS = 256
_MAX_FLOAT_DEPTH = 1024  # MOST_FLOATS of quantize.cuh
_EXPERTS = ArgumentStruct("experts.cuh", "Experts")
# Fields of some kernels; 0 in others.
_OWN_FIELDS = ("weights", "residual", "quantised_nbytes", "logits", "correction", "chosen",
               "chosen_weights", "score", "normalised", "eps", "factor")  # fmt: skip

# --------------------------------------------------------------------------------------------- sums


@BACKEND.kernel(
    "combine", layout={"y": ROWS, "weights": ROWS}, dtypes={"y": "f32", "weights": "f32"}
)
def combine(ctx: KernelContext) -> Launch:
    return combine_launch(ctx, None)


def combine_launch(ctx: KernelContext, r: OperandRef | None) -> Launch:
    """The launch of combine, which adds ``r`` to the sum."""
    y, weights = ctx.y, ctx.weights
    each, width = y.meta.inner
    args = (
        y.address, y.row_stride, weights.address, weights.row_stride, address(r),
        r.row_stride if r else 0, ctx.out.address, ctx.live_address(y.meta.rows), each, width,
    )  # fmt: skip
    grid = (ctx.upper_bound(y.meta.rows), ceil(width, _THREADS))
    return Launch(_MODULE["combine"], grid, (_THREADS,), args)


# ----------------------------------------------------------------------------------------- kernels


# (rows of a warp, items of each row in flight, RESIDENT) of formats for which `default_tile` is
# slower, by format and gated or not. Weights of gated units can be requested only once the ids are
# known.
_TILES = {
    ("q4_k", True): (2, 1, 6),
    ("q4_k", False): (4, 1, 0),
    ("q6_k", False): (4, 1, 0),
    ("mxfp4", True): (4, 1, 6),
    ("mxfp4", False): (3, 1, 0),
}
# Likewise, for products that quantize their rows: few blocks, of which most run at once.
_FLOAT_TILES = {"q4_k": (8, 1, 4), "q6_k": (4, 1, 5)}
# Likewise, for products whose blocks add up the results of all pairs, by format and whether they
# quantize their rows. Rows of q6_k spill registers, and fewer of them are slower.
_SUMMED_TILES = {("q4_k", True): (8, 1, 2), ("q6_k", True): (8, 1, 2), ("mxfp4", False): (4, 1, 0)}
MOST_SUMMED = 8  # pairs of a token, see experts.cuh


def tile(
    name: str, integer: bool, gated: bool, floats: bool = False, summed: bool = False
) -> tuple[int, int, int]:
    """(rows of a warp, items of each row in flight, blocks of a multiprocessor)."""
    default = (*default_tile(name, integer, 1, gated), 0)
    if summed and (name, floats) in _SUMMED_TILES:
        return _SUMMED_TILES[name, floats]
    if floats and name in _FLOAT_TILES:
        return _FLOAT_TILES[name]
    return _TILES.get((name, gated), default) if integer else default


def gemv_module(
    name: str, integer: bool, halves: int = 0, gated: bool = False, floats: bool = False,
    summed: bool = False, choice: int = 0,
) -> Module:  # fmt: skip
    """experts_gemv.cu for a format; the file describes the macros."""
    rows, depth, resident = tile(name, integer, gated, floats, summed)
    return module(
        "experts_gemv", FORMAT=name.upper(), INTEGER=int(integer), HALVES=halves, ROWS=rows,
        DEPTH=depth, NEXT=default_next(name), GATED=int(gated), RESIDENT=resident,
        FLOATS=int(floats), SUMMED=int(summed), CHOICE=choice,
    )  # fmt: skip


def _unaligned_kernel(name: str) -> Function:
    return module("experts_unaligned", FORMAT=PLAIN.index(name))["multiply"]


@dataclass(frozen=True)
class Gate:
    """The second matrix of a gated unit.

    Attributes:
        w, bias: its weight and bias.
        form: dtype of the result: float32, f16 or bf16.
        act: activation as in experts.cuh, with its parameters ``alpha`` and ``limit``.
    """

    w: OperandRef
    bias: OperandRef | None
    form: DType
    act: int
    alpha: float = 0.0
    limit: float = 0.0


def experts_argument(
    ctx: KernelContext, ids: OperandRef | None, bias: OperandRef | None, y: int,
    gate: Gate | None = None, *, each: int = 0, ids_ready: bool | None = None, **more: Any,
) -> bytes:  # fmt: skip
    """The argument of every kernel of products.

    Args:
        ctx: the step, whose ``x`` and ``w`` are multiplied.
        ids, bias, gate: see `expert_products`.
        y: address of the result.
        each: pairs of a token; 0: those that the node's ids have.
        ids_ready: see experts.cuh; None: whether the step may read its ids before it waits.
        **more: other fields of the struct; 0 if they are not given.
    """
    x, w = ctx.x, ctx.w
    matrices, rows, depth = w.meta.shape
    x_stride, line = x_strides(x.meta)
    own = dict.fromkeys(_OWN_FIELDS, 0) | more
    if ids_ready is None:
        ids_ready = ids is not None and ctx.readable_before_wait("ids")
    return _EXPERTS.pack(
        x=x.address, x_stride=x_stride, line=line, w=planes_argument(w),
        up=planes_argument(gate.w if gate else None), bias=address(bias),
        up_bias=address(gate.bias) if gate else 0, y=y, ids=address(ids),
        ids_stride=ids.row_stride if ids else 0, live=ctx.live_address(x.meta.rows),
        each=each or pairs_per_token(ctx.node), matrices=matrices, rows=rows, depth=depth,
        kind=HALVES.get(x.dtype.name, 0), form=HALVES.get(gate.form.name, 0) if gate else 0,
        act=gate.act if gate else 0, alpha=gate.alpha if gate else 0.0,
        limit=gate.limit if gate else 0.0,
        ids_ready=ids_ready, **own,
    )  # fmt: skip


def _gemv(ctx: KernelContext, arg: bytes, ids: OperandRef | None, gate: Gate | None) -> Launch:
    """One GEMV for each pair."""
    x, name, pairs = ctx.x, ctx.w.dtype.name, max_pairs(ctx.node)
    gated, threads = gate is not None, (32 * WARPS,)
    _, n, depth = ctx.w.meta.shape
    halves = HALVES.get(x.dtype.name, 0)
    if name in PLAIN and (depth % item_elements(dtype(name)) or not rows_aligned(x, 16)):
        grid = (pairs, ceil(n, WARPS))
        return Launch(_unaligned_kernel(name), grid, threads, (arg,), triggers_after_wait=True)
    floats = quantises_itself(x.meta, ctx.w.meta, ctx.device.options)
    integer = x.dtype.quantised or floats
    rows, *_ = tile(name, integer, gated, floats)
    kernel = gemv_module(name, integer, halves, gated, floats)[
        "unaligned" if x.dtype.quantised and not rows_aligned(x, 16) else "aligned"
    ]
    quantised = activation_of(dtype(name)) if floats else None
    return Launch(
        kernel, (pairs, ceil(n, WARPS * rows)), threads, (arg,),
        quantised.row_nbytes(depth) if quantised else 0,
        triggers_after_wait=ids is not None, prefetches=[ctx.w, *([gate.w] if gate else [])],
    )  # fmt: skip


def no_summed_gemv(node: Tensor, options: Options) -> str | None:
    """Why `summed_gemv` does not support a node; None if it does."""
    x, w = node.sources[:2]
    if KernelContext.upper_bound(x.meta.rows) > 1 or options.deterministic:
        return "several tokens"
    if pairs_per_token(node) > MOST_SUMMED:
        return f"more than {MOST_SUMMED} experts of a token"
    if quantises_itself(x.meta, w.meta, options):
        return None
    if not x.dtype.quantised or x.dtype.block != 32 or not floats_aligned(x.meta):
        return "x is not quantised in blocks of 32, or not aligned to 16 bytes"
    return dtype_mismatch(node, options)


def summed_gemv(
    ctx: KernelContext, ids: OperandRef, weights: OperandRef, bias: OperandRef | None, each: int,
    ids_ready: bool | None = None,
) -> Launch:  # fmt: skip
    """Products of one token's pairs in one launch, with their weighted sum and the residual ``r``.

    The arguments are those of `experts_argument`.
    """
    name, (_, n, depth) = ctx.w.dtype.name, ctx.w.meta.shape
    floats = not ctx.x.dtype.quantised
    rows, *_ = tile(name, True, False, floats, True)
    form = activation_of(dtype(name)) if floats else None
    nbytes = aligned(form.row_nbytes(depth)) if form else 0
    arg = experts_argument(
        ctx, ids, bias, ctx.out.address, each=each, ids_ready=ids_ready, weights=weights.address,
        residual=ctx.r.address, quantised_nbytes=nbytes,
    )  # fmt: skip
    return Launch(
        gemv_module(name, True, floats=floats, summed=True)["aligned"],
        (1, ceil(n, rows)), (32 * each,), (arg,), each * nbytes, triggers_after_wait=True,
        prefetches=[ctx.w],
    )  # fmt: skip


# ------------------------------------------------------------------------------------ registration


def expert_products(
    ctx: KernelContext,
    ids: OperandRef | None,
    bias: OperandRef | None,
    y: int,
    gate: Gate | None = None,
) -> list[Launch]:
    """Products of each pair with its matrix of ``ctx.w``, or gated units.

    Args:
        ctx: the step.
        ids: experts of each token; None: pair j of a token has matrix j.
        bias: bias of each matrix.
        y: address of the result.
        gate: the second matrix of a gated unit.

    Quantised activations of row formats become floats in the workspace, after the groups.
    """
    if ctx.x.dtype.quantised and ctx.w.dtype.name in ROW_FORMATS:
        room = ctx.scratch + aligned(groups_nbytes(ctx.node, ctx.device.options))
        kind = _float_dtype(ctx.node, ctx.device.options)
        before, x = dequantise(ctx, ctx.x, room, kind)
        return [before, *expert_products(ctx.with_operand("x", x), ids, bias, y, gate)]
    arg = experts_argument(ctx, ids, bias, y, gate)
    if ctx.x.dtype.name in HALVES and can_group(ctx):
        return grouped_products(ctx, arg, ids, gate is not None)
    return [_gemv(ctx, arg, ids, gate)]


def _float_dtype(node: Tensor, options: Options) -> DType:
    """Dtype in which quantised activations of row formats are multiplied."""
    return F32 if few_pairs(node, options) else F16


def workspace_nbytes(node: Tensor, options: Options) -> int:
    """Bytes of workspace of `expert_products`."""
    groups, (x, w) = groups_nbytes(node, options), node.sources[:2]
    if not x.dtype.quantised or w.dtype.name not in ROW_FORMATS:
        return groups
    floats = Meta.of(x.shape, _float_dtype(node, options)).bound()
    return aligned(groups) + aligned(floats.nbytes)


def floats_aligned(x: Meta) -> bool:
    """Whether all rows are aligned to 16 bytes."""
    return not any(at % 16 for at in (x.offset, *x.strides[:-1]))


def dtype_mismatch(node: Tensor, options: Options) -> str | None:
    """Why the weight does not match the activation as `_lower` leaves it; None if it does."""
    x, w = node.sources[:2]
    if x.dtype == F32:
        return None
    fits = x.dtype == matmul_dtype(w.dtype)
    if x.dtype.quantised:
        fits = w.dtype.name in QUANTISED and x.dtype == activation_of(w.dtype)
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def quantises_itself(x: Meta, w: Meta, options: Options) -> bool:
    """Whether the GEMV quantizes float32 rows of its own for each pair of one token.

    Each block quantizes the row of its pair, which is faster than a launch for all rows.
    """
    alone = KernelContext.upper_bound(x.rows) == 1 and not options.deterministic
    wanted = options.linear != "float" and w.dtype.name in INTEGERS
    fits = len(x.shape) == 3 and int(w.shape[-1]) <= _MAX_FLOAT_DEPTH  # type: ignore[arg-type]
    return x.dtype == F32 and wanted and alone and fits and floats_aligned(x)


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    assert x is not None and w is not None
    if quantises_itself(x.meta, w.meta, options):
        return node.src
    own = w.dtype.name in ROW_FORMATS and options.linear != "float"
    few = own or few_pairs(node, options)
    return (lower_activation(x, w, few, options), w, *rest)


_RULES: dict[str, Any] = {
    "layout": {"x": ROWS, "ids": ROWS},
    "when": dtype_mismatch,
    "lower": _lower,
}
_BLOCKS: dict[str, Any] = {"pack": {"w": PACK}, **_RULES}


@BACKEND.kernel(
    "expert_linear", name="experts_plain", dtypes={"w": PLAIN, "bias": "f32"},
    scratch=groups_nbytes, **_RULES,
)  # fmt: skip
@BACKEND.kernel(
    "expert_linear", name="experts_blocks", dtypes={"w": QUANTISED, "bias": "f32"},
    scratch=workspace_nbytes, **_BLOCKS,
)  # fmt: skip
def expert_linear(ctx: KernelContext) -> list[Launch]:
    return expert_products(ctx, ctx.ids, ctx.op("bias"), ctx.out.address)


def _lower_heads(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    if node.sources[1].dtype.name in ROW_FORMATS:  # see the op
        options = replace(options, linear="float")
    return _lower(node, options)


@BACKEND.kernel("head_linear", name="heads_plain", dtypes={"w": PLAIN}, **_RULES)
@BACKEND.kernel(
    "head_linear", name="heads_blocks", dtypes={"w": QUANTISED}, scratch=workspace_nbytes,
    **_BLOCKS | {"lower": _lower_heads},
)  # fmt: skip
def head_linear(ctx: KernelContext) -> list[Launch]:
    return expert_products(ctx, None, None, ctx.out.address)


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for gated in (False, True):
        for name in INTEGERS:
            gemv_module(name, True, 0, gated)
            if not gated:
                gemv_module(name, True, floats=True)
                gemv_module(name, True, floats=True, summed=True)
                if dtype(name).block == 32:  # see no_summed_gemv
                    gemv_module(name, True, summed=True)
        for name in QUANTISED:
            gemv_module(name, False, 0, gated)
            gemv_module(name, False, HALVES["f16"], gated)
        for name in PLAIN:
            for halves in {0, HALVES.get(name, 0)}:
                gemv_module(name, False, halves, gated)
    for name in PLAIN:
        _unaligned_kernel(name)
    register_modules()


_all_instances()
