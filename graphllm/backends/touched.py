"""What a step of a plan reads and writes, as ranges of addresses: what may run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ops import get
from . import Bound, Operand

Span = tuple[int, int]  # addresses: first, one after the last


@dataclass(frozen=True)
class Touched:
    reads: list[Span]
    writes: list[Span]


def touched(step: Bound, address: Callable[[Operand], int]) -> Touched:
    """Of one step; ``address``: where an operand's first element lies."""
    written = get(step.node.op).written(step.node)
    given = [(i, _span(o, address(o))) for i, o in enumerate(step.inputs) if o is not None]
    reads = [span for _, span in given]
    writes = [span for i, span in given if i in written]
    if get(step.node.op).alias(step.node) is None:
        writes.append(_span(step.out, address(step.out)))
    if step.scratch is not None:
        writes.append(_span(step.scratch, address(step.scratch)))
    return Touched(reads, writes)


def _span(operand: Operand, start: int) -> Span:
    """The addresses between which the operand's elements lie, at its widest."""
    meta = operand.meta.bound()
    counts = [d for d in meta.shape if isinstance(d, int)]  # all, at their bounds
    if 0 in counts:
        return start, start
    if counts:
        counts[-1] //= meta.dtype.block
    last = sum((n - 1) * stride for n, stride in zip(counts, meta.strides))
    return start, start + last + meta.dtype.nbytes


def overlap(a: Sequence[Span], b: Sequence[Span]) -> bool:
    """Whether a range of ``a`` meets one of ``b``."""
    return any(x < v and u < y for x, y in a for u, v in b)
