"""argmax, and what it shares with sample and top_k: sort keys, and block maxima of logits.

Logits are compared as integers (`sort_key`), which vectorises and settles the order of NaN and -0.
The kernel for block maxima finds the largest key of every 64 logits on all threads. The kernel that
follows handles a row per thread and reads little else: the largest logit is in a block whose
maximum equals it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....graph.tensor import Tensor
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32_of_bits, helper, i32s, inlined, kernel, load_i64
from ..runtime.lazy_numba import int32, int64
from .elementwise import thread_range

BLOCK = 64
MIN_KEY, MAX_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)


@inlined
def sort_key(bits, nan):
    """An int32 that orders like the float32 with these bits; -0 equals 0, NaN becomes ``nan``."""
    size = bits & int32(0x7FFFFFFF)
    key = int32(0) - size if bits < int32(0) else size
    return nan if size > int32(0x7F800000) else key


@inlined
def value_of_key(key):
    """The float32 of a sort key that is not NaN's."""
    return f32_of_bits(key if key >= int32(0) else (int32(0) - key) | int32(-(2**31)))


@helper
def largest_key(keys, count):
    """The largest of ``count`` keys."""
    top = MIN_KEY
    for i in range(count):
        top = max(top, keys[i])
    return top


@helper
def first_index(bits, width, maxima, blocks, key, nan):
    """The lowest index whose key is ``key``, the largest of the row."""
    for b in range(blocks):
        if maxima[b] == key:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                if sort_key(bits[i], nan) == key:
                    return i
    return int64(0)


class RowArgs(NamedTuple):
    """Argument block of the kernels over rows of logits, with their block maxima."""

    x: int
    x_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int  # int32 [rows]


read_rows = argument_reader(RowArgs)


@helper
def _block_maxima(p, thread, threads, nan):
    """Find the largest key of each block of each row."""
    a = read_rows(p)
    first, last = thread_range(load_i64(a.rows) * a.blocks, thread, threads)
    out = i32s(a.maxima)
    for item in range(first, last):
        row, start = item // a.blocks, item % a.blocks * BLOCK
        bits = i32s(a.x + row * a.x_stride + start * 4)
        top = MIN_KEY
        for i in range(min(BLOCK, a.width - start)):
            top = max(top, sort_key(bits[i], nan))
        out[item] = top


@kernel
def _block_maxima_nan_least(p, thread, threads):
    _block_maxima(p, thread, threads, MIN_KEY)


@kernel
def block_maxima_nan_greatest(p, thread, threads):
    _block_maxima(p, thread, threads, MAX_KEY)


@kernel
def _argmax(p, thread, threads):
    a = read_rows(p)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        maxima = i32s(a.maxima + row * a.blocks * 4)
        key, bits = largest_key(maxima, a.blocks), i32s(a.x + row * a.x_stride)
        i32s(a.y)[row] = first_index(bits, a.width, maxima, a.blocks, key, MIN_KEY)


def maxima_nbytes(node: Tensor) -> int:
    """Bytes of the block maxima of all rows."""
    rows, width = node.sources[0].meta.bound().shape
    return -(-rows * -(-width // BLOCK) * 4 // 64) * 64  # type: ignore[operator]


def row_arguments(ctx: KernelContext, name: str) -> RowArgs:
    """Arguments for the logits operand ``name``; the maxima are at the start of the scratch."""
    logits = ctx.need(name)
    (width,) = logits.meta.inner
    return RowArgs(
        x=logits.address,
        x_stride=logits.row_stride,
        rows=ctx.live(logits.meta.rows),
        width=width,
        maxima=ctx.scratch,
        blocks=-(-width // BLOCK),
        y=ctx.out.address,
    )


@BACKEND.kernel("argmax", layout={"x": "rows"}, scratch=lambda node, options: maxima_nbytes(node))
def argmax(ctx: KernelContext) -> list[Launch]:
    block = row_arguments(ctx, "x")
    return [Launch(_block_maxima_nan_least, block), Launch(_argmax, block)]
