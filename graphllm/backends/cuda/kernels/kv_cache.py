"""Writes to the KV cache: kv_write, rope_write (norms and rotation before it), copy_blocks."""

from __future__ import annotations

from ....graph.dtype import CACHED
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext, OperandRef
from ..runtime.pool_layout import scales_offset
from ..runtime.source import Module, module
from ..runtime.work import MOSTLY_CACHE, Launch, ceil
from .rope import rotation

_POOL = ArgumentStruct("kv_cache.cuh", "Pool")
_HEADS = ArgumentStruct("head_rotation.cuh", "Heads")
_THREADS = 128
_COPY_THREADS = 256
_WARPS = 4  # of a block of the kernels for whole heads
_BLOCKS = 2048  # thread blocks that are resident at a time on a GPU of 132 multiprocessors
# Of rope_write for decode: blocks of attention start beside them, and fewer angles are computed.
_DECODE_BLOCKS, _DECODE_ROWS = 512, 128
WHOLE_HEADS = (64, 128, 256)  # head dimensions of these kernels


def pool_argument(pool: OperandRef, slot: OperandRef) -> bytes:
    """A pool and the slot of each token."""
    return _POOL.pack(
        at=pool.address, stride=pool.row_stride, slot=slot.address,
        scales=scales_offset(pool.meta), width=pool.meta.inner[-1],
    )  # fmt: skip


def _module(kind: str) -> Module:
    """The kernels for pools of dtype ``kind``."""
    return module("kv_cache", POOL=CACHED.index(kind))


@BACKEND.kernel("kv_write", layout={"x": ROWS}, dtypes={"pool": CACHED, "x": "f32"})
def kv_write(ctx: KernelContext) -> Launch:
    x = ctx.x
    heads, width = x.meta.inner
    rows, threads = x.meta.rows, min(_THREADS, 32 * ceil(width, 32))
    args = (
        pool_argument(ctx.pool, ctx.slot), x.address, x.row_stride, ctx.live_address(rows), width,
    )  # fmt: skip
    return Launch(
        _module(ctx.pool.dtype.name)["kv_write"], (ctx.upper_bound(rows), heads), (threads,), args
    )


@BACKEND.kernel("copy_blocks", dtypes={"pool": CACHED})
def copy_blocks(ctx: KernelContext) -> Launch:
    pool, source = ctx.pool, ctx.source
    nbytes = ctx.attrs["block"] * pool.row_stride
    word = next(size for size in (16, 4, 2) if (nbytes | pool.address) % size == 0)
    words, count = nbytes // word, ctx.upper_bound(source.meta.rows)
    args = (pool.address, source.address, ctx.target.address, ctx.live_address(source.meta.rows))
    grid = (count, min(ceil(words, _COPY_THREADS), ceil(_BLOCKS, max(count, 1))))
    kernel = _module(pool.dtype.name)[f"copy_blocks_{word}"]
    return Launch(kernel, grid, (_COPY_THREADS,), (*args, words))


def heads_argument(x: OperandRef, norm: int) -> bytes:
    """Heads and the address of their norm's weight (0: none)."""
    return _HEADS.pack(x=x.address, stride=x.row_stride, norm=norm, count=x.meta.inner[0])


def different_heads(node: Tensor, options: Options) -> str | None:
    """Why one kernel cannot rotate and write the heads of a step; None if it can."""
    widths = {s.meta.inner[-1] for s in node.sources[:3]}
    kinds = {s.dtype.name for s in node.sources[4:6]}
    if len(kinds) > 1:
        return f"pools of {' and '.join(sorted(kinds))}"
    return None if len(widths) == 1 else f"heads have {len(widths)} widths"


def rotates_whole_heads(node: Tensor) -> bool:
    """Whether the kernels for whole heads support the node's heads."""
    width = node.sources[0].meta.inner[-1]
    return node.attrs["dims"] in (0, width) and width in WHOLE_HEADS


@BACKEND.kernel(
    "rope_write",
    layout=dict.fromkeys(("q", "k", "v"), ROWS),
    dtypes={"k_pool": CACHED, "v_pool": CACHED},
    when=different_heads,
)
def rope_write(ctx: KernelContext) -> Launch:
    q, k, width, attrs = ctx.q, ctx.k, ctx.q.meta.inner[-1], ctx.attrs
    heads, rows = q.meta.inner[0] + 2 * k.meta.inner[0], ctx.upper_bound(q.meta.rows)
    eps, live = float(attrs["eps"]), ctx.live_address(q.meta.rows)
    args = (
        heads_argument(q, ctx.address("q_norm")), heads_argument(k, ctx.address("k_norm")),
        heads_argument(ctx.v, 0),
        ctx.out.address, pool_argument(ctx.k_pool, ctx.slot),
        pool_argument(ctx.v_pool, ctx.slot), live,
    )  # fmt: skip
    made = _module(ctx.k_pool.dtype.name)
    if rotates_whole_heads(ctx.node):
        # With many tokens a warp rotates several heads, for which it computes the angles once.
        resident = _DECODE_BLOCKS if rows <= _DECODE_ROWS else _BLOCKS
        blocks = min(ceil(heads, _WARPS), ceil(resident, rows))
        kernel = made[f"rope_write_{width // 64}"]
        more = (eps, ctx.readable_before_wait("slot", "pos"), rotation(ctx, width))
        early = [ref for ref in map(ctx.op, ("factors", "q_norm", "k_norm")) if ref is not None]
        return Launch(
            kernel, (rows, blocks), (32 * _WARPS,), (*args, *more),
            prefetches=early, shared_percent=MOSTLY_CACHE,
        )  # fmt: skip
    threads = min(256, 32 * ceil(width, 32))
    last = (width, eps, rotation(ctx, width))
    return Launch(made["rope_write"], (rows, heads), (threads,), (*args, *last), 4 * width)


for _kind in CACHED:  # so that tests compile them
    _module(_kind)
