"""Linears of several tokens with block weights and f16 activations; see small_batch_blocks.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ....formats import BLOCK_FORMATS
from ....graph.dtype import F16, dtype
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import Job, permuted_nbytes
from .matrices import (
    MAX_TOKENS,
    has_clusters,
    has_tensor_cores,
    has_wgmma,
    matrices_argument,
    splits,
)
from .quantize import HALVES
from .weight_packing import PLANES

MIN_ROWS = 16  # of a matrix

# Tokens of a block -> its warpgroups, which compute 64 rows each, and blocks of a multiprocessor.
_SHAPES = {8: (2, 2), 16: (2, 2), 32: (2, 2), 64: (4, 1), 128: (4, 1)}
_PERMUTED = 64  # tokens of a block from which a kernel of its own permutes the activations
_SMALL = (8, 16)  # those for other GPUs than those of capability 9.0
_SPILLS = ("q2_k", "q3_k", "q5_k", "iq4_xs")  # formats whose sums of 128 tokens leave no registers
_SHARED, _SMALL_SHARED = 227 << 10, 99 << 10  # bytes of a multiprocessor, of a block elsewhere
_ALIGNMENT = 1024  # of what the tensor cores read
_MAX_STAGES = 6
_ALONE, _LEADS, _FOLLOWS = range(3)  # enum Order of small_batch_blocks.cu
_PART = 128  # elements of the depth of a slot, as in activation_ring.cuh


def _sizes(name: str, small: bool) -> tuple[int, ...]:
    """Tokens of a block, by kernel."""
    return _SMALL if small else tuple(_SHAPES)[: -1 if name in _SPILLS else None]


def _chunk(name: str) -> tuple[int, int]:
    """Elements of a chunk of the depth, and bytes of a row of it in shared memory."""
    block = dtype(name).block
    chunk = 128 if block == 32 or name == "q6_k" else 256
    units = 0
    for i, (first, last) in enumerate(PLANES[name]):
        size = (last - first) * chunk // block
        if i == 0 or (block == 256 and size % 16 == 0):
            units += size // 16
        else:
            units += 1 if block == 256 and 16 % size == 0 else (size + 30) // 16
    return chunk, 16 * units


def _order(name: str) -> tuple[int, bool]:
    """Elements of a chunk, and whether its parts are adjacent, as in block_halves.cuh."""
    chunk, _ = _chunk(name)
    return chunk, chunk == 128 or name == "iq4_xs"


@dataclass(frozen=True)
class _Layout:
    """Shared memory of a kernel.

    Attributes:
        together: chunks of a stage.
        stages: stages of weights, and of activations that are not permuted.
        slots: parts of permuted activations; 0 if they are not permuted.
        nbytes: all of it. Blocks use so much that no more fit on a multiprocessor than are meant
            to: otherwise those of the next kernel, which start early, would not be distributed
            evenly.
    """

    together: int
    stages: int
    slots: int
    nbytes: int


@cache
def _layout(name: str, tokens: int, small: bool) -> _Layout:
    """Shared memory of a format and a number of tokens of a block."""
    warpgroups, resident = _SHAPES[tokens]
    chunk, row = _chunk(name)
    weights, sums = 64 * warpgroups * row, 4 * tokens * (64 * warpgroups + 4)
    room = (_SMALL_SHARED if small else _SHARED // resident // 1024 * 1024) - _ALIGNMENT
    least = 0 if small else _SHARED // (resident + 1) + 1024
    if tokens >= _PERMUTED:
        stages, slot = 2 if chunk == 256 else 3, 2 * _PART * tokens + 16  # two barriers
        slots = min(_MAX_STAGES, (room - _ALIGNMENT - stages * weights) // slot)
        used = 2 * _ALIGNMENT + max(stages * weights + slots * slot, sums)
        return _Layout(1, stages, slots, max(used, least))
    size = weights + 2 * chunk * tokens
    most = 2 if tokens <= (32 if chunk == 128 else 16) else 1
    together = next(n for n in range(most, 0, -1) if n == 1 or room >= 2 * n * size)
    stages = min(_MAX_STAGES, room // (together * size))
    used = _ALIGNMENT + max(stages * together * size, sums)
    return _Layout(together, stages, 0, max(used, least))


def kernel(name: str, tokens: int, gated: bool = False, small: bool = False) -> Function:
    """The kernel for a format and a number of tokens of a block.

    ``small``: for GPUs of another capability than 9.0, which may have 99 KB of shared memory.
    """
    warpgroups, resident = _SHAPES[tokens]
    layout = _layout(name, tokens, small)
    made = module(
        "small_batch_blocks", FORMAT=name.upper(), TOKENS=tokens, WARPGROUPS=warpgroups,
        GATED=int(gated), STAGES=layout.stages, PER_STAGE=layout.together, RESIDENT=resident,
        SHARED=layout.nbytes, SLOTS=layout.slots,
    )  # fmt: skip
    return made["small_batch"]


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether the kernel supports the linear."""
    few = ctx.deterministic or ctx.upper_bound(job.x.meta.rows) <= MAX_TOKENS
    quantised = job.x.dtype == F16 and job.w.dtype.name in PLANES
    return few and quantised and job.rows >= MIN_ROWS and has_tensor_cores(ctx)


class _Permuted:
    """Permuted copies of an activation, one for each order and number of tokens of a block."""

    def __init__(self, ctx: KernelContext, x: OperandRef, depth: int, workspace: int) -> None:
        self.launches: list[Launch] = []
        self._ctx, self._x, self._depth, self._end = ctx, x, depth, workspace
        self._places: dict[tuple[int, bool, int], int] = {}

    def address(self, name: str, tokens: int) -> int:
        """Address of the copy for kernels of a format and a number of tokens."""
        order = chunk, adjacent, tokens = *_order(name), tokens
        if order in self._places:
            return self._places[order]
        x, at, most = self._x, self._end, self._ctx.upper_bound(self._x.meta.rows)
        chunks = ceil(self._depth, chunk)
        made = module("permute_activations", CHUNK=chunk, ADJACENT=int(adjacent))["permute"]
        live = self._ctx.live_address(x.meta.rows)
        args = (x.address, x.row_stride, live, self._depth, at, chunks, tokens)
        grid = (ceil(chunks * chunk // 8, 128), most)
        self.launches.append(Launch(made, grid, (128,), args))
        self._places[order] = at
        self._end += permuted_nbytes(most, self._depth)
        return at


def blocks(
    ctx: KernelContext, groups: Sequence[Sequence[Job]], workspace: int, act: int = 0,
    gated: bool = False,
) -> list[Launch]:  # fmt: skip
    """Linears of one f16 activation of any number of tokens, or a gated unit.

    Args:
        ctx: the step.
        groups: linears of one kernel each: at most `matrices.MAX_FUSED_LINEARS` of one format.
        workspace: address of `gemm.workspace_nbytes` bytes.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
    x, depth = groups[0][0].x, groups[0][0].depth
    permuted = _Permuted(ctx, x, depth, workspace)
    made = [_launch(ctx, jobs, permuted, act, gated) for jobs in groups]
    if len(made) == 1:
        return [*permuted.launches, *made]
    # Large clusters first: they need free multiprocessors next to each other.
    made.sort(key=lambda launch: -launch.cluster)
    first, *others = (
        replace(launch, args=(*launch.args[:-1], _FOLLOWS if i else _LEADS))
        for i, launch in enumerate(made)
    )
    return [*permuted.launches, replace(first, triggers_after_wait=True), *others]


def _launch(
    ctx: KernelContext, jobs: Sequence[Job], permuted: _Permuted, act: int, gated: bool
) -> Launch:
    """Linears of one format, or a gated unit, in one kernel; see `blocks`."""
    x, name, depth = jobs[0].x, jobs[0].w.dtype.name, jobs[0].depth
    most, small = ctx.upper_bound(x.meta.rows), not has_wgmma(ctx)
    sizes = _sizes(name, small)
    tokens = next((n for n in sizes if n >= most), sizes[-1])
    own = jobs[:1] if gated else jobs
    warpgroups, _ = _SHAPES[tokens]
    rows = sum(ceil(job.rows, 64 * warpgroups // (1 + gated)) for job in own)
    counts = [job.rows * (1 + gated) for job in own]
    count = splits(counts, depth, ctx.device.gpu.processors)
    together = count if has_clusters(ctx) else 1
    layout = _layout(name, tokens, small)
    at = permuted.address(name, tokens) if layout.slots else x.address
    args = (at, x.row_stride, ctx.live_address(x.meta.rows), depth, matrices_argument(jobs), count,
            act, HALVES.get(jobs[0].out.dtype.name, 0), _ALONE)  # fmt: skip
    return Launch(
        kernel(name, tokens, gated, small), (ceil(most, tokens), rows, together),
        (128 * warpgroups,), args, layout.nbytes, prefetches=[job.w for job in jobs],
        cluster=together,
    )  # fmt: skip


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    assert PLANES.keys() == BLOCK_FORMATS.keys()
    for chunk, adjacent in sorted(set(map(_order, PLANES))):
        module("permute_activations", CHUNK=chunk, ADJACENT=int(adjacent))
    for name in PLANES:
        for gated in (False, True):
            for small in (False, True):
                for tokens in _sizes(name, small):
                    kernel(name, tokens, gated, small)
