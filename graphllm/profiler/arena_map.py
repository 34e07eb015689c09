"""Memory map of a plan's arenas: offset, size and lifetime of every buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..compiler.plan import Allocation, Plan
from ..graph import rewrite
from ..graph.tensor import Tensor


def arenas(plan: Plan) -> list[dict[str, Any]]:
    """Return size and buffers of the arena of each memory.

    A buffer has ``name``, ``offset`` and ``nbytes``, and is alive from step ``first`` to ``last``.
    """
    spans: dict[str, list[dict[str, Any]]] = {memory: [] for memory in plan.arena}
    for name, place, first, last in _buffers(plan):
        own = {"offset": place.offset, "nbytes": place.nbytes, "first": first, "last": last}
        spans[place.memory].append({"name": name, **own})
    return [
        {"memory": memory, "nbytes": nbytes, "spans": spans[memory]}
        for memory, nbytes in plan.arena.items()
    ]


def _buffers(plan: Plan) -> Iterator[tuple[str, Allocation, int, int]]:
    """Yield name, place, first and last step of every intermediate and workspace."""
    last: dict[Tensor, int] = {}
    for index, step in enumerate(plan.steps):
        last.update(dict.fromkeys(map(rewrite.root, (step.node, *step.node.sources)), index))
    last.update(dict.fromkeys(map(rewrite.root, plan.outputs.values()), len(plan.steps) - 1))
    for index, step in enumerate(plan.steps):
        name = f"{step.node.op} {step.node.scope}".strip()
        if step.node in plan.allocations:
            yield name, plan.allocations[step.node], index, last[step.node]
        if index in plan.scratch:
            yield f"{name} (workspace)", plan.scratch[index], index, index
