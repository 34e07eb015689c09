"""Linears of one token by gemv_ring.cu, whose weights bulk copies bring to shared memory.

docs/design/cuda-rings.md has the reasons and the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....formats import ROW_FORMATS
from ....graph.dtype import DType, dtype
from ..runtime.device import KernelContext
from ..runtime.source import Function, module
from ..runtime.work import MOSTLY_SHARED, Launch, ceil, max_shared
from .gemm import PLAIN, Job
from .matrices import matrices_argument
from .weight_packing import INTEGERS, item_elements, row_plane_nbytes

# What the kernel multiplies: f16, bf16, and what is multiplied by int8 with integer sums.
FORMATS = (
    *PLAIN[1:], *INTEGERS, *(n for n, form in ROW_FORMATS.items() if form.element.kind == "i"),
)  # fmt: skip
DEFAULT_FORMATS = PLAIN[1:]  # of these, those that plans use it for; for others gemv.cu is faster
WARPS = 8  # of a block, that multiply
_MAX_SLOTS = 32  # as in gemv_ring.cu
_MIN_ITEMS = 16  # of a row: with fewer, few lanes have any
_LANE_ELEMENTS = 128  # of a row of activations, that the registers of a lane hold
_MIN_NBYTES = 4 << 20  # of a launch's weights: smaller matrices do not occupy a GPU
_MIN_DEPTH = 1024  # of a row: small models lose more by smaller L1 caches than a ring gains
_LEAST_SHARED = 200 << 10  # bytes of shared memory of a block at most: small rings are slow
_OTHERS_SHARED = 60 << 10  # of these for the kernels that run meanwhile
_HALF_SHARED = 116 << 10  # of these, more than half, so that a multiprocessor has one block
_SLOT_NBYTES, _MOST_SLOT_NBYTES = 20 << 10, 64 << 10  # that suffice, and at most
_MOST_PARTS_NBYTES = 64 << 10  # of the sums of a block's rows, so that a ring has room beside them
# Launches of small models (most elements of the residual's rows, and bytes of the weights) have
# smaller rings: one of a launch without residual fits beside one of a launch with it, so that the
# next launch fills its ring while the present one multiplies. Two of the latter do not fit.
_SMALL_ROW, _SMALL_NBYTES = 3072, 80 << 20
_SMALL_WARPS = 16
_SMALL_RINGS = 105 << 10, 116 << 10  # bytes of shared memory: without residual, and with one
_PASSES = 8  # rows of a slot that a lane multiplies, one after the other


@dataclass(frozen=True)
class Shape:
    """How the warps of a block share rows; see gemv_ring.cu.

    Attributes:
        warps: warps of a block that multiply.
        row_items: items of a row.
        row_lanes: lanes of a warp that share a row.
        items: items of a row that a lane multiplies.
        rows: rows of a slot, of each matrix.
        slot_nbytes: bytes of a slot.
    """

    warps: int
    row_items: int
    row_lanes: int
    items: int
    rows: int
    slot_nbytes: int


def shape(kind: DType, depth: int, gated: bool, warps: int = WARPS) -> Shape | None:
    """The shape for a matrix and a number of warps, which leaves the fewest lanes without items;
    None if its rows are too short or too long, or have parts of items."""
    planes, each = row_plane_nbytes(kind, depth), item_elements(kind)
    items, matrices = depth // each, 2 if gated else 1
    whole = depth % kind.block == 0 and depth % each == 0
    if not whole or items < _MIN_ITEMS or planes[0] % 16:
        return None
    found = [
        (warps * lanes * own, own, lanes)
        for lanes in (8, 16, 32)
        for own in range(1, _LANE_ELEMENTS // each + 1)
        if warps * lanes * own >= items
        and matrices * 32 // lanes * sum(planes) <= _MOST_SLOT_NBYTES  # rows at a time
    ]
    if not found:
        return None
    _, own, lanes = min(found)
    groups = rows = 32 // lanes
    while 2 * rows * matrices <= _PASSES * groups and (
        2 * rows * matrices * sum(planes) <= _SLOT_NBYTES
    ):
        rows *= 2
    nbytes = matrices * sum(ceil(rows * n + (30 if n % 16 else 0), 128) * 128 for n in planes)
    return Shape(warps, items, lanes, own, rows, nbytes)


def launch(ctx: KernelContext, jobs: Sequence[Job], act: int) -> Launch | None:
    """The linears of one token, or a gated unit, as `linear.gemv` takes them; None if these are for
    gemv.cu.

    A multiprocessor changes its share of shared memory only when it is idle, and experts, and
    kernels for several tokens, need the L1 cache: plans with these have no rings.
    """
    x, kind, gated, gpu = jobs[0].x, jobs[0].w.dtype, act >= 0, ctx.device.gpu
    if jobs[0].depth < _MIN_DEPTH or not has_room(gpu.capability):
        return None
    rows = ceil(sum(job.rows for job in (jobs[:1] if gated else jobs)), gpu.processors)
    most = rows * (2 if gated else 1)  # of a block
    warps = _SMALL_WARPS if _residual_elements(jobs[0]) <= _SMALL_ROW else WARPS
    if 4 * warps * most > _MOST_PARTS_NBYTES:
        warps = WARPS
    parts = 4 * warps * most
    own = shape(kind, jobs[0].depth, gated, warps) if kind.name in DEFAULT_FORMATS else None
    nbytes = sum(job.rows for job in jobs) * sum(row_plane_nbytes(kind, jobs[0].depth))
    aligned = all(ref.address % 16 == 0 for ref in (x, *(job.w for job in jobs)))
    experts = any(op.startswith(("expert", "moe")) for op in ctx.segment.ops)
    plain = kind.name in PLAIN
    if (
        own is None
        or experts
        or ctx.segment.rows > 1
        or not aligned
        or nbytes < _MIN_NBYTES
        or x.dtype.quantised == plain
        or parts > _MOST_PARTS_NBYTES
    ):
        return None
    least, room = _shared_nbytes(jobs[0], nbytes, max_shared(gpu.capability) - _OTHERS_SHARED)
    slots = min((room - parts) // own.slot_nbytes, _MAX_SLOTS, ceil(rows, own.rows))
    if slots < 1:
        return None
    return Launch(
        kernel(kind, own, gated), (gpu.processors,), (32 * (own.warps + 1),),
        (x.address, ctx.live_address(x.meta.rows), matrices_argument(jobs), act, most, slots),
        max(slots * own.slot_nbytes + parts, least), shared_percent=MOSTLY_SHARED,
        prefetches=[job.w for job in jobs],
    )  # fmt: skip


def _shared_nbytes(job: Job, nbytes: int, room: int) -> tuple[int, int]:
    """Least and most bytes of shared memory of a block, of ``room``.

    Args:
        job: the first linear of the launch.
        nbytes: bytes of the launch's weights.
        room: bytes that a block may have.
    """
    if _residual_elements(job) > _SMALL_ROW or nbytes >= _SMALL_NBYTES:
        return _HALF_SHARED, room
    first, second = _SMALL_RINGS
    return (0, first) if job.residual is None else (_HALF_SHARED, second)


def _residual_elements(job: Job) -> int:
    """Elements of the residual's row, if the linear reads or adds it."""
    return job.depth if job.residual is None else job.rows


def has_room(capability: tuple[int, int]) -> bool:
    """Whether the GPU has bulk copies, and blocks enough shared memory for a ring."""
    return capability >= (9, 0) and max_shared(capability) >= _LEAST_SHARED


def kernel(kind: DType, shape: Shape, gated: bool) -> Function:
    """gemv_ring.cu for a format and a depth; the file describes the macros."""
    made = module(
        "gemv_ring", FORMAT=kind.name.upper(), INTEGER=int(kind.name not in PLAIN),
        MATRICES=2 if gated else 1, WARPS=shape.warps, ROW_ITEMS=shape.row_items,
        ROW_LANES=shape.row_lanes, ITEMS=shape.items, ROWS=shape.rows,
    )  # fmt: skip
    return made["gemv_ring"]


def register() -> None:
    """Register modules of each format with several shapes, so that tests compile them; a plan
    compiles its own, by the depths of its matrices."""
    some = [(name, WARPS) for name in FORMATS] + [(name, _SMALL_WARPS) for name in DEFAULT_FORMATS]
    for (name, warps), items, gated in product(some, (64, 192, 448), (False, True)):
        own = shape(dtype(name), items * item_elements(dtype(name)), gated, warps)
        if own is not None:
            kernel(dtype(name), own, gated)
