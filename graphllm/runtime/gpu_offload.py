"""GPU offload planning: how many layers a device with its own memory takes, decided before loading.

A model is divided into its numbered layers (by the scopes of its graph), the nodes before them and
the nodes after them (the output). The device takes parts from the end; the others are pinned to the
next backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arguments import as_int, invalid_argument
from ..backends import packed_nbytes
from ..compiler.placement import Pin
from ..compiler.plan import HOST, TRANSFER, Plan, Step
from ..graph import rewrite
from ..graph.op import get
from ..graph.tensor import WEIGHT, Tensor
from .executor import Executor

AUTO, ALL = "auto", "all"
# Reserve for logits of many rows, library workspaces, code, CUDA graphs and other processes.
MARGIN = 512 << 20  # bytes
# Granularity of allocations in bytes: of large ones (from half of that on), and of small ones.
_LARGE_GRAIN, _SMALL_GRAIN = 2 << 20, 512


def check_gpu_layers(name: str, gpu_layers: Any) -> int | str:
    """Return "auto", "all" or a count of layers, given as int or digits. RequestError otherwise."""
    if isinstance(gpu_layers, str):
        if gpu_layers in (AUTO, ALL):
            return gpu_layers
        number = int(gpu_layers) if gpu_layers.isascii() and gpu_layers.isdecimal() else None
    else:
        number = as_int(gpu_layers)
    if number is None or number < 0:
        raise invalid_argument(name, gpu_layers, "auto, all or a number of layers")
    return number


@dataclass(frozen=True)
class GpuOffload:
    """The outcome of GPU offload planning.

    Attributes:
        backend: backend with its own memory.
        fallback: backend of the other layers.
        layers: number of layers with steps on the backend.
        total: number of layers.
        first: number of layers, from the first on, that went to the fallback.
        output: whether the output is on the backend.
        requested: "auto", "all" or a number of layers.
        needed_bytes: memory that is needed on the device.
        needed_by_all_bytes: memory that all layers would need.
        free_bytes: memory that was free; None if unknown.
    """

    backend: str
    fallback: str
    layers: int
    total: int
    first: int
    output: bool
    requested: int | str
    needed_bytes: int
    needed_by_all_bytes: int
    free_bytes: int | None

    def __str__(self) -> str:
        if self.layers == self.total:
            return f"all {self.total} layers on {self.backend}: {self._room}"
        here = f"{self.layers} of {self.total} layers{' and the output' if self.output else ''}"
        there = f"the first {self.first} on {self.fallback}" if self.first else "the others pinned"
        why = f", all would need {_gb(self.needed_by_all_bytes)}" if self.first else ""
        if self.requested != AUTO:
            why = f", as asked with gpu_layers = {self.requested}"
        return f"{here} on {self.backend}, {there}: {self._room}{why}"

    @property
    def _room(self) -> str:
        free = "" if self.free_bytes is None else f" of {_gb(self.free_bytes)} free"
        return f"{_gb(self.needed_bytes)}{free} there"

    def as_dict(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "layers": self.layers,
            "of": self.total,
            "output": self.output,
            "needed_bytes": self.needed_bytes,
            "needed_by_all_bytes": self.needed_by_all_bytes,
            "free_bytes": self.free_bytes,
            "text": str(self),
        }


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


# ------------------------------------------------------------------------------------ model parts


def layer_scope(node: Tensor) -> str:
    """Return the numbered scope of a node, such as ``model.layers.3``; empty if there is none."""
    for scope in node.scopes:
        parts = scope.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                return ".".join(parts[: index + 1])
    return ""


@dataclass(frozen=True)
class LayerOrder:
    """Numbered scopes of a graph in the order of data flow, and the scopes before the first."""

    layers: tuple[str, ...]
    before: frozenset[str]

    @classmethod
    def of(cls, outputs: Mapping[str, Tensor]) -> LayerOrder:
        nodes = [n for n in rewrite.toposort(outputs.values()) if not n.is_leaf and not n.is_view]
        numbered = [n for n in nodes if layer_scope(n)]
        layers = tuple(dict.fromkeys(map(layer_scope, numbered)))
        needed = set(rewrite.toposort(numbered))
        others = [n for n in nodes if not layer_scope(n)]
        before = {scope for n in others if n in needed for scope in n.scopes}
        after = {scope for n in others if n not in needed for scope in n.scopes}
        return cls(layers, frozenset(before - after))

    def rank(self, node: Tensor) -> int:
        """Return the position of the part of ``node`` in the order of offloading; 0: the output."""
        name = layer_scope(node)
        if name:
            return len(self.layers) - self.layers.index(name)
        return len(self.layers) + 1 if self.before.intersection(node.scopes) else 0

    def pins(self, taken: int, backend: str) -> list[Pin]:
        """Return pins to ``backend`` for all parts but the first ``taken``, by rank."""
        on = min(max(taken - 1, 0), len(self.layers))
        why = f"not among the last {on} of {len(self.layers)} layers"
        if taken == 0:
            return [Pin("*", backend, why)]
        left = self.layers[: len(self.layers) - on]
        scopes = sorted(self.before) if taken < len(self.layers) + 2 else []
        return [Pin(pattern, backend, why) for pattern in (*(f"{n}.*" for n in left), *scopes)]


# ------------------------------------------------------------------------------------------- bytes


@dataclass
class MemoryEstimate:
    """Bytes that plans need in one memory.

    Attributes:
        parts: bytes of weights and state, by the lowest rank of the parts that read them.
        layers: numbered scopes with a step on the device.
        rest: bytes of everything else.
        packing: bytes needed temporarily while weights are packed.
    """

    parts: dict[int, int] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    rest: int = MARGIN
    packing: int = 0

    def of(self, taken: int) -> int:
        """Return the bytes needed by the first ``taken`` parts, by rank."""
        return self.rest + self.packing + sum(n for r, n in self.parts.items() if r < taken)

    @property
    def total(self) -> int:
        return self.of(1 + max(self.parts, default=0))


def estimate_memory(plans: Sequence[Plan], memory: str, order: LayerOrder) -> MemoryEstimate:
    """Estimate the bytes that ``plans`` need in ``memory``."""
    found, buffers = MemoryEstimate(), dict[object, tuple[int, int, bool]]()
    for plan in plans:
        for step in plan.steps:
            if step.memory != memory:
                continue
            if get(step.node.op).role != TRANSFER:
                found.layers |= {layer_scope(step.node)} - {""}
            rank = order.rank(step.node)
            for key, nbytes, packed in leaf_buffers(step):
                first = min(rank, buffers[key][0]) if key in buffers else rank
                buffers[key] = first, nbytes, packed
    for rank, nbytes, packed in buffers.values():
        found.parts[rank] = found.parts.get(rank, 0) + _rounded(nbytes)
        found.packing = max(found.packing, nbytes if packed else 0)
    found.rest += _rounded(max((plan.arena.get(memory, 0) for plan in plans), default=0))
    return found


def leaf_buffers(step: Step) -> list[tuple[tuple[str, object], int, bool]]:
    """Return ((leaf, pack function), bytes, whether packed) of the leaves that a step reads."""
    found: list[tuple[tuple[str, object], int, bool]] = []
    for index, source in enumerate(step.node.src):
        own = rewrite.root(source) if source is not None else None
        if own is None or not own.is_leaf:
            continue
        if own.op == WEIGHT:
            pack = step.kernel.pack.get(get(step.node.op).operand(index))
            found.append(((own.name, pack), packed_nbytes(pack, own.meta), pack is not None))
        else:
            found.append(((own.name, None), own.meta.bound().nbytes, False))
    return found


def _rounded(nbytes: int) -> int:
    grain = _LARGE_GRAIN if nbytes >= _LARGE_GRAIN // 2 else _SMALL_GRAIN
    return -(-nbytes // grain) * grain


# ---------------------------------------------------------------------------------------- planning


def plan_gpu_offload(
    executor: Executor,
    outputs: Mapping[str, Tensor],
    plans: Callable[[], Sequence[Plan]],
    requested: int | str = AUTO,
) -> GpuOffload | None:
    """Place the model of ``executor`` again if not all of it goes to the first backend.

    Args:
        executor: executor whose model has been placed.
        outputs: outputs of the model.
        plans: compiles the plans that must fit the memory.
        requested: "auto" (as much as fits), "all", or a number of parts from the end.

    Returns:
        The outcome; None if the first backend uses the host's memory.
    """
    device = executor.devices.of(executor.backends[0])
    memory = device.memory
    if memory == HOST:
        return None
    others = [b for b in executor.backends[1:] if executor.devices.memory_of(b) != memory]
    if not others:
        return None
    order, free = LayerOrder.of(outputs), device.free()
    all_parts = len(order.layers) + 2
    all_needs = needs = estimate_memory(plans(), memory, order)
    taken = all_parts
    if isinstance(requested, int) and requested <= len(order.layers):
        taken = requested
    elif requested == AUTO and free is not None:
        taken = next((n for n in range(all_parts, 0, -1) if all_needs.of(n) <= free), 0)
    while taken < all_parts:
        executor.place_model(outputs, order.pins(taken, others[0].name))
        needs = estimate_memory(plans(), memory, order)
        if requested != AUTO or taken == 0 or free is None or needs.total <= free:
            break
        taken -= 1
    total = len(order.layers)
    return GpuOffload(
        executor.backends[0].name, others[0].name, len(needs.layers), total,
        total - min(max(taken - 1, 0), total), taken > 0, requested, needs.total, all_needs.total,
        free,
    )  # fmt: skip
