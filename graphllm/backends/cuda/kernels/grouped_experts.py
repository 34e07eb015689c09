"""Expert products of groups: pairs that share a matrix read its weights together.

experts_small_groups.cu multiplies block weights that have few pairs per matrix. experts_gemm.cu
multiplies groups of up to 128 pairs, which `group` of experts.cu has sorted by matrix.
"""

from __future__ import annotations

from itertools import product

from ....backends.alignment import aligned
from ....formats import ROW_FORMATS
from ....graph.dtype import BF16, I32, DType, dtype
from ....graph.tensor import Meta, Tensor
from ... import Options
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Module, module
from ..runtime.work import Launch, ceil
from .gemm import PLAIN
from .matrices import has_tensor_cores
from .quantize import HALVES
from .weight_packing import INTEGERS, PLANES, QUANTISED, item_elements

_MODULE = module("experts")
_GROUP = ArgumentStruct("experts.cuh", "Group")
_MAX_PAIRS_PER_MATRIX = 2  # pairs of a matrix, on average, up to which each pair has its own GEMV
_TILE_ROWS, _TILE_DEPTH = 128, 64  # of a block of experts_gemm.cu
# Largest pairs of a group; average pairs of a matrix up to which the smaller size is used.
_GROUP_SIZES, _SMALL_GROUP_LOAD = (32, 128), 24
# experts_small_groups.cu: average pairs of a matrix up to which it is used, pairs that a block
# multiplies at a time, its warps, and elements of a row in shared memory.
_SMALL_LOAD, _SMALL_TOKENS, _SMALL_WARPS, _SMALL_DEPTH = 8, 40, 8, 1024
_COUNTERS = 8192  # in shared memory, of the kernel `group`

# ------------------------------------------------------------------------------------------ sizes


def pairs_per_token(node: Tensor) -> int:
    """Pairs of a token."""
    ids = next((s for s in node.sources if s.dtype == I32), node)
    return int(ids.meta.inner[0])


def max_pairs(node: Tensor) -> int:
    """Pairs of a step, at most."""
    return KernelContext.upper_bound(node.meta.rows) * pairs_per_token(node)


def _matrix_count(node: Tensor) -> int:
    return int(node.sources[1].shape[0])  # type: ignore[arg-type]


def few_pairs(node: Tensor, options: Options) -> bool:
    """Whether each pair has its own GEMV."""
    few = max_pairs(node) <= _MAX_PAIRS_PER_MATRIX * _matrix_count(node)
    return few and not options.deterministic


def _group_size(node: Tensor, options: Options) -> int:
    """Pairs of a group, at most."""
    many = max_pairs(node) > _SMALL_GROUP_LOAD * _matrix_count(node)
    return _GROUP_SIZES[many and not options.deterministic]


def _has_small_groups(node: Tensor, options: Options) -> bool:
    """Whether experts_small_groups.cu computes a step with f16 activations."""
    few = max_pairs(node) <= _SMALL_LOAD * _matrix_count(node) and not options.deterministic
    return few and node.sources[1].dtype.name in INTEGERS


def _max_groups(node: Tensor, options: Options) -> int:
    """Largest possible number of groups: one of each matrix may be incomplete.

    Pairs whose id is out of range count as one more matrix.
    """
    pairs = max_pairs(node)
    return pairs // _group_size(node, options) + min(pairs, _matrix_count(node) + 1)


def groups_nbytes(node: Tensor, options: Options) -> int:
    """Bytes of the groups, and of the pairs sorted by matrix."""
    x, w = node.sources[:2]
    halves = x.dtype.name in HALVES or (x.dtype.quantised and w.dtype.name in ROW_FORMATS)
    if not halves or _has_small_groups(node, options):
        return 0
    return aligned(_GROUP.size * _max_groups(node, options)) + 4 * max_pairs(node)


# ---------------------------------------------------------------------------------------- modules


def _gemm_module(kind: DType, size: int, gated: bool = False, groups: bool = False) -> Module:
    """experts_gemm.cu for a format. ``groups``: use warpgroup instructions of capability 9.0."""
    plain = kind.name in PLAIN
    return module(
        "experts_gemm", FORMAT=kind.name.upper(), PLAIN=int(plain), BFLOAT=int(kind == BF16),
        TOKENS=size, GATED=int(gated), WARPS=_gemm_warps(size, groups),
        STAGES=_stages(size, groups), WGMMA=int(groups),
    )  # fmt: skip


def _small_groups_module(kind: DType, gated: bool = False) -> Module:
    """experts_small_groups.cu for a format."""
    return module(
        "experts_small_groups",
        FORMAT=kind.name.upper(),
        TOKENS=_SMALL_TOKENS,
        CHUNK=_SMALL_DEPTH,
        WARPS=_SMALL_WARPS,
        GATED=int(gated),
    )


def _has_wgmma_kernel(kind: DType, size: int) -> bool:
    """Whether a wgmma kernel exists: items of some formats leave too few registers for it."""
    floats = kind.name in PLANES and kind.name not in INTEGERS  # of items of 32
    return size >= 64 and item_elements(kind) < 64 and not floats


def _gemm_warps(size: int, groups: bool) -> int:
    """Warps of a block.

    Large tiles per warp reuse operands most; small groups need more warps for enough loads in
    flight.
    """
    return 8 if size < 64 or groups else 4


def _stages(size: int, groups: bool) -> int:
    """Stages of the depth in shared memory.

    Two blocks must fit on a multiprocessor, and more stages gain nothing. Without ``groups``, a
    block of many tokens must fit the 99 KB of capability 8.6.
    """
    return 4 if size < 64 else 3 if groups else 2


def register_modules() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    for gated in (False, True):
        for name in INTEGERS:
            _small_groups_module(dtype(name), gated)
        for name in (*HALVES, *QUANTISED):
            for size, groups in product(_GROUP_SIZES, (False, True)):
                if not groups or _has_wgmma_kernel(dtype(name), size):
                    _gemm_module(dtype(name), size, gated, groups)


# --------------------------------------------------------------------------------------- products


def x_strides(x: Meta) -> list[int]:
    """Bytes between tokens, and between the rows of a token (0 if it has one row)."""
    return [x.strides[0], x.strides[1] if x.ndim == 3 else 0]


def rows_aligned(x: OperandRef, by: int) -> bool:
    """Whether all rows are aligned to ``by`` bytes."""
    lone = KernelContext.upper_bound(x.meta.rows) <= 1
    return all(at % by == 0 for at in (x.address, *x_strides(x.meta)[int(lone) :]))


def grouped_products(
    ctx: KernelContext, arg: bytes, ids: OperandRef | None, gated: bool
) -> list[Launch]:
    """Products of all pairs of a step for which `can_group` holds.

    Args:
        ctx: the step.
        arg: the struct Experts.
        ids: experts of each token; None: pair j of a token has matrix j.
        gated: whether the result is a gated unit.
    """
    if _has_small_groups(ctx.node, ctx.device.options):
        return [_small_groups(ctx, arg, ids, gated)]
    return _grouped_gemm(ctx, arg, ids, gated)


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
        args = (ids.address, ids.row_stride, live, pairs_per_token(node), matrices, size,
                ctx.scratch, count, order)  # fmt: skip
        shared = 4 * (warps + 1) * (matrices + 1)
        work = [Launch(_MODULE["group"], (1,), (32 * warps,), args, shared)]
        places = (arg, ctx.scratch, order)
    else:
        count = matrices * ceil(ctx.upper_bound(ctx.x.meta.rows), size)
        places = (arg, 0, 0)
    plain = ctx.w.dtype.name in PLAIN
    threads = (32 * _gemm_warps(size, grouped),)
    shared = _shared_nbytes(size, plain, grouped)
    grid = (count, ceil(n, _TILE_ROWS // (1 + gated)))
    return [*work, Launch(kernel, grid, threads, places, shared, triggers_after_wait=True)]


def _small_groups(ctx: KernelContext, arg: bytes, ids: OperandRef | None, gated: bool) -> Launch:
    """Products of the few pairs of each matrix."""
    matrices, n, _ = ctx.w.meta.shape
    grid = (matrices + (ids is not None), ceil(n, 16 * _SMALL_WARPS // (1 + gated)))
    shared = 2 * _SMALL_TOKENS * _SMALL_DEPTH + 4 * (max_pairs(ctx.node) + 4)
    kernel = _small_groups_module(ctx.w.dtype, gated)["multiply_small_groups"]
    return Launch(kernel, grid, (32 * _SMALL_WARPS,), (arg,), shared, triggers_after_wait=True)


def _shared_nbytes(size: int, plain: bool, groups: bool) -> int:
    """Bytes of the struct Shared of experts_gemm.cu, and of the padding in front of it."""
    stages = _stages(size, groups)
    lines = _TILE_ROWS * (stages if plain else 2) + size * stages
    return 2 * (_TILE_DEPTH + (0 if groups else 8)) * lines + 4 * size + (1024 if groups else 0)


def can_group(ctx: KernelContext) -> bool:
    """Whether experts_gemm.cu supports the step."""
    x, w = ctx.x, ctx.w
    whole = int(w.meta.shape[2]) % 8 == 0 and rows_aligned(x, 16)
    return has_tensor_cores(ctx) and whole and 2 * (_matrix_count(ctx.node) + 1) <= _COUNTERS
