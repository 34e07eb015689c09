"""Linears of one token by linear_chain.cu, which runs several of them in one launch.

`launch` computes the linears of one step; chain_joining.py joins those of several steps.
docs/design/cuda-chains.md has the reasons and the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ....formats import ROW_FORMATS
from ....graph.dtype import F32, DType, dtype
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import CudaDevice, KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import MOSTLY_SHARED, Launch, ceil, max_shared
from .gemm import PLAIN, Job
from .matrices import matrices_argument
from .weight_packing import INTEGERS, item_elements, row_plane_nbytes

# f16, bf16, and what is multiplied by int8 with integer sums.
FORMATS = (
    *PLAIN[1:], *INTEGERS, *(n for n, form in ROW_FORMATS.items() if form.element.kind == "i"),
)  # fmt: skip
WARPS = 8  # of a block, that multiply
MAX_LINEARS = 8  # of a launch: its arguments take at most 4 KB
_MAX_SLOTS = 32  # as in linear_ring.cuh
_MIN_ITEMS = 16  # of a row: with fewer, few lanes have any
_LANE_ELEMENTS = 128  # of a row of activations, that the registers of a lane hold
_MIN_NBYTES = 64 << 10  # of a launch's weights: smaller matrices do not occupy a GPU
_LEAST_SHARED = 200 << 10  # bytes of shared memory of a block at most: small rings are slow
_OTHERS_SHARED = 36 << 10  # of these for the kernels that run meanwhile
_HALF_SHARED = 116 << 10  # of these, more than half, so that a multiprocessor has one block
_SLOT_NBYTES, _MOST_SLOT_NBYTES = 40 << 10, 64 << 10  # that suffice, and at most
_MOST_PARTS_NBYTES = 64 << 10  # of the sums of a block's rows, so that a ring has room beside them
_PASSES = 8  # rows of a slot that a lane multiplies, one after the other
_NORM_WIDTH = 8192  # elements of a norm at most: 32 units
_STAGE = ArgumentStruct("chain_stage.cuh", "ChainStage")


@dataclass(frozen=True)
class Shape:
    """How the warps of a block share rows; see linear_ring.cuh.

    Attributes:
        row_items: items of a row.
        lanes: lanes of a warp that share a row.
        items: items of a row that a lane multiplies.
        rows: rows of a slot, of each matrix.
        slot_nbytes: bytes of a slot.
    """

    row_items: int
    lanes: int
    items: int
    rows: int
    slot_nbytes: int


@dataclass(frozen=True)
class Linears:
    """What a launch computes: linears of one activation and format, or a gated unit.

    Attributes:
        kind: format of the weights.
        shape: how rows are divided.
        depth: elements of a row.
        gated: whether it is a gated unit.
        rows: rows of all matrices, of one if it is a gated unit.
        x, x_dtype: address and dtype of the activations.
        matrices: the argument.
        act: see `linear.gemv`.
        live: address of the number of tokens.
        results: address and bytes of each result.
        weights: the weights, which are read early.
    """

    kind: DType
    shape: Shape
    depth: int
    gated: bool
    rows: int
    x: int
    x_dtype: DType
    matrices: bytes
    act: int
    live: int
    results: tuple[tuple[int, int], ...]
    weights: tuple[OperandRef, ...]


@dataclass(frozen=True)
class Row:
    """What a launch computes of a row of float32: a norm, a quantized row, or both. With two norms,
    the second one is that of the sum of ``base`` and the first.

    Attributes:
        x: address of the row.
        made, made_dtype: address and dtype of the result.
        width: elements.
        norms: weight and eps of each norm, at most two.
        base, total: addresses of the row that is added to the first norm of two, and of the sum.
    """

    x: int
    made: int
    made_dtype: DType
    width: int
    norms: tuple[tuple[OperandRef, float], ...] = ()
    base: int = 0
    total: int = 0


@dataclass(frozen=True)
class Stage:
    """Linears of a chain, what makes their activations, and the steps that these belong to."""

    linears: Linears
    row: Row | None
    barrier: bool  # whether it begins with a barrier of the grid
    row_step: int
    step: int


def shape(kind: DType, depth: int, gated: bool) -> Shape | None:
    """The shape for a matrix, which leaves the fewest lanes without items; None if its rows are too
    short or too long, or have parts of items."""
    planes, each = row_plane_nbytes(kind, depth), item_elements(kind)
    items, matrices = depth // each, 2 if gated else 1
    whole = depth % kind.block == 0 and depth % each == 0
    if not whole or items < _MIN_ITEMS or planes[0] % 16:
        return None
    found = [
        (WARPS * lanes * own, own, lanes)
        for lanes in (8, 16, 32)
        for own in range(1, _LANE_ELEMENTS // each + 1)
        if WARPS * lanes * own >= items
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
    return Shape(items, lanes, own, rows, nbytes)


def launch(ctx: KernelContext, jobs: Sequence[Job], act: int) -> Launch | None:
    """The linears of one token, or a gated unit, as `linear.gemv` takes them; None if these are for
    gemv.cu.

    A multiprocessor changes its share of shared memory only when it is idle, and experts, and
    kernels for several tokens, need the L1 cache: plans with these have no chains.
    """
    x, w, gated, gpu = jobs[0].x, jobs[0].w, act >= 0, ctx.device.gpu
    own = shape(w.dtype, jobs[0].depth, gated) if w.dtype.name in FORMATS else None
    if own is None or not ctx.device.options.chains or not _has_room(gpu.capability):
        return None
    nbytes = sum(job.rows for job in jobs) * sum(row_plane_nbytes(w.dtype, jobs[0].depth))
    aligned = all(ref.address % 16 == 0 for ref in (x, *(job.w for job in jobs)))
    experts = any(op.startswith("expert") for op in ctx.segment.ops)
    plain = w.dtype.name in PLAIN
    if (
        experts
        or ctx.segment.rows > 1
        or not aligned
        or nbytes < _MIN_NBYTES
        or x.dtype.quantised == plain
    ):
        return None
    results = jobs[:1] if gated else jobs
    rows = sum(job.rows for job in results)
    if 4 * WARPS * ceil(rows, gpu.processors) * (2 if gated else 1) > _MOST_PARTS_NBYTES:
        return None
    part = Linears(
        w.dtype, own, jobs[0].depth, gated, rows, x.address, x.dtype,
        matrices_argument(jobs), act, ctx.live_address(x.meta.rows),
        tuple((job.out.address, 4 * job.rows) for job in results), tuple(job.w for job in jobs),
    )  # fmt: skip
    return chain([Stage(part, None, False, 0, 0)], ctx.device)


def norm_row(
    ctx: KernelContext, x: OperandRef, made: OperandRef,
    norms: Sequence[tuple[OperandRef, float]], base: OperandRef | None = None,
    total: OperandRef | None = None,
) -> Row | None:  # fmt: skip
    """The norm of a row, or two, if it can be a part of a chain; see `Row`."""
    refs = [ref for ref in (x, made, base, total, *(w for w, _ in norms)) if ref is not None]
    fits = x.width <= _NORM_WIDTH and x.width % 8 == 0 and x.meta.inner == (x.width,)
    aligned = all(ref.address % 16 == 0 for ref in refs)
    if ctx.upper_bound(x.meta.rows) > 1 or ctx.deterministic or not fits or not aligned:
        return None
    added = base.address if base is not None else 0
    stored = total.address if total is not None else 0
    return Row(x.address, made.address, made.dtype, x.width, tuple(norms), added, stored)


def quantised_row(ctx: KernelContext, x: int, made: OperandRef) -> Row | None:
    """A quantized row of float32 at address ``x``, if it can be a part of a chain."""
    alone = made.meta.inner == (made.width,) and ctx.upper_bound(made.meta.rows) == 1
    if not alone or ctx.deterministic or x % 16:
        return None
    return Row(x, made.address, made.dtype, made.width)


def _has_room(capability: tuple[int, int]) -> bool:
    return capability >= (9, 0) and max_shared(capability) >= _LEAST_SHARED


# -------------------------------------------------------------------------------------- launches


def chain(stages: Sequence[Stage], device: CudaDevice) -> Launch:
    """The launch of a chain."""
    gpu = device.gpu
    blocks = gpu.processors
    most = max(ceil(s.linears.rows, blocks) * (2 if s.linears.gated else 1) for s in stages)
    slot = max(stage.linears.shape.slot_nbytes for stage in stages)
    integer = stages[0].linears.x_dtype != F32
    rest = 4 * WARPS * most  # shared memory beside the ring
    if integer:
        rest += ceil(max(s.linears.depth for s in stages) * 5 // 4, 128) * 128
    room = max_shared(gpu.capability) - _OTHERS_SHARED - rest
    needed = sum(ceil(ceil(s.linears.rows, blocks), s.linears.shape.rows) for s in stages)
    slots = min(room // slot, _MAX_SLOTS, needed)
    before = [None, *(stage.row for stage in stages)]
    argument = b"".join(_argument(s, s.row is not row) for s, row in zip(stages, before))
    args = (argument, stages[0].linears.live, device.arrivals(blocks), most, slots)
    norms = [w for s in stages if s.row is not None for w, _ in s.row.norms]
    return Launch(
        kernel(tuple(map(_macro, stages)), integer), (blocks,), (32 * (WARPS + 1),), args,
        max(slots * slot + rest, _HALF_SHARED), shared_percent=MOSTLY_SHARED,
        prefetches=[*norms, *(w for stage in stages for w in stage.linears.weights)],
        part=stages[0].linears if len(stages) == 1 and stages[0].row is None else None,
    )  # fmt: skip


def _argument(stage: Stage, stores: bool) -> bytes:
    """The argument of a stage; ``stores``: whether the row that is made is stored."""
    own, row = stage.linears, stage.row or Row(stage.linears.x, 0, F32, 0)
    none = (None, 0.0)
    (norm, eps), (norm2, eps2) = (*row.norms, none, none)[:2]
    return _STAGE.pack(
        x=row.x, norm=norm.address if norm else 0, norm2=norm2.address if norm2 else 0,
        base=row.base, total=row.total if stores else 0, row=row.made if stores else 0,
        all=own.matrices, eps=eps, eps2=eps2, act=own.act,
    )  # fmt: skip


def _macro(stage: Stage) -> str:
    own, row = stage.linears, stage.row
    source = "AS_IS" if row is None else ("QUANTISED", "NORMED", "NORMED_TWICE")[len(row.norms)]
    steps = stage.row_step, stage.step
    return _stage_macro(own.kind, own.shape, own.gated, source, stage.barrier, *steps)


def _stage_macro(
    kind: DType, shape: Shape, gated: bool, source: str, barrier: bool, *steps: int
) -> str:
    """A stage as linear_chain.cu states it."""
    numbers = (shape.row_items, shape.lanes, shape.items, shape.rows, 2 if gated else 1)
    words = (kind.name.upper(), *numbers, source, "true" if barrier else "false", *steps)
    return f"Linear<{', '.join(map(str, words))}>"


def kernel(stages: Sequence[str], integer: bool) -> Function:
    """linear_chain.cu for these stages; the file describes the macros."""
    made = module("linear_chain", STAGES=", ".join(stages), INTEGER=int(integer), WARPS=WARPS)
    return made["linear_chain"]


def register() -> None:
    """Register a module of each format that has every source of activations, and several numbers of
    lanes, so that tests compile them; a plan compiles its own."""
    for name in FORMATS:
        kind, stages = dtype(name), list[str]()
        sources = ("AS_IS", "NORMED", "QUANTISED", "NORMED_TWICE")[
            : 1 if name in ROW_FORMATS else 4
        ]
        for i, (items, gated) in enumerate(product((64, 192, 448), (False, True))):
            source = sources[i % (2 if name in PLAIN else len(sources))]
            own = shape(kind, items * item_elements(kind), gated)
            if own is not None and (
                "NORMED" not in source or items * item_elements(kind) <= _NORM_WIDTH
            ):
                stages.append(_stage_macro(kind, own, gated, source, bool(stages), 0, 0))
        kernel(stages, name not in PLAIN)
