"""Linears of several tokens with block weights and f16 activations; see small_batch_blocks.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ....formats import BLOCK_FORMATS
from ....graph.dtype import F16, dtype
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import Function, module
from ..runtime.work import Launch, ceil
from .gemm import Job
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
_SPILLS = ("q2_k", "q3_k", "q5_k", "q6_k")  # formats whose sums of 128 tokens leave no registers
_SHARED, _SMALL_SHARED = 227 << 10, 99 << 10  # bytes of a multiprocessor, of a block elsewhere
_ALIGNMENT = 1024  # of what the tensor cores read
_MAX_STAGES = 6


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


@cache
def _layout(name: str, tokens: int, small: bool) -> tuple[int, int, int]:
    """Chunks of a stage, stages, and bytes of shared memory.

    Blocks use so much that no more fit on a multiprocessor than are meant to: otherwise those of
    the next kernel, which start early, would not be distributed evenly.
    """
    warpgroups, resident = _SHAPES[tokens]
    chunk, row = _chunk(name)
    size = 64 * warpgroups * row + 2 * chunk * tokens
    room = (_SMALL_SHARED if small else _SHARED // resident // 1024 * 1024) - _ALIGNMENT
    most = 2 if tokens <= (32 if chunk == 128 else 16) else 1
    together = next(n for n in range(most, 0, -1) if n == 1 or room >= 2 * n * size)
    stages = min(_MAX_STAGES, room // (together * size))
    used = _ALIGNMENT + max(stages * together * size, 4 * tokens * (64 * warpgroups + 4))
    return together, stages, used if small else max(used, _SHARED // (resident + 1) + 1024)


def kernel(name: str, tokens: int, gated: bool = False, small: bool = False) -> Function:
    """The kernel for a format and a number of tokens of a block.

    ``small``: for GPUs of another capability than 9.0, which may have 99 KB of shared memory.
    """
    warpgroups, resident = _SHAPES[tokens]
    together, stages, shared = _layout(name, tokens, small)
    made = module(
        "small_batch_blocks", FORMAT=name.upper(), TOKENS=tokens, WARPGROUPS=warpgroups,
        GATED=int(gated), STAGES=stages, PER_STAGE=together, RESIDENT=resident, SHARED=shared,
        PERMUTED=int(tokens >= _PERMUTED),
    )  # fmt: skip
    return made["small_batch"]


def fits(ctx: KernelContext, job: Job) -> bool:
    """Whether the kernel supports the linear."""
    few = ctx.deterministic or ctx.upper_bound(job.x.meta.rows) <= MAX_TOKENS
    quantised = job.x.dtype == F16 and job.w.dtype.name in PLANES
    return few and quantised and job.rows >= MIN_ROWS and has_tensor_cores(ctx)


def _permute(ctx: KernelContext, x: OperandRef, depth: int, chunk: int, to: int) -> Launch:
    """Store the activation at address ``to`` in the order of kernels with this chunk."""
    units = ceil(depth, chunk) * chunk // 8
    made = module("permute_activations", CHUNK=chunk)["permute"]
    args = (x.address, x.row_stride, ctx.live_address(x.meta.rows), depth, to, units)
    return Launch(made, (ceil(units, 128), ctx.upper_bound(x.meta.rows)), (128,), args)


def blocks(
    ctx: KernelContext, jobs: Sequence[Job], workspace: int, act: int = 0, gated: bool = False
) -> list[Launch]:
    """Linears of one f16 activation of any number of tokens, or a gated unit, in one kernel.

    Args:
        ctx: the step.
        jobs: at most `matrices.MAX_FUSED_LINEARS` linears of one format.
        workspace: address of `gemm.workspace_nbytes` bytes.
        act: activation of a gated unit, as in `elementwise.ACTIVATIONS`.
        gated: write act(first) * second to the first job's result.
    """
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
    at, stride = x.address, x.row_stride
    before: list[Launch] = []
    if tokens >= _PERMUTED:
        chunk, _ = _chunk(name)
        at, stride = workspace, 2 * ceil(depth, chunk) * chunk
        before.append(_permute(ctx, x, depth, chunk, workspace))
    args = (at, stride, ctx.live_address(x.meta.rows), depth,
            matrices_argument(jobs), count, act, HALVES.get(jobs[0].out.dtype.name, 0))  # fmt: skip
    return [*before, Launch(
        kernel(name, tokens, gated, small), (ceil(most, tokens), rows, together),
        (128 * warpgroups,), args, _layout(name, tokens, small)[-1],
        prefetches=[job.w for job in jobs], cluster=together,
    )]  # fmt: skip


def register() -> None:
    """Register every module that a plan may use, so that tests compile them all."""
    assert PLANES.keys() == BLOCK_FORMATS.keys()
    for chunk in (128, 256):
        module("permute_activations", CHUNK=chunk)
    for name in PLANES:
        for gated in (False, True):
            for small in (False, True):
                for tokens in _sizes(name, small):
                    kernel(name, tokens, gated, small)
