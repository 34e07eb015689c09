"""Mixture of experts: routing, expert products and their weighted sum; and head_linear.

A pair is one token and one of its experts' matrices; each pair has a row of results. With few
pairs, each pair reads the rows of its matrix in a GEMV. Many pairs are sorted by matrix on the
device and multiplied in groups, as f16 or bf16. The host never knows which experts were chosen, so
grids are made for the largest possible number of groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

from ....backends.alignment import aligned
from ....graph.dtype import BF16, F32, I32, DType, dtype
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
from .linear import WARPS, activation, lower_activation
from .matrices import has_tensor_cores
from .quantize import HALVES
from .weight_packing import PACK, PLANES, item_elements

_MODULE = module("experts")
_THREADS = 256
_EXPERTS = ArgumentStruct("experts.cuh", "Experts")
_GROUP = ArgumentStruct("experts.cuh", "Group")
_MAX_PAIRS_PER_MATRIX = 2  # pairs of a matrix, on average, up to which each pair has its own GEMV
_TILE_ROWS, _TILE_DEPTH = 128, 64  # of a block of experts_gemm.cu
# Largest pairs of a group; average pairs of a matrix up to which the smaller size is used.
_GROUP_SIZES, _SMALL_GROUP_LOAD = (32, 128), 24
_COUNTERS = 8192  # in shared memory, of the kernel `group`

# ----------------------------------------------------------------------------------------- routing


@BACKEND.kernel("top_k", layout={"x": ROWS}, dtypes={"x": "f32", "bias": "f32"})
def top_k(ctx: KernelContext) -> Launch:
    x, a = ctx.x, ctx.attrs
    args = (x.address, x.row_stride, ctx.address("bias"), ctx.out.address,
            ctx.live_address(x.meta.rows), x.width, a["k"], a["groups"], a["top_groups"],
            a["top_per_group"])  # fmt: skip
    warps = min(8, a["groups"])
    shared = 4 * (x.width + a["groups"])
    return Launch(_MODULE["top_k"], (ctx.upper_bound(x.meta.rows),), (32 * warps,), args, shared)


@BACKEND.kernel("pick", layout={"x": ROWS}, dtypes={"x": "f32"})
def pick(ctx: KernelContext) -> Launch:
    x, ids = ctx.x, ctx.ids
    args = (x.address, x.row_stride, ids.address, ctx.out.address, ctx.live_address(x.meta.rows),
            x.width, ids.width)  # fmt: skip
    grid = (ceil(ctx.upper_bound(x.meta.rows) * ids.width, _THREADS),)
    return Launch(_MODULE["pick"], grid, (_THREADS,), args)


@BACKEND.kernel("sum_norm", layout={"x": ROWS}, dtypes={"x": "f32"})
def sum_norm(ctx: KernelContext) -> Launch:
    x = ctx.x
    args = (x.address, x.row_stride, ctx.out.address, ctx.live_address(x.meta.rows), x.width,
            float(ctx.attrs["eps"]))  # fmt: skip
    return Launch(_MODULE["sum_norm"], (ceil(ctx.upper_bound(x.meta.rows), 4),), (128,), args)


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


# ------------------------------------------------------------------------------------------ sizes


def _pairs_per_token(node: Tensor) -> int:
    """Pairs of a token."""
    ids = next((s for s in node.sources if s.dtype == I32), node)
    return int(ids.meta.inner[0])


def _max_pairs(node: Tensor) -> int:
    """Pairs of a step, at most."""
    return KernelContext.upper_bound(node.meta.rows) * _pairs_per_token(node)


def _matrix_count(node: Tensor) -> int:
    return int(node.sources[1].shape[0])  # type: ignore[arg-type]


def _few_pairs(node: Tensor, options: Options) -> bool:
    few = _max_pairs(node) <= _MAX_PAIRS_PER_MATRIX * _matrix_count(node)
    return few and not options.deterministic


def _group_size(node: Tensor, options: Options) -> int:
    """Pairs of a group, at most."""
    many = _max_pairs(node) > _SMALL_GROUP_LOAD * _matrix_count(node)
    return _GROUP_SIZES[many and not options.deterministic]


def _max_groups(node: Tensor, options: Options) -> int:
    """Largest possible number of groups: one of each matrix may be incomplete.

    Pairs whose id is out of range count as one more matrix.
    """
    pairs = _max_pairs(node)
    return pairs // _group_size(node, options) + min(pairs, _matrix_count(node) + 1)


def groups_nbytes(node: Tensor, options: Options) -> int:
    """Bytes of the groups, and of the pairs sorted by matrix."""
    if node.sources[0].dtype.name not in HALVES:
        return 0
    return aligned(_GROUP.size * _max_groups(node, options)) + 4 * _max_pairs(node)


# ----------------------------------------------------------------------------------------- kernels


# (rows of a warp, items of each row in flight, RESIDENT) of formats for which `default_tile` is
# slower, by format and gated or not. Weights of gated units can be requested only once the ids are
# known.
_TILES = {
    ("q4_k", True): (2, 1, 6),
    ("q4_k", False): (4, 1, 0),
    ("q6_k", False): (4, 1, 0),
    ("mxfp4", False): (3, 1, 0),
}


def _tile(name: str, integer: bool, gated: bool) -> tuple[int, int, int]:
    """(rows of a warp, items of each row in flight, blocks of a multiprocessor)."""
    default = (*default_tile(name, integer, 1, gated), 0)
    return _TILES.get((name, gated), default) if integer else default


def _gemv_module(name: str, integer: bool, halves: int = 0, gated: bool = False) -> Module:
    rows, depth, resident = _tile(name, integer, gated)
    return module(
        "experts_gemv", FORMAT=name.upper(), INTEGER=int(integer), HALVES=halves, ROWS=rows,
        DEPTH=depth, NEXT=default_next(name), GATED=int(gated), RESIDENT=resident,
    )  # fmt: skip


def _unaligned_kernel(name: str) -> Function:
    return module("experts_unaligned", FORMAT=PLAIN.index(name))["multiply"]


def _gemm_module(kind: DType, size: int, gated: bool = False, groups: bool = False) -> Module:
    """experts_gemm.cu for a format. ``groups``: use warpgroup instructions of capability 9.0."""
    plain = kind.name in PLAIN
    return module(
        "experts_gemm", FORMAT=kind.name.upper(), PLAIN=int(plain), BFLOAT=int(kind == BF16),
        TOKENS=size, GATED=int(gated), WARPS=_gemm_warps(size, groups),
        STAGES=_stages(size, plain, groups), WGMMA=int(groups),
    )  # fmt: skip


def _has_wgmma_kernel(kind: DType, size: int) -> bool:
    """Whether a wgmma kernel exists: items of some formats leave too few registers for it."""
    return size >= 64 and item_elements(kind) < 64


def _gemm_warps(size: int, groups: bool) -> int:
    """Warps of a block.

    Large tiles per warp reuse operands most; small groups need more warps for enough loads in
    flight.
    """
    return 8 if size < 64 or groups else 4


def _stages(size: int, plain: bool, groups: bool) -> int:
    """Stages of the depth in shared memory.

    Two blocks must fit on a multiprocessor, and more stages gain nothing.
    """
    return 4 if size < 64 else 3 if plain or groups else 2


def _x_strides(x: Meta) -> list[int]:
    """Bytes between tokens, and between the rows of a token (0 if it has one row)."""
    return [x.strides[0], x.strides[1] if x.ndim == 3 else 0]


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


def _argument(
    ctx: KernelContext, ids: OperandRef | None, bias: OperandRef | None, y: int, gate: Gate | None
) -> bytes:
    """The argument of every kernel of products; ``y``: address of the result."""
    x, w = ctx.x, ctx.w
    matrices, rows, depth = w.meta.shape
    x_stride, line = _x_strides(x.meta)
    return _EXPERTS.pack(
        x=x.address, x_stride=x_stride, line=line, w=planes_argument(w),
        up=planes_argument(gate.w if gate else None), bias=address(bias),
        up_bias=address(gate.bias) if gate else 0, y=y, ids=address(ids),
        ids_stride=ids.row_stride if ids else 0, live=ctx.live_address(x.meta.rows),
        each=_pairs_per_token(ctx.node), matrices=matrices, rows=rows, depth=depth,
        kind=HALVES.get(x.dtype.name, 0), form=HALVES.get(gate.form.name, 0) if gate else 0,
        act=gate.act if gate else 0, alpha=gate.alpha if gate else 0.0,
        limit=gate.limit if gate else 0.0,
        ids_ready=ids is not None and ctx.readable_before_wait("ids"),
    )  # fmt: skip


def _rows_aligned(x: OperandRef, by: int) -> bool:
    """Whether all rows are aligned to ``by`` bytes."""
    lone = KernelContext.upper_bound(x.meta.rows) <= 1
    return all(at % by == 0 for at in (x.address, *_x_strides(x.meta)[int(lone) :]))


def _gemv(ctx: KernelContext, arg: bytes, ids: OperandRef | None, gate: Gate | None) -> Launch:
    """One GEMV for each pair."""
    x, name, pairs = ctx.x, ctx.w.dtype.name, _max_pairs(ctx.node)
    gated, threads = gate is not None, (32 * WARPS,)
    _, n, depth = ctx.w.meta.shape
    halves = HALVES.get(x.dtype.name, 0)
    if name in PLAIN and (depth % item_elements(dtype(name)) or not _rows_aligned(x, 16)):
        grid = (pairs, ceil(n, WARPS))
        return Launch(_unaligned_kernel(name), grid, threads, (arg,), triggers_after_wait=True)
    integer = x.dtype.quantised
    rows, *_ = _tile(name, integer, gated)
    kernel = _gemv_module(name, integer, halves, gated)[
        "unaligned" if integer and not _rows_aligned(x, 16) else "aligned"
    ]
    return Launch(
        kernel, (pairs, ceil(n, WARPS * rows)), threads, (arg,),
        triggers_after_wait=ids is not None, prefetches=[ctx.w, *([gate.w] if gate else [])],
    )  # fmt: skip


def _grouped_gemm(
    ctx: KernelContext, arg: bytes, ids: OperandRef | None, gated: bool
) -> list[Launch]:
    """Products of groups of pairs with one matrix each."""
    node, options, live = ctx.node, ctx.device.options, ctx.live_address(ctx.x.meta.rows)
    size, most = _group_size(node, options), _max_groups(node, options)
    matrices, n, _ = ctx.w.meta.shape
    order = ctx.scratch + aligned(_GROUP.size * most)
    grouped = _has_wgmma_kernel(ctx.w.dtype, size) and ctx.device.gpu.capability == (9, 0)
    kernel = _gemm_module(ctx.w.dtype, size, gated, grouped)["multiply_groups"]
    work = []
    if ids is not None:
        count = most
        warps = min(32, _COUNTERS // (matrices + 1) - 1)
        args = (ids.address, ids.row_stride, live, _pairs_per_token(node), matrices, size,
                ctx.scratch, count, order)  # fmt: skip
        shared = 4 * (warps + 1) * (matrices + 1)
        work = [Launch(_MODULE["group"], (1,), (32 * warps,), args, shared)]
        places = (arg, ctx.scratch, order)
    else:
        count = matrices * ceil(ctx.upper_bound(ctx.x.meta.rows), size)
        places = (arg, 0, 0)
    grid = (count, ceil(n, _TILE_ROWS // (1 + gated)))
    plain = ctx.w.dtype.name in PLAIN
    threads = (32 * _gemm_warps(size, grouped),)
    shared = _shared_nbytes(size, plain, grouped)
    return [*work, Launch(kernel, grid, threads, places, shared, triggers_after_wait=True)]


def _shared_nbytes(size: int, plain: bool, groups: bool) -> int:
    """Bytes of the struct Shared of experts_gemm.cu, and of the padding in front of it."""
    stages = _stages(size, plain, groups)
    lines = _TILE_ROWS * (stages if plain else 2) + size * stages
    return 2 * (_TILE_DEPTH + (0 if groups else 8)) * lines + 4 * size + (1024 if groups else 0)


def _can_group(ctx: KernelContext) -> bool:
    """Whether experts_gemm.cu supports the step."""
    x, w = ctx.x, ctx.w
    whole = int(w.meta.shape[2]) % 8 == 0 and _rows_aligned(x, 16)
    return has_tensor_cores(ctx) and whole and 2 * (_matrix_count(ctx.node) + 1) <= _COUNTERS


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
    """
    arg = _argument(ctx, ids, bias, y, gate)
    if ctx.x.dtype.name in HALVES and _can_group(ctx):
        return _grouped_gemm(ctx, arg, ids, gate is not None)
    return [_gemv(ctx, arg, ids, gate)]


def dtype_mismatch(node: Tensor, options: Options) -> str | None:
    """Why the weight does not match the activation as `_lower` leaves it; None if it does."""
    x, w = node.sources[:2]
    if x.dtype == F32:
        return None
    fits = x.dtype == matmul_dtype(w.dtype)
    if x.dtype.quantised:
        fits = w.dtype.name in PLANES and x.dtype.name == activation(w.dtype)
    return None if fits else f"x is {x.dtype}, w {w.dtype}"


def _lower(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    assert x is not None and w is not None
    return (lower_activation(x, w, _few_pairs(node, options), options), w, *rest)


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
    "expert_linear", name="experts_blocks", dtypes={"w": tuple(PLANES), "bias": "f32"},
    scratch=groups_nbytes, **_BLOCKS,
)  # fmt: skip
def expert_linear(ctx: KernelContext) -> list[Launch]:
    return expert_products(ctx, ctx.ids, ctx.op("bias"), ctx.out.address)


@BACKEND.kernel("head_linear", name="heads_plain", dtypes={"w": PLAIN}, **_RULES)
@BACKEND.kernel("head_linear", name="heads_blocks", dtypes={"w": tuple(PLANES)}, **_BLOCKS)
def head_linear(ctx: KernelContext) -> list[Launch]:
    return expert_products(ctx, None, None, ctx.out.address)


def _all_instances() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for gated in (False, True):
        for name in PLANES:
            for integer in (True, False):
                _gemv_module(name, integer, 0, gated)
            _gemv_module(name, False, HALVES["f16"], gated)
        for name in PLAIN:
            for halves in {0, HALVES.get(name, 0)}:
                _gemv_module(name, False, halves, gated)
        for name in (*HALVES, *PLANES):
            for size, groups in product(_GROUP_SIZES, (False, True)):
                if not groups or _has_wgmma_kernel(dtype(name), size):
                    _gemm_module(dtype(name), size, gated, groups)
    for name in PLAIN:
        _unaligned_kernel(name)


_all_instances()
