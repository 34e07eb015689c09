"""Kernels of the fused ops before and after attention: `graphllm.ops.fused.attention`."""

from __future__ import annotations

from math import prod

from ....backends.alignment import aligned
from ....graph.tensor import Tensor
from ... import ROWS, Options
from ...kernel_context import requires_constant_factors
from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.isa import thread_count
from ..runtime.jit import args, as_f32, f32_bits, i32s, kernel, load_i64
from . import attention
from .elementwise import thread_range
from .fused_linear import normalize, rms_norm_factor
from .kv_cache import store
from .quantize import quantise_kernel
from .rope import cos_sin_table, inverse_frequencies_address, rotary_dims, rotate_head


@kernel
def _rope_write(p, thread, threads):
    """Heads of q and k normed, if they are, and turned: q's to their place, k's to a workspace."""
    w = args(p, 20)
    q, q_stride, k, k_stride, pos, inverse, q_norm, k_norm, eps = w[:9]
    out, keys, rows_at, heads, kv_heads, width, half, step, attention_factor, own, own_size = w[9:]
    first, last = thread_range(load_i64(rows_at), thread, threads)
    c = own + thread * own_size
    s, room = c + 4 * half, c + 8 * half
    for t in range(first, last):
        cos_sin_table(i32s(pos)[t], inverse, half, as_f32(attention_factor), c, s)
        for head in range(heads + kv_heads):
            if head < heads:
                x, weight = q + t * q_stride + 4 * head * width, q_norm
                y = out + 4 * (t * heads + head) * width
            else:
                x, weight = k + t * k_stride + 4 * (head - heads) * width, k_norm
                y = keys + 4 * (t * kv_heads + head - heads) * width
            if weight != 0:
                normalize(x, weight, rms_norm_factor(x, width, as_f32(eps)), 0, width, room)
                x = room
            rotate_head(x, y, width, half, step, c, s)


def _own_nbytes(node: Tensor) -> int:
    """A thread's memory: cosines and sines, and a normed head."""
    return 4 * rotary_dims(node) + 4 * prod(node.src[0].meta.inner[1:])  # type: ignore[union-attr]


def _rope_write_scratch(node: Tensor, options: Options) -> int:
    """Every thread's memory, and the turned keys."""
    keys = node.src[1].meta.bound()  # type: ignore[union-attr]
    return thread_count(options) * _own_nbytes(node) + 4 * prod(keys.shape)


@BACKEND.kernel(
    "rope_write",
    layout=dict.fromkeys(("q", "k", "v"), ROWS),
    scratch=_rope_write_scratch,
    when=requires_constant_factors,
)
def rope_write(ctx: KernelContext) -> list[Launch]:
    q, k, v, own = ctx.q, ctx.k, ctx.v, _own_nbytes(ctx.node)
    (heads, width), (kv_heads, _) = q.meta.inner, k.meta.inner
    step = 1 if ctx.attrs["style"] == "half" else 2
    keys, rows = ctx.scratch + ctx.threads * own, ctx.live(q.meta.rows)
    words = [
        q.address,
        q.row_stride,
        k.address,
        k.row_stride,
        ctx.pos.address,
        inverse_frequencies_address(ctx),
    ]
    words += [ctx.address("q_norm"), ctx.address("k_norm")]
    words += [f32_bits(ctx.attrs["eps"]), ctx.out.address, keys, rows, heads, kv_heads, width]
    words += [
        rotary_dims(ctx.node) // 2,
        step,
        f32_bits(ctx.attrs["attention_factor"]),
        ctx.scratch,
        own,
    ]
    # Rows are shared out alike: each thread stores the keys that it turned.
    return [
        Launch(_rope_write, words),
        store(ctx.k_pool, keys, 4 * kv_heads * width, ctx.slot, rows, overlaps_previous=True),
        store(ctx.v_pool, v.address, v.row_stride, ctx.slot, rows, overlaps_previous=True),
    ]


def _quantised_scratch(node: Tensor, options: Options) -> int:
    """Attention's result, and its own."""
    return _attended_nbytes(node) + attention.scratch(node, options)


def _attended_nbytes(node: Tensor) -> int:
    return aligned(4 * prod(node.meta.bound().shape))  # type: ignore[arg-type]


@BACKEND.kernel("attention_quantise", layout=attention.LAYOUT, scratch=_quantised_scratch)
def attention_quantise(ctx: KernelContext) -> list[Launch]:
    rows, width = ctx.out.meta.rows, ctx.out.meta.inner[0]
    attended, own = ctx.scratch, ctx.scratch + _attended_nbytes(ctx.node)
    parts = attention.launches(ctx, attended, own)
    words = [attended, 4 * width, ctx.out.address, ctx.out.row_stride, ctx.live(rows), 1, width]
    return [*parts, Launch(quantise_kernel(ctx.out.dtype.block), words)]
