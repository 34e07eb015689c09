"""Which operands a kernel may read before it waits for the launches in front of it.

With programmatic dependent launch a kernel may start while its predecessors still run. It waits
with `griddepcontrol.wait`, which returns when they have completed and their writes are visible.
Before that instruction a kernel may read an operand only if no launch that may still run writes it.
`InFlight` computes this from what the steps of a segment write, and from when each launch lets its
successor start. No kernel writes before it waits, so these reads are the only hazard. A kernel may
read more speculatively, and read it again after its wait, as moe_add does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ....ops import get
from ... import Bound, Operand
from ...kernel_context import span


@dataclass(frozen=True, eq=False)
class Region:
    """Bytes [start, stop) of a device buffer, which is compared by identity."""

    buffer: Any
    start: int
    stop: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Region) or self.buffer is not other.buffer:
            return False
        return (self.start, self.stop) == (other.start, other.stop)

    def __hash__(self) -> int:
        return hash((self.start, self.stop))

    def overlaps(self, other: Region) -> bool:
        same = self.buffer is other.buffer
        return same and self.start < other.stop and other.start < self.stop


def region(operand: Operand) -> Region:
    """All bytes that the operand may cover, at the upper bounds of its Vars."""
    start = operand.meta.offset
    return Region(operand.buffer, start, start + span(operand.meta.bound()))


def written(step: Bound) -> tuple[Region, ...]:
    """What the step writes: its result, its workspace, and the states that it modifies."""
    states = [step.inputs[index] for index in get(step.node.op).written(step.node)]
    operands = (step.out, step.scratch, *states)
    return tuple(region(operand) for operand in operands if operand is not None)


@dataclass(frozen=True)
class Ordering:
    """When a launch starts, and when it lets its successor start.

    Attributes:
        overlaps: the launch may start before its predecessors have completed.
        triggers_after_wait: its successor starts only after the launch has waited for its own
            predecessors, so these have completed by then.
    """

    overlaps: bool = True
    triggers_after_wait: bool = False


class InFlight:
    """The launches of a segment that may still run when the next one starts."""

    def __init__(self) -> None:
        # Once each: launches of all layers write the same regions of the arena.
        self._writes = set[Region]()

    def add(self, writes: tuple[Region, ...], ordering: Ordering) -> None:
        """Append a launch, and drop those that have completed when its successor starts."""
        if not ordering.overlaps or ordering.triggers_after_wait:
            self._writes.clear()
        self._writes.update(writes)

    def drain(self) -> None:
        """Note that the next launch starts after everything before it has completed."""
        self._writes.clear()

    def writes_any(self, regions: Iterable[Region]) -> bool:
        """Whether a launch that may still run writes one of the regions."""
        return any(wanted.overlaps(each) for wanted in regions for each in self._writes)
