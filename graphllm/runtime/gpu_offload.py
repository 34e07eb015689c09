"""How much of a model a device with a memory of its own takes, decided before anything is loaded.

A model's pieces are its numbered layers, as the scopes of its graph tell them apart, and all that
comes after them. A device takes the last pieces; the others are pinned to the next backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..arguments import as_int, invalid_argument
from ..compiler.placement import Pin
from ..compiler.plan import HOST, TRANSFER, Plan, Step
from ..graph import rewrite
from ..graph.op import get
from ..graph.tensor import WEIGHT, Tensor
from .executor import Executor

AUTO, ALL = "auto", "all"
# Left free: logits of many rows, library workspaces, machine code, graphs, and what others ask for.
MARGIN = 512 << 20
_GRAIN, _SMALL = 2 << 20, 512  # drivers round buffers up to these, from half of the larger on


def check_gpu_layers(name: str, gpu_layers: Any) -> int | str:
    """``auto``, ``all`` or a count, which may be its digits. RequestError for anything else."""
    if isinstance(gpu_layers, str):
        if gpu_layers in (AUTO, ALL):
            return gpu_layers
        number = int(gpu_layers) if gpu_layers.isascii() and gpu_layers.isdecimal() else None
    else:
        number = as_int(gpu_layers)
    if number is None or number < 0:
        raise invalid_argument(name, gpu_layers, "auto, all or a number of layers from 0 on")
    return number


@dataclass(frozen=True)
class GpuOffload:
    """What went to a device: ``layers`` of ``total`` numbered ones, of which the ``first`` went to
    ``others``, and the ``output`` after them; bytes that they need there, that all would need, and
    that were free."""

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


# ------------------------------------------------------------------------------------------ pieces


def layer_scope(node: Tensor) -> str:
    """The numbered scope that a node is in, as ``model.layers.3``; empty where it is in none."""
    for scope in node.scopes:
        parts = scope.split(".")
        for index, part in enumerate(parts):
            if part.isdecimal():
                return ".".join(parts[: index + 1])
    return ""


@dataclass(frozen=True)
class LayerOrder:
    """A graph's numbered scopes in the order of the data, and the scopes of what comes before."""

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
        """How many pieces are taken before this one: those at the end come first."""
        name = layer_scope(node)
        if name:
            return len(self.layers) - self.layers.index(name)
        return len(self.layers) + 1 if self.before.intersection(node.scopes) else 0

    def pins(self, taken: int, backend: str) -> list[Pin]:
        """What is not among the first ``taken`` of the pieces, by rank, goes to ``backend``."""
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
    """Bytes that plans need in one memory: of weights and state by rank of the piece that is taken
    first of those that read them, of everything else, and while weights are packed."""

    pieces: dict[int, int] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)  # of which some step is there
    rest: int = MARGIN
    packing: int = 0

    def of(self, taken: int) -> int:
        return self.rest + self.packing + sum(n for r, n in self.pieces.items() if r < taken)

    @property
    def total(self) -> int:
        return self.of(1 + max(self.pieces, default=0))


def estimate_memory(plans: Sequence[Plan], memory: str, pieces: LayerOrder) -> MemoryEstimate:
    """What these plans need in ``memory``."""
    found, buffers = MemoryEstimate(), dict[object, tuple[int, int, bool]]()
    for plan in plans:
        for step in plan.steps:
            if step.memory != memory:
                continue
            if get(step.node.op).role != TRANSFER:
                found.layers |= {layer_scope(step.node)} - {""}
            rank = pieces.rank(step.node)
            for key, nbytes, packed in leaf_buffers(step):
                first = min(rank, buffers[key][0]) if key in buffers else rank
                buffers[key] = first, nbytes, packed
    for rank, nbytes, packed in buffers.values():
        found.pieces[rank] = found.pieces.get(rank, 0) + _rounded(nbytes)
        found.packing = max(found.packing, nbytes if packed else 0)
    found.rest += _rounded(max((plan.arena.get(memory, 0) for plan in plans), default=0))
    return found


def leaf_buffers(step: Step) -> list[tuple[tuple[str, object], int, bool]]:
    """((leaf, form), bytes, whether it is packed) of the leaves that a step reads."""
    found: list[tuple[tuple[str, object], int, bool]] = []
    for index, source in enumerate(step.node.src):
        own = rewrite.root(source) if source is not None else None
        if own is None or not own.is_leaf:
            continue
        nbytes = own.meta.bound().nbytes
        if own.op == WEIGHT:
            pack = step.kernel.pack.get(get(step.node.op).operand(index))
            found.append(((own.name, pack), nbytes, pack is not None))
        else:
            found.append(((own.name, None), nbytes, False))
    return found


def _rounded(nbytes: int) -> int:
    grain = _GRAIN if nbytes >= _GRAIN // 2 else _SMALL
    return -(-nbytes // grain) * grain


# --------------------------------------------------------------------------------------------- fit


def plan_gpu_offload(
    executor: Executor,
    outputs: Mapping[str, Tensor],
    plans: Callable[[], Sequence[Plan]],
    asked: int | str = AUTO,
) -> GpuOffload | None:
    """Place the adopted ``outputs`` anew if not all of them go to the first backend.

    ``plans`` compiles those that are to have room. ``asked``: ``auto``, all that fits; ``all``; or
    a count of pieces from the end. None where the first backend works in the host's memory.
    """
    device = executor.devices.of(executor.backends[0])
    memory = device.memory
    if memory == HOST:
        return None
    behind = [b for b in executor.backends[1:] if executor.devices.memory_of(b) != memory]
    if not behind:
        return None
    pieces, free = LayerOrder.of(outputs), device.free()
    everything = len(pieces.layers) + 2
    whole = needs = estimate_memory(plans(), memory, pieces)
    taken = everything
    if isinstance(asked, int) and asked <= len(pieces.layers):
        taken = asked
    elif asked == AUTO and free is not None:
        taken = next((n for n in range(everything, 0, -1) if whole.of(n) <= free), 0)
    while taken < everything:
        executor.place_model(outputs, pieces.pins(taken, behind[0].name))
        needs = estimate_memory(plans(), memory, pieces)
        if asked != AUTO or taken == 0 or free is None or needs.total <= free:
            break
        taken -= 1
    total = len(pieces.layers)
    return GpuOffload(
        executor.backends[0].name, behind[0].name, len(needs.layers), total,
        total - min(max(taken - 1, 0), total), taken > 0, asked, needs.total, whole.total, free,
    )  # fmt: skip
