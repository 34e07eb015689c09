"""From logits to token ids, on the device: `sampling.cu` says how."""

from __future__ import annotations

import struct

from ....backends.alignment import aligned
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.device import KernelContext, OperandRef
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE, _PENALTIES = module("sampling"), module("penalties")
_THREADS = 1024  # of a block of `pick`; slices of a row, at most; pieces of it, at most
_WARPS = 8  # of a block of `peaks`, with a slice each
_PIECE = 2048  # logits of a wide row that a block does, at least
_WIDE = 8 * (2048 + 2 + _THREADS + 3 + (1 << 14))  # bytes of the struct Wide
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed", "count")
_COLUMNS = 256  # threads of a block of `penalise`; each copies four logits


def _peaks(node: Tensor) -> int:
    """Bytes of the largest keys of all slices."""
    return aligned(4 * _THREADS * KernelContext.upper_bound(node.meta.rows))


def _wide(node: Tensor) -> int:
    """Bytes that the blocks of wide rows share."""
    return _WIDE * KernelContext.upper_bound(node.meta.rows)


def _chosen(ctx: KernelContext, x: OperandRef, settings: bytes, pieces: int = 0) -> list[Launch]:
    """The kernels that find an id for each row; ``pieces`` of wide rows, if there may be such."""
    rows, slice_ = ctx.upper_bound(x.meta.rows), 32 * ceil(x.width, 32 * _THREADS)
    blocks = ceil(ceil(x.width, slice_), _WARPS)
    wide = ctx.scratch + _peaks(ctx.node) if pieces else 0
    row = (
        x.address,
        x.row_stride,
        x.width,
        settings,
        ctx.live_address(x.meta.rows),
        ctx.scratch,
        wide,
    )
    drawing, out = (rows, max(1, pieces)), (*row, ctx.out.address)
    made = [
        Launch(_MODULE["peaks"], (rows, blocks), (32 * _WARPS,), row),
        Launch(_MODULE["pick"], drawing, (_THREADS,), out),
    ]
    return [*made, Launch(_MODULE["finish"], drawing, (_THREADS,), out)] if pieces else made


@BACKEND.kernel("argmax", layout={"x": ROWS}, scratch=lambda node, options: _peaks(node))
def argmax(ctx: KernelContext) -> list[Launch]:
    return _chosen(ctx, ctx.x, bytes(8 * len(_SETTINGS)))


@BACKEND.kernel(
    "sample", layout={"logits": ROWS}, scratch=lambda node, options: _peaks(node) + _wide(node)
)
def sample(ctx: KernelContext) -> list[Launch]:
    settings, width = struct.pack("<6Q", *map(ctx.address, _SETTINGS)), ctx.logits.width
    piece = _PIECE * ceil(width, _PIECE * _THREADS)
    return _chosen(ctx, ctx.logits, settings, ceil(width, piece))


@BACKEND.kernel("penalise", layout={"logits": ROWS})
def penalise(ctx: KernelContext) -> Launch:
    x = ctx.logits
    names = ("history", "count", "stop", "repeat", "presence", "frequency", "min_tokens")
    penalties = struct.pack(
        "<7Q2i", *map(ctx.address, names), ctx.history.meta.inner[0], ctx.stop.meta.shape[0]
    )
    args = (
        x.address,
        x.row_stride,
        ctx.out.address,
        ctx.live_address(x.meta.rows),
        x.width,
        penalties,
    )
    grid = (ctx.upper_bound(x.meta.rows), ceil(x.width, 4 * _COLUMNS))
    return Launch(_PENALTIES["penalise"], grid, (_COLUMNS,), args)
