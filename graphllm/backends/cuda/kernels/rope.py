"""Position encodings: rotary, sinusoidal, and two-dimensional positions."""

from __future__ import annotations

from ....ops.rope import inverse_frequencies, sinusoid_frequencies
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch, ceil
from .elementwise import rows_grid

_MODULE = module("rope")
_ROTATION = ArgumentStruct("rope.cuh", "Rotation")
_THREADS = 128


def rotation(ctx: KernelContext, head: int) -> bytes:
    """The rotation of heads of ``head`` elements."""
    attrs = ctx.attrs
    dims = attrs["dims"] or head
    inverse = ctx.constant(inverse_frequencies(dims, attrs["base"], attrs["scale"]))
    interleaved = attrs["style"] == "interleaved"
    return _ROTATION.pack(
        pos=ctx.need("pos").address, inverse=inverse, factors=ctx.address("factors"),
        half=dims // 2, interleaved=interleaved, attention_factor=attrs["attention_factor"],
    )  # fmt: skip


@BACKEND.kernel("rope", layout={"x": ROWS}, dtypes={"x": "f32"})
def rope(ctx: KernelContext) -> Launch:
    x, head = ctx.x, ctx.x.meta.inner[-1]
    args = (x.address, x.row_stride, ctx.out.address, ctx.live_address(x.meta.rows), x.width, head,
            rotation(ctx, head))  # fmt: skip
    return Launch(_MODULE["rope"], rows_grid(ctx, x, _THREADS), (_THREADS,), args)


@BACKEND.kernel("positions_2d")
def positions_2d(ctx: KernelContext) -> Launch:
    rows, sequences = ctx.pos.meta.rows, ctx.prefix_len.meta.rows
    addresses = [ctx.address(name) for name in ("pos", "q_start", "prefix_len")]
    args = (
        *addresses,
        ctx.out.address,
        ctx.live_address(rows),
        ctx.live_address(sequences),
        ctx.attrs["part"],
    )
    grid = (ceil(ctx.upper_bound(rows), _THREADS),)
    return Launch(_MODULE["positions_2d"], grid, (_THREADS,), args)


@BACKEND.kernel("sinusoids")
def sinusoids(ctx: KernelContext) -> Launch:
    width, rows = ctx.out.width, ctx.pos.meta.rows
    frequencies = ctx.constant(sinusoid_frequencies(width))
    args = (ctx.pos.address, frequencies, ctx.out.address, ctx.live_address(rows), width,
            ctx.attrs["offset"])  # fmt: skip
    return Launch(_MODULE["sinusoids"], rows_grid(ctx, ctx.out, _THREADS), (_THREADS,), args)
