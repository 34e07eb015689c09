"""Argmax and sampling on the device; sampling.cu describes the algorithm."""

from __future__ import annotations

from ....backends.alignment import aligned
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("sampling")
_SETTINGS = ArgumentStruct("sampling.cuh", "Settings")
_THREADS = 1024  # of a block of `pick`; also the limit of slices and of sharers of a row
_WARPS = 8  # of a block of `slice_maxima`, one slice each
_CHUNK = 2048  # least number of logits of a wide row that one block takes
_BLOCKS = 2048  # of `slice_maxima` about; with more of them a warp computes several slices
_PICKERS = 4  # blocks of `pick` for each multiprocessor about
_WIDE = 8 * (2048 + 2 + 2 * _THREADS + 3 + (1 << 14))  # bytes of the struct Wide


def _maxima_nbytes(node: Tensor) -> int:
    """Bytes of the maxima of all slices, and of their indices."""
    return aligned(8 * _THREADS * KernelContext.upper_bound(node.meta.rows))


def _wide_nbytes(node: Tensor) -> int:
    """Bytes that the blocks of wide rows share."""
    return _WIDE * KernelContext.upper_bound(node.meta.rows)


def _choose(
    ctx: KernelContext, x: OperandRef, settings: bytes, sharers: int = 0, settled: bool = True
) -> list[Launch]:
    """The kernels that choose an id for each row.

    Args:
        ctx: the step.
        x: logits.
        settings: the packed settings, null pointers for argmax.
        sharers: blocks that share a wide row; 0 if there are no wide rows.
        settled: whether settings may be read before a kernel waits for its predecessor.
    """
    rows, slice_ = ctx.upper_bound(x.meta.rows), 32 * ceil(x.width, 32 * _THREADS)
    slices = ceil(x.width, slice_)
    each = max(1, rows * slices // (_WARPS * _BLOCKS))
    blocks = ceil(slices, _WARPS * each)
    wide = ctx.scratch + _maxima_nbytes(ctx.node) if sharers else 0
    row = (
        x.address,
        x.row_stride,
        x.width,
        settings,
        ctx.live_address(x.meta.rows),
        ctx.scratch,
        wide,
    )
    sample_grid, out = (rows, max(1, sharers)), (*row, int(settled), ctx.out.address)
    made = [
        Launch(_MODULE["slice_maxima"], (rows, blocks), (32 * _WARPS,), (*row, each)),
        Launch(_MODULE["pick"], sample_grid, (_THREADS,), out),
    ]
    return [*made, Launch(_MODULE["finish"], sample_grid, (_THREADS,), out)] if sharers else made


@BACKEND.kernel("argmax", layout={"x": ROWS}, scratch=lambda node, options: _maxima_nbytes(node))
def argmax(ctx: KernelContext) -> list[Launch]:
    return _choose(ctx, ctx.x, bytes(_SETTINGS.size))


@BACKEND.kernel(
    "sample",
    layout={"logits": ROWS},
    scratch=lambda node, options: _maxima_nbytes(node) + _wide_nbytes(node),
)
def sample(ctx: KernelContext) -> list[Launch]:
    settings = _SETTINGS.pack(**{name: ctx.address(name) for name in _SETTINGS.fields})
    most = _PICKERS * ctx.device.gpu.processors // max(1, ctx.upper_bound(ctx.logits.meta.rows))
    sharers = max(1, min(most, ceil(ctx.logits.width, _CHUNK), _THREADS))
    settled = ctx.readable_before_wait("temperature", "top_k")
    return _choose(ctx, ctx.logits, settings, sharers, settled)
