"""Barriers between steps: only where a step touches memory that another thread may still use."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm import ops
from graphllm.backends import Bound, Operand
from graphllm.backends.cpu.runtime.barriers import barrier_flags
from graphllm.backends.cpu.runtime.step_interpreter import BARRIER, ONE_THREAD
from graphllm.graph.tensor import Meta, Tensor, Var, feed, weight

T = Var("T", 1, 1)
BIG, SMALL = 100_000, 64
ARENA = np.zeros(16 << 20, np.uint8)


def step(out: int, *sources: int, width: int = BIG) -> Bound:
    """A step whose operands are at these places of the arena, in units of the big row."""

    def place(at: int) -> Operand:
        meta = Meta.of((T, width), "f32")
        return Operand(Meta(meta.shape, meta.dtype, meta.strides, at * 4 * BIG), ARENA)

    leaves: list[Tensor] = [feed(f"x{at}", (T, width), "f32") for at in sources]
    node = ops.add(*leaves) if len(leaves) == 2 else ops.silu(*leaves)
    return Bound(node, None, tuple(map(place, sources)), place(out))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ([step(1, 0), step(2, 0)], [0, BARRIER]),  # both read 0
        ([step(1, 0), step(2, 1)], [BARRIER, BARRIER]),  # read after write
        ([step(1, 0), step(0, 2)], [BARRIER, BARRIER]),  # write after read
        ([step(1, 0), step(1, 2)], [BARRIER, BARRIER]),  # write after write
        ([step(1, 0), step(2, 0), step(3, 1)], [0, BARRIER, BARRIER]),  # not only the last
        ([step(1, 0, width=SMALL), step(2, 1, width=SMALL)], [ONE_THREAD, ONE_THREAD | BARRIER]),
        ([step(1, 0, width=SMALL), step(2, 1)], [ONE_THREAD | BARRIER, BARRIER]),
        ([step(1, 0), step(2, 3, width=SMALL), step(4, 2, width=SMALL)],
         [0, ONE_THREAD, ONE_THREAD | BARRIER]),
        ([step(1, 0), step(2, 3, width=SMALL), step(4, 5, 2)], [0, ONE_THREAD | BARRIER, BARRIER]),
        ([], []),
    ],
)  # fmt: skip
def test_barriers_are_where_needed_and_nowhere_else(steps, want):
    assert barrier_flags(steps) == want


@pytest.mark.parametrize("kind", ["a8_row", "f8_row"])
def test_a_scale_behind_the_last_row_is_read(kind):
    """A later step that writes it waits for all threads that read it."""
    rows, width = 3, 4096
    x = ops.quantise_act(feed("a", (rows, width), "f32"), dtype=kind)
    reads = ops.linear(x, weight("w", (64, width), "w8a8" if kind == "a8_row" else "fp8"))
    end = (rows - 1) * x.meta.strides[0] + width  # of the values of the last row
    operand = Operand(x.meta, ARENA)
    out = Meta(reads.meta.shape, reads.meta.dtype, reads.meta.strides, 8 << 20)
    first = Bound(reads, None, (operand, None, None), Operand(out, ARENA))  # type: ignore[arg-type]
    later = ops.scale(feed("b", (rows, width), "f32"), factor=2.0)
    place = Meta(later.meta.shape, later.meta.dtype, later.meta.strides, end)
    source = Meta(later.meta.shape, later.meta.dtype, later.meta.strides, 9 << 20)
    second = Bound(later, None, (Operand(source, ARENA),), Operand(place, ARENA))  # type: ignore[arg-type]
    assert end < x.meta.nbytes and barrier_flags([first, second])[0] & BARRIER
