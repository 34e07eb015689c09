"""Kernels of the ops fused with attention: rope_write before it, attention_quantise around it."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import requires_constant_factors
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import i32s, kernel, load_i64
from . import attention, quantize_rows
from .elementwise import thread_range
from .kv_cache import store
from .norm import normalize, rms_norm_factor
from .quantize import QuantiseArgs, quantise_kernel
from .rope import cos_sin_table, inverse_frequencies_address, pair_step, rotary_dims, rotate_head


class RopeWriteArgs(NamedTuple):
    """Argument block of the norm and rotation of q and k."""

    q: int
    q_stride: int
    k: int
    k_stride: int
    pos: int
    inverse_frequencies: int
    q_norm: int  # 0: q is not normed
    k_norm: int  # 0: k is not normed
    eps: float
    out: int
    keys: int  # workspace for the rotated keys
    rows: int  # address of the live count
    heads: int
    kv_heads: int
    width: int
    half: int  # pairs that are rotated
    step: int  # see `rotate_head`
    attention_factor: float
    scratch: int
    thread_scratch: int  # bytes of it for each thread


_read_rope_write = argument_reader(RopeWriteArgs)


@kernel
def _rope_write(p, thread, threads):
    """Apply the optional norms to the heads of q and k, and rotate them to ``out`` and ``keys``."""
    a = _read_rope_write(p)
    heads, kv_heads, width, half = a.heads, a.kv_heads, a.width, a.half
    first, last = thread_range(load_i64(a.rows), thread, threads)
    c = a.scratch + thread * a.thread_scratch
    s, normed = c + 4 * half, c + 8 * half
    for t in range(first, last):
        cos_sin_table(i32s(a.pos)[t], a.inverse_frequencies, half, a.attention_factor, c, s)
        for head in range(heads + kv_heads):
            if head < heads:
                x, weight = a.q + t * a.q_stride + 4 * head * width, a.q_norm
                y = a.out + 4 * (t * heads + head) * width
            else:
                x, weight = a.k + t * a.k_stride + 4 * (head - heads) * width, a.k_norm
                y = a.keys + 4 * (t * kv_heads + head - heads) * width
            if weight != 0:
                normalize(x, weight, rms_norm_factor(x, width, a.eps), 0, width, normed)
                x = normed
            rotate_head(x, y, width, half, a.step, c, s)


def _thread_nbytes(node: Tensor) -> int:
    """Bytes of scratch of a thread: cosines and sines, and a normed head."""
    return 4 * rotary_dims(node) + 4 * prod(node.src[0].meta.inner[1:])  # type: ignore[union-attr]


def _rope_write_scratch(node: Tensor, options: Options) -> int:
    """Bytes of the scratch of all threads, and of the rotated keys."""
    keys = node.src[1].meta.bound()  # type: ignore[union-attr]
    return thread_count(options) * _thread_nbytes(node) + 4 * prod(keys.shape)


@BACKEND.kernel(
    "rope_write",
    layout=dict.fromkeys(("q", "k", "v"), ROWS),
    scratch=_rope_write_scratch,
    when=requires_constant_factors,
)
def rope_write(ctx: KernelContext) -> list[Launch]:
    q, k, v, own = ctx.q, ctx.k, ctx.v, _thread_nbytes(ctx.node)
    (heads, width), (kv_heads, _) = q.meta.inner, k.meta.inner
    keys, rows = ctx.scratch + ctx.threads * own, ctx.live(q.meta.rows)
    block = RopeWriteArgs(
        q=q.address,
        q_stride=q.row_stride,
        k=k.address,
        k_stride=k.row_stride,
        pos=ctx.pos.address,
        inverse_frequencies=inverse_frequencies_address(ctx),
        q_norm=ctx.address("q_norm"),
        k_norm=ctx.address("k_norm"),
        eps=ctx.attrs["eps"],
        out=ctx.out.address,
        keys=keys,
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        half=rotary_dims(ctx.node) // 2,
        step=pair_step(ctx),
        attention_factor=ctx.attrs["attention_factor"],
        scratch=ctx.scratch,
        thread_scratch=own,
    )
    # All three launches share out rows alike, so each thread stores the keys that it rotated.
    return [
        Launch(_rope_write, block),
        store(ctx.k_pool, keys, 4 * kv_heads * width, ctx.slot, rows, overlaps_previous=True),
        store(ctx.v_pool, v.address, v.row_stride, ctx.slot, rows, overlaps_previous=True),
    ]


def _quantised_scratch(node: Tensor, options: Options) -> int:
    """Bytes of attention's result and of its scratch."""
    return _attended_nbytes(node) + attention.scratch(node, options)


def _attended_nbytes(node: Tensor) -> int:
    return aligned(4 * prod(node.meta.bound().shape))  # type: ignore[arg-type]


@BACKEND.kernel("attention_quantise", layout=attention.LAYOUT, scratch=_quantised_scratch)
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    rows, width = ctx.out.meta.rows, ctx.out.meta.inner[0]
    attended, scratch = ctx.scratch, ctx.scratch + _attended_nbytes(ctx.node)
    launches, out = attention.launches(ctx, attended, scratch), ctx.out
    if out.dtype in quantize_rows.BY_ROWS:
        meta, live = Meta.of((rows, width), F32), ctx.live(rows)
        quantise = quantize_rows.launch(
            meta, attended, 4 * width, live, out.address, out.row_stride, out.dtype
        )
        return [*launches, quantise]
    block = QuantiseArgs(
        x=attended,
        x_stride=4 * width,
        y=out.address,
        y_stride=out.row_stride,
        rows=ctx.live(rows),
        inner=1,
        k=width,
    )
    return [*launches, Launch(quantise_kernel(out.dtype.block), block)]
