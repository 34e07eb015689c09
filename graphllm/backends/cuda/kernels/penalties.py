"""Logit bias and penalties on the device."""

from __future__ import annotations

from ....backends.alignment import aligned
from ....graph.tensor import Tensor
from ... import ROWS
from .. import BACKEND
from ..runtime.arguments import ArgumentStruct
from ..runtime.device import KernelContext
from ..runtime.source import module
from ..runtime.work import Launch
from .sampling_filters import row_blocks

_MODULE = module("penalties")
_BIASES = ArgumentStruct("penalties.cu", "Biases")
_PENALTIES = ArgumentStruct("penalties.cu", "Penalties")
_THREADS = 256


def _grid(ctx: KernelContext) -> tuple[int, int]:
    rows = ctx.upper_bound(ctx.logits.meta.rows)
    return rows, row_blocks(ctx, rows, ctx.logits.width)


@BACKEND.kernel("bias_logits", layout={"logits": ROWS})
def bias_logits(ctx: KernelContext) -> Launch:
    x, lists = ctx.logits, ("ids", "allowed", "stop")
    sizes = {
        "id_count": ctx.ids.width,
        "allowed_count": ctx.allowed.width,
        "stop_count": ctx.stop.width,
    }
    addresses = {
        name: ctx.address(name) for name in (*lists, "bias", "count", "min_tokens", "mask")
    }
    args = (x.address, x.row_stride, ctx.out.address, ctx.live_address(x.meta.rows), x.width,
            _BIASES.pack(**addresses, **sizes))  # fmt: skip
    return Launch(_MODULE["bias_logits"], _grid(ctx), (_THREADS,), args)


def _repetitions_nbytes(node: Tensor) -> int:
    """Bytes of a number for each entry of the histories."""
    width = int(node.sources[1].meta.inner[0])
    return aligned(4 * width * KernelContext.upper_bound(node.meta.rows))


@BACKEND.kernel(
    "penalise", layout={"logits": ROWS}, scratch=lambda node, options: _repetitions_nbytes(node)
)
def penalise(ctx: KernelContext) -> list[Launch]:
    x, live = ctx.logits, ctx.live_address(ctx.logits.meta.rows)
    names = ("history", "length", "breakers", "factors", "windows")
    packed = _PENALTIES.pack(
        **{name: ctx.address(name) for name in names},
        ring=ctx.history.width,
        breaker_count=ctx.breakers.width,
    )
    args = (x.address, x.row_stride, ctx.out.address, live, x.width, packed, ctx.scratch)
    rows = (ctx.upper_bound(x.meta.rows),)
    return [
        Launch(_MODULE["repetitions"], rows, (_THREADS,), (packed, live, ctx.scratch)),
        Launch(_MODULE["penalise"], _grid(ctx), (_THREADS,), args),
    ]
