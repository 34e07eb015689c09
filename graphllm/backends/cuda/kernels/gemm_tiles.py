"""Launches of the kernels on gemm_tiles.cuh: products of many tokens on GPUs of capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.device import KernelContext
from ..runtime.source import Function
from ..runtime.tensor_map import TILE_BYTES
from ..runtime.work import Arg, Launch, ceil
from .gemm import Job

TOKENS, CLUSTER = 128, 2  # tokens of a block; blocks that share weights
_THREADS = 384  # of a block


def shared_nbytes(columns: int, stages: int, scales: int = 0) -> int:
    """Bytes of the struct Shared, and of its alignment.

    Args:
        columns: rows of the matrices that a block multiplies at a time.
        stages: tiles of the depth in shared memory.
        scales: bytes of scales in each of them.
    """
    return stages * (TILE_BYTES * (columns + TOKENS) + scales + 16) + 1024


def count_tiles(jobs: Sequence[Job], tokens: int, columns: int, gated: bool = False) -> int:
    """Number of tiles of the results, of which a cluster computes one at a time."""
    rows = [jobs[0].rows * 2] if gated else [job.rows for job in jobs]
    return sum(ceil(count, columns) for count in rows) * ceil(tokens, TOKENS * CLUSTER)


def most_clusters(ctx: KernelContext, kernel: Function, shared: int) -> int:
    """Number of clusters of ``kernel`` that the GPU runs at a time."""
    return ctx.device.gpu.max_clusters(launch(kernel, 1, (), shared))


def launch(kernel: Function, clusters: int, args: Sequence[Arg], shared: int) -> Launch:
    """A launch of at most `most_clusters`: others would start when these have ended."""
    return Launch(kernel, (clusters, 1, CLUSTER), (_THREADS,), args, shared, cluster=CLUSTER)
