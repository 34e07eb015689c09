"""Rotation of activations: `graphllm.ops.rotation`, also with quantisation."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ....graph.dtype import DTYPES
from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import kernel, load_i64
from ..simd.hadamard import rotate_blocks
from . import quantize
from .elementwise import thread_range
from .quantize_rows import BY_ROWS


class HadamardArgs(NamedTuple):
    """Argument block of `hadamard`."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live count
    width: int  # elements of a row


_read = argument_reader(HadamardArgs)


@kernel
def _hadamard(p, thread, threads):
    a = _read(p)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        rotate_blocks(a.x + row * a.x_stride, a.y + 4 * row * a.width, a.width)


@BACKEND.kernel("hadamard", dtypes={"x": "f32"}, layout={"x": ROWS})
def hadamard(ctx: KernelContext) -> Launch:
    x = ctx.x
    args = x.address, x.row_stride, ctx.out.address, ctx.live(x.meta.rows), prod(x.meta.inner)
    return Launch(_hadamard, HadamardArgs(*args))


def _in_blocks(node: Tensor, options: Options) -> str | None:
    by_rows = DTYPES[node.attrs["dtype"]] in BY_ROWS
    return "results are quantised by rows" if by_rows else None


@BACKEND.kernel("hadamard_quantise", dtypes={"x": "f32"}, layout={"x": ROWS}, when=_in_blocks)
def hadamard_quantise(ctx: KernelContext) -> Launch:
    return quantize.launch_act(ctx, rotated=True)
