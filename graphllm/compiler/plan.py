"""Compilation of a placed graph to a flat plan: narrow, select kernels, lower, fuse, plan memory.

plan = compile_plan(placement, bounds)  # once per bucket; selects kernels, never backends
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..backends import Backend, Kernel
from ..errors import PlacementError
from ..graph import rewrite
from ..graph.dtype import DType
from ..graph.fused_op import decompose
from ..graph.op import get, role
from ..graph.tensor import INPUT, WEIGHT, Meta, Tensor, Var
from . import fusion, memory
from .placement import Choice, Placement, choose

HOST = "host"  # the memory that every device can copy from and to
LAYOUT, TRANSFER = "layout", "transfer"  # roles of ops that lowering inserts

# ------------------------------------------------------------------------------------------- lower


@dataclass(frozen=True)
class Step:
    """One kernel call of a plan, with its sources in ``memory``."""

    node: Tensor
    kernel: Kernel
    choice: Choice
    memory: str

    @property
    def backend(self) -> Backend:
        return self.choice.backend

    @property
    def weight_formats(self) -> str:
        """Formats of its weight matrices, joined by "+"; empty if it has none."""
        return "+".join(dict.fromkeys(kind.name for kind in self._matrices()))

    @property
    def integer(self) -> bool:
        """Whether it multiplies int8 activations by quantised weights."""
        kinds = (s.dtype.name for s in self.node.sources if s.base.op != WEIGHT)
        return any(k.quantised for k in self._matrices()) and any(k[:3] == "a8_" for k in kinds)

    def _matrices(self) -> list[DType]:
        sources = self.node.sources
        return [s.dtype for s in sources if s.base.op == WEIGHT and s.meta.ndim > 1]

    @property
    def results(self) -> list[Meta]:
        """Metas of its results, without the states that a fused op writes."""
        if not get(self.node.op).fusion:
            return [self.node.meta]
        own = decompose(self.node)
        return [r.meta for r, state in zip(own.results, own.states) if state is None]


class _Lowering:
    """Selects kernels and inserts the nodes they need: lowered sources, layout copies, transfers.

    Inserted nodes are interned, so that all users of one activation share one copy of it.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.intern = rewrite.Interner()
        self.steps: dict[Tensor, Step] = {}
        self.memory: dict[
            Tensor, str
        ] = {}  # of a root node; of one that is never written, by its first use

    def lower(self, node: Tensor, choice: Choice | None) -> Tensor:
        """Return the lowered form of ``node``, whose sources are already lowered."""
        if node.is_leaf or node.is_view:
            return self.intern(node)
        assert choice is not None
        kernel = self._kernel(choice.backend, node)
        src = kernel.lower(node, self.placement.options) if kernel.lower else node.src
        here = self._source_memory(node, choice.backend)
        src = tuple(s and self._adapt(node, kernel, i, s, choice, here) for i, s in enumerate(src))
        lowered = self.intern(rewrite.substitute(node, src))
        if lowered is not node:
            kernel = self._kernel(choice.backend, lowered)
        self._add(lowered, kernel, choice)
        return lowered

    def _add(self, node: Tensor, kernel: Kernel, choice: Choice) -> None:
        memory = self._source_memory(node, choice.backend)
        self.steps[node] = Step(node, kernel, choice, memory)
        target = node.attrs["memory"] if _transfers(node) else memory
        self.memory.setdefault(rewrite.root(node), target)

    # -- `fusion.KernelSelector`
    def select_fused(self, node: Tensor, parts: Sequence[Tensor]) -> bool:
        """See `fusion.KernelSelector`."""
        steps = [self.steps[part] for part in parts]
        backend = steps[0].backend
        if any(step.backend is not backend for step in steps):
            return False
        kernel = backend.select(node, self.placement.options)
        if not isinstance(kernel, Kernel):
            return False
        if not all(_reads(kernel, node, i, s.meta) for i, s in enumerate(node.src) if s):
            return False
        self._add(node, kernel, steps[0].choice)
        return True

    def can_read(self, user: Tensor, index: int, meta: Meta) -> bool:
        """See `fusion.KernelSelector`."""
        return _reads(self.steps[user].kernel, user, index, meta)

    # -- helpers
    def _kernel(self, backend: Backend, node: Tensor) -> Kernel:
        found = backend.select(node, self.placement.options)
        if isinstance(found, Kernel):
            return found
        raise PlacementError(f"{node.scope}: {backend.name} cannot run {node.op}: {found}")

    def _insert(self, new: Tensor, user: Tensor, choice: Choice) -> Tensor:
        new.scopes, new.origin = user.scopes, user.origin
        found = choice.backend.select(new, self.placement.options)
        if not isinstance(found, Kernel):
            choice = choose(new, self.placement.backends, self.placement.options)
        return self.lower(new, Choice(choice.backend, choice.misses))

    def _adapt(
        self, user: Tensor, kernel: Kernel, i: int, source: Tensor, choice: Choice, here: str
    ) -> Tensor:
        """Return ``source`` lowered, in memory ``here`` and the layout that ``kernel`` requires."""
        if source is not user.src[i]:  # made by the kernel's ``lower``
            source = self._insert(source, user, choice)
        own = rewrite.root(source)
        if own.op not in (WEIGHT, INPUT):
            home = self.placement.written.get(own.attrs["name"], here) if own.is_leaf else here
            there = self.memory.setdefault(own, home)
            if there != here:
                source = self._transfer(source, there, here, user)
        if not _reads(kernel, user, i, source.meta):
            source = self._insert(role(LAYOUT)(source), user, choice)
        return source

    def _source_memory(self, node: Tensor, backend: Backend) -> str:
        """Return the memory of the sources of ``node`` on ``backend``.

        It is the backend's own, or the host's for a transfer to the backend's own.
        """
        own = self.placement.memory_of(backend)
        return HOST if _transfers(node) and node.attrs["memory"] == own else own

    def _transfer(self, source: Tensor, there: str, here: str, user: Tensor) -> Tensor:
        """Copy ``source`` between memories, with the backend whose memory is not the host's."""
        other = there if here == HOST else here
        backend = next(b for b in self.placement.backends if self.placement.memory_of(b) == other)
        return self._insert(role(TRANSFER)(source, memory=here), user, Choice(backend))


def _transfers(node: Tensor) -> bool:
    """Return whether the node copies between memories."""
    return not node.is_leaf and not node.is_view and get(node.op).role == TRANSFER


def _reads(kernel: Kernel, node: Tensor, index: int, meta: Meta) -> bool:
    """Return whether ``kernel`` can read operand ``index`` of ``node`` with layout ``meta``."""
    return not kernel.needs_layout(get(node.op), index, meta)


# -------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Allocation:
    """Memory of an intermediate: a memory's arena, and offset and size in bytes."""

    memory: str
    offset: int
    nbytes: int


@dataclass
class Copies:
    """Copies from one memory to another in a run: count, maximum bytes, and counts of users."""

    source: str
    target: str
    count: int = 0
    nbytes: int = 0
    users: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        users = ", ".join(f"{op} ({n})" if n > 1 else op for op, n in self.users.most_common())
        what = f"{self.count}, of {self.nbytes:,} bytes in all{', for ' if users else ''}{users}"
        return f"copies from {self.source} to {self.target}: {what}"


@dataclass(eq=False)
class Plan:
    """A flat list of steps with memory for all intermediates. `Executor.run` runs it.

    Attributes:
        outputs: nodes of the outputs by name.
        steps: kernel calls in order.
        allocations: memory of intermediates, by the node that owns the buffer.
        scratch: memory of workspaces, by index of the step.
        arena: bytes of the arena of each memory.
        memory: memory of every buffer, by its root node.
        placement: the placement that was compiled.
        guard: guard bytes around each intermediate.
    """

    outputs: dict[str, Tensor]
    steps: list[Step]
    allocations: dict[Tensor, Allocation]
    scratch: dict[int, Allocation]
    arena: dict[str, int]
    memory: dict[Tensor, str]
    placement: Placement = field(repr=False)
    guard: int = 0

    @cached_property
    def vars(self) -> dict[str, Var]:
        nodes = rewrite.toposort(self.outputs.values())
        rows = (n.meta.rows for n in nodes)
        return {v.name: v for v in rows if isinstance(v, Var)}

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        return {n.name: n for n in rewrite.toposort(self.outputs.values()) if n.is_leaf}

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """Leaves that must be fed in every run."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.op == INPUT}

    def segments(self) -> list[list[Step]]:
        """Return the steps in groups of consecutive steps on one backend."""
        runs: list[list[Step]] = []
        for step in self.steps:
            if not runs or runs[-1][0].backend is not step.backend:
                runs.append([])
            runs[-1].append(step)
        return runs

    def misses(self) -> Counter[tuple[str, str, str]]:
        """Count the steps that the first backend cannot run, by (op, backend, reason)."""
        return Counter(
            (s.node.op, s.backend.name, s.choice.why) for s in self.steps if s.choice.misses
        )

    def check_strict(self) -> None:
        """Raise PlacementError if a step is not on the first usable backend."""
        for step in self.steps:
            if step.choice.misses:
                raise PlacementError(
                    f"{step.node.scope}: {step.node.op} would run on {step.backend.name} "
                    f"({step.choice.why}), and strict placement forbids it"
                )

    def copies(self) -> list[Copies]:
        """Return the copies between memories in a run."""
        found: dict[tuple[str, str], Copies] = {}
        made: dict[Tensor, Copies] = {}  # by copying node
        for step in self.steps:
            node = step.node
            for source in node.sources:
                if source.base in made:
                    made[source.base].users[node.op] += 1
            if _transfers(node):
                way = step.memory, self.memory[node]
                copies = made[node] = found.setdefault(way, Copies(*way))
                copies.count += 1
                copies.nbytes += node.meta.bound().nbytes
        return list(found.values())

    def explain(self) -> str:
        """Format steps by op and backend, reasons of misses, copies and memory as text."""
        counts = Counter((s.node.op, s.backend.name, s.kernel.name) for s in self.steps)
        lines = [f"{len(self.steps)} steps in {len(self.segments())} segments"]
        lines += [f"  {n:5d}  {op:<14} {b:<10} {k}" for (op, b, k), n in sorted(counts.items())]
        lines += [f"  {n:5d}  {op} ran on {b}: {why}" for (op, b, why), n in self.misses().items()]
        lines += [f"  {copies}" for copies in self.copies()]
        lines += [f"  arena {m}: {n / 1e6:.1f} MB" for m, n in self.arena.items()]
        return "\n".join(lines)


def compile_plan(
    placement: Placement, bounds: Mapping[str, tuple[int, int]] | None = None, guard: int = 0
) -> Plan:
    """Compile a plan: select kernels, insert nodes, and plan memory for one range of the Vars.

    Args:
        placement: the placed graph.
        bounds: name of a Var -> (lower, upper) bound.
        guard: guard bytes around every intermediate; if not 0, no memory is shared.
    """
    outputs, moved = rewrite.narrow(placement.outputs, bounds or {})
    rewrite.show("narrowed", outputs)
    lowering = _Lowering(placement)
    lowered: dict[Tensor, Tensor] = {}
    for placed, node in moved.items():
        src = tuple(s and lowered[s] for s in node.src)
        choice = placement.choices.get(placed)
        lowered[node] = lowering.lower(rewrite.substitute(node, src), choice)
    outputs = {name: lowered[node] for name, node in outputs.items()}
    rewrite.show("lowered", outputs)
    outputs = fusion.fuse(outputs, placement.options.without, lowering)
    # Transfers are grouped, so that a device can run the steps between them as one segment.
    order = rewrite.by_depth(outputs.values(), _transfers)
    steps = [lowering.steps[n] for n in order if n in lowering.steps]
    where = {n: lowering.memory[n] for n in order if n in lowering.memory}
    plan = Plan(outputs, steps, {}, {}, {}, where, placement, guard)
    _allocate(plan)
    return plan


def with_outputs(plan: Plan, values: Mapping[str, Tensor]) -> Plan:
    """Return a plan of the same steps with more outputs: nodes of the plan's graph, or their views.

    Their buffers stay allocated to the end of the run. ``plan`` is not changed.
    """
    outputs = {**plan.outputs, **values}
    extended = replace(
        plan, outputs=outputs, allocations={}, scratch={}, arena={}, memory={**plan.memory}
    )
    _allocate(extended)
    return extended


def _allocate(plan: Plan) -> None:
    """Fill in ``allocations``, ``scratch`` and ``arena`` from lifetimes."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for index, step in enumerate(plan.steps):
        for own in map(rewrite.root, (step.node, *step.node.sources)):
            first.setdefault(own, index)
            last[own] = index
    for node in plan.outputs.values():
        own = rewrite.root(node)
        last[own] = len(plan.steps)
        plan.memory.setdefault(own, HOST)  # a leaf that is only an output
    wanted: dict[str, list[tuple[dict[Any, Allocation], Any, memory.Interval]]] = {}
    for index, step in enumerate(plan.steps):
        own = rewrite.root(step.node)
        where = plan.memory[own]
        if own is step.node:
            interval = memory.Interval(first[own], last[own], own.meta.bound().nbytes)
            wanted.setdefault(where, []).append((plan.allocations, own, interval))
        if step.kernel.scratch:
            interval = memory.Interval(
                index, index, step.kernel.scratch(step.node, plan.placement.options)
            )
            wanted.setdefault(where, []).append((plan.scratch, index, interval))
    for where, requests in wanted.items():
        offsets, plan.arena[where] = memory.assign([r[2] for r in requests], plan.guard)
        for (table, key, interval), offset in zip(requests, offsets):
            table[key] = Allocation(where, offset, interval.nbytes)
