"""Executor: places graphs, keeps a plan per bucket of bounds, owns all buffers, runs plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import backends as registry
from ..backends import Bound, Header, Operand, Options, Progress, Segment
from ..compiler.placement import Pin, Placement, Tap, check_pins, pins_from, place
from ..compiler.plan import Allocation, Plan, Step, compile_plan, with_outputs
from ..debug import debug
from ..errors import GraphError
from ..graph import rewrite
from ..graph.op import get
from ..graph.tensor import WEIGHT, Meta, Tensor, Var
from ..weights import Arrays, Weights
from .buffers import Buffers, allocate, converted, fits
from .debug_log import memory_lines, step_printer
from .decode_loop import DecodeLoop, Output
from .devices import Devices
from .recorder import BoundSegments, Recorder

Bounds = Mapping[str, tuple[int, int]]  # name of a Var -> (lower, upper) bound


@dataclass
class _BoundPlan:
    """The segments of a plan, ready to run on its buffers, and its outputs."""

    segments: list[tuple[Segment, list[Step]]]
    outputs: dict[str, Output]


@dataclass
class _GraphEntry:
    """What is cached for a graph as long as its outputs live: its placement, its plans by bounds.

    ``extended``: entries of graphs that have one more output than this one, by its node and name.
    """

    placement: Placement | None = None
    plans: dict[object, Plan] = field(default_factory=dict)
    extended: WeakKeyDictionary[Tensor, dict[str, _GraphEntry]] = field(
        default_factory=WeakKeyDictionary
    )

    def of(self, outputs: Mapping[str, Tensor]) -> _GraphEntry:
        """Return the entry of a graph with these outputs."""
        found = self
        for name, node in outputs.items():
            found = found.extended.setdefault(node, {}).setdefault(name, _GraphEntry())
        return found


class Executor:
    """Gives each op of a graph to the first backend that can run it, and runs the plans.

    What is cached for a graph (placement, plans, buffers of inputs, states and weights) is freed
    when the last of its output nodes and of its plans is deleted. A model placed with `place_model`
    is kept.

    Args:
        weights: source of the bytes of weight leaves.
        backends: names in order of preference. Unusable ones are skipped, with the reason in
            ``skipped``.
        options: execution options.
        pins: scope pattern -> name of a backend.
        strict: raise PlacementError when an op misses the first usable backend.
        progress: called during long work with a task, units done and units in total.
    """

    guard_bytes = 0  # around every buffer; see `graphllm.runtime.buffer_guards`

    def __init__(
        self,
        weights: Weights | None = None,
        backends: Sequence[str] | None = None,
        options: Options | None = None,
        *,
        pins: Mapping[str, str] | None = None,
        strict: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.weights = weights or Arrays({})
        self.options = options or Options()
        self.pins, self.strict = pins_from(pins or {}), strict
        self.progress = progress or (lambda what, done, total: None)
        self.backends, self.skipped = registry.select_usable(backends or registry.names())
        self.devices = self._devices()
        self.buffers = Buffers(self.devices, self.weights, self.guard_bytes)
        self.header = Header()
        self.load_times = {"weights_s": 0.0, "kernels_s": 0.0}  # seconds, in total
        self.arenas: dict[str, Any] = {}  # buffer of intermediates by memory
        self.model: Mapping[str, Tensor] = {}  # outputs of the model of `place_model`
        self.model_placement: Placement | None = None
        self._moved: Mapping[Tensor, Tensor] = {}  # node of the model -> its placed node
        self._graphs = _GraphEntry()
        self._plans: WeakKeyDictionary[Plan, _BoundPlan | None] = WeakKeyDictionary()

    def _devices(self) -> Devices:
        return Devices(self.backends, self.options, self.progress)

    def close(self) -> None:
        """Release all buffers, weights and devices, even if a graph or a plan is still alive."""
        for each in (self._plans, self.arenas, self.buffers, self.devices):
            each.clear()
        self._graphs, self.model, self._moved = _GraphEntry(), {}, {}
        self.model_placement, self.weights = None, Arrays({})

    def cache_sizes(self) -> dict[str, int]:
        """Return the number of cached graphs, live plans, and leaves and weights with a buffer."""
        sizes = {"graphs": len(self._graphs.extended), "plans": len(self._plans)}
        return {**sizes, **self.buffers.cache_sizes()}

    # --------------------------------------------------------------------------------- placement

    def place_model(self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()) -> None:
        """Place a whole model, so that plans for any of its outputs agree on the placement.

        That is the backend of each node and the memory of each state. Call it before any plan is
        bound.

        Args:
            outputs: outputs of the model by name.
            pins: pins with lower priority than the executor's own.

        Raises:
            PlacementError: a pin matches nothing, or no backend can run an op.
        """
        assert not any(self._plans.values())
        check_pins(self.pins, rewrite.toposort(outputs.values()), self.backends)
        self._graphs = _GraphEntry()
        self._plans.clear()
        self.model, (self.model_placement, self._moved) = outputs, self._place(outputs, pins)

    def _place(
        self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()
    ) -> tuple[Placement, Mapping[Tensor, Tensor]]:
        pins, memory_of = [*self.pins, *pins], self.devices.memory_of
        return place(outputs, self.backends, self.options, memory_of, pins, self.buffers.leaf)

    def _placement(self, outputs: Mapping[str, Tensor]) -> Placement:
        """Return the placement of ``outputs``, as part of the placed model if they belong to it."""
        of_model = all(self.model.get(name) is node for name, node in outputs.items())
        whole = self.model_placement if of_model else None
        return (whole or self._place(outputs)[0]).part(outputs)

    # ------------------------------------------------------------------------------------- plans

    def compile(self, outputs: Mapping[str, Tensor], bounds: Bounds | None = None) -> Plan:
        """Return the plan that computes ``outputs`` while the Vars stay within ``bounds``.

        The plan is cached as long as the graph lives. PlacementError if no backend can run an op.
        """
        entry, key = self._graphs.of(outputs), tuple(sorted((bounds or {}).items()))
        if key not in entry.plans:
            entry.placement = entry.placement or self._placement(outputs)
            entry.plans[key] = self._compiled(entry.placement, bounds)
        return entry.plans[key]

    def tap(self, taps: Sequence[Tap], bounds: Bounds | None = None) -> Plan:
        """Return a plan, not cached, that outputs or replaces inner values of the placed model."""
        assert self.model_placement is not None
        return self._compiled(self.model_placement.tapped(taps, self._moved), bounds)

    def with_outputs(self, plan: Plan, values: Mapping[str, Tensor]) -> Plan:
        """Return ``plan`` with more outputs, not cached: nodes of its graph, or views of them."""
        self._check_own(plan)
        extended = with_outputs(plan, values)
        self._plans[extended] = None
        return extended

    def _compiled(self, placement: Placement, bounds: Bounds | None) -> Plan:
        plan = compile_plan(placement, bounds, self.guard_bytes)
        if self.strict:
            plan.check_strict()
        debug(1, plan.explain)
        self._plans[plan] = None
        return plan

    def _check_own(self, plan: Plan) -> None:
        if plan not in self._plans:
            raise GraphError(
                "the plan does not belong to this executor: another executor compiled it, or the "
                "model was placed again since"
            )

    # ------------------------------------------------------------------------------------ binding

    def bind(self, plan: Plan) -> None:
        """Allocate buffers, pack weights and build the segments of ``plan``, unless already done.

        GraphError if another executor compiled the plan.
        """
        self._bound(plan)

    def reserve(self, plan: Plan) -> None:
        """Allocate the memory of the intermediates of ``plan``."""
        for memory, nbytes in plan.arena.items():
            self._arena(memory, nbytes)

    def segments(self, plan: Plan) -> BoundSegments:
        """Bind ``plan``, and return its segments with their steps."""
        return self._bound(plan).segments

    def _bound(self, plan: Plan) -> _BoundPlan:
        self._check_own(plan)
        bound = self._plans[plan]
        if bound is None:
            bound = self._plans[plan] = self._bind(plan)
        return bound

    def _arena(self, memory: str, nbytes: int) -> Any:
        """Return the arena of a memory. Growing it unbinds all plans, which point into the old."""
        if memory not in self.arenas or self.arenas[memory].nbytes < nbytes:
            self.arenas.pop(memory, None)  # free the old arena before allocating the new one
            self._plans.update(dict.fromkeys(self._plans))
            self.arenas[memory] = allocate(self.devices.owner(memory), nbytes, "intermediates")
        return self.arenas[memory]

    def _bind(self, plan: Plan) -> _BoundPlan:
        self.reserve(plan)
        total = sum(leaf.op == WEIGHT for leaf in plan.leaves.values())
        steps: list[Bound] = []
        start = time.perf_counter()
        for index, step in enumerate(plan.steps):
            inputs = tuple(self._input(plan, step, i) for i in range(len(step.node.src)))
            self.progress("preparing weights", min(self.buffers.packed, total), total)
            out = self._operand(plan, step.node, plan.memory[rewrite.root(step.node)])
            scratch = plan.scratch.get(index)
            workspace = self._workspace(scratch) if scratch else None
            steps.append(Bound(step.node, step.kernel, inputs, out, workspace))
        ready = time.perf_counter()
        segments, rest = [], iter(steps)
        for group in plan.segments():
            device = self.devices.of(group[0].backend)
            segments.append((device.build([*islice(rest, len(group))], self.header), group))
        self.load_times["weights_s"] += ready - start
        self.load_times["kernels_s"] += time.perf_counter() - ready
        outputs = {}
        for name, node in plan.outputs.items():
            memory = plan.memory[rewrite.root(node)]
            outputs[name] = Output(self.devices.owner(memory), self._operand(plan, node, memory))
        debug(1, lambda: memory_lines(self.buffers.held(), self.arenas))
        return _BoundPlan(segments, outputs)

    def _input(self, plan: Plan, step: Step, index: int) -> Operand | None:
        source = step.node.src[index]
        if source is None:
            return None
        if source.base.op == WEIGHT:
            return Operand(source.meta, self.weight(step, index))
        return self._operand(plan, source, step.memory)

    def weight(self, step: Step, index: int) -> Any:
        """Return the buffer of a weight that ``step`` reads, packed. Any thread may call this."""
        pack = step.kernel.pack.get(get(step.node.op).operand(index))
        device = self.devices.of(step.backend)
        if device.memory != step.memory:  # a transfer reads it from the host's memory
            device = self.devices.owner(step.memory)
        return self.buffers.weight(step.node.src[index].base.name, pack, device)  # type: ignore

    def _operand(self, plan: Plan, node: Tensor, memory: str) -> Operand:
        own = rewrite.root(node)
        if own.is_leaf:
            leaf = self.buffers.operand(own.name, memory)
            buffer, offset = leaf.buffer, leaf.meta.offset
        else:
            place = plan.allocations[own]
            buffer, offset = self.arenas[place.memory], place.offset
        return Operand(replace(node.meta, offset=node.meta.offset + offset), buffer)

    def _workspace(self, allocation: Allocation) -> Operand:
        meta = replace(Meta.of((allocation.nbytes,), "i8"), offset=allocation.offset)
        return Operand(meta, self.arenas[allocation.memory])

    # -------------------------------------------------------------------------------------- state

    def set_state(self, name: str, data: np.ndarray) -> None:
        """Write the leading rows of a state or an input, in every memory that holds it.

        ``data`` is converted as a feed of `run`; for a block format it is uint8 [rows, row_bytes].
        GraphError if it does not fit.
        """
        self.buffers.write({name: data})

    def get_state(self, name: str, rows: int | None = None) -> np.ndarray:
        """Return a copy of a state or an input, or of its first ``rows`` rows."""
        return self.buffers.read(name, rows)

    # ---------------------------------------------------------------------------------------- run

    def run(
        self,
        plan: Plan,
        feeds: Mapping[str, np.ndarray] | None = None,
        env: Mapping[str, int] | None = None,
        profile: Recorder | None = None,
        fetch: Collection[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run ``plan`` once and return copies of its outputs.

        Args:
            plan: a plan of this executor.
            feeds: name of a leaf -> array, converted to the dtype of the leaf. All inputs must be
                fed; a state that is not fed keeps its value.
            env: live values of Vars; others are taken from the rows of the feeds.
            profile: recorder of the run.
            fetch: names of the outputs to copy, all by default (copying a KV pool is expensive).

        Raises:
            GraphError: an input is missing, or the shape or dtype of a feed does not fit, see
                `graphllm.runtime.buffers.converted`.
        """
        bound = self._bound(plan)
        for name, leaf in plan.inputs.items():
            if name not in (feeds or {}):
                raise GraphError(f"input {name!r} ({leaf.meta}) is not fed")
        values, _ = self._feed(plan, feeds or {}, dict(env or {}))
        if (recorder := self._recorder(profile)) is not None:
            recorder.run(plan, bound.segments, values)
        else:
            for segment, _ in bound.segments:
                segment.run(None)
        outputs = bound.outputs.items()
        return {n: o.reader(values)() for n, o in outputs if fetch is None or n in fetch}

    def decode_loop(
        self,
        plan: Plan,
        feeds: Mapping[str, np.ndarray],
        env: Mapping[str, int],
        name: str,
        profile: Recorder | None = None,
        counts: Callable[[], Mapping[str, int]] = dict,
        others: Sequence[str] = (),
    ) -> DecodeLoop:
        """Return a loop that runs ``plan`` repeatedly and returns outputs of each run.

        It is valid while the bound buffers stay the same; after runs of other plans or loops, call
        its `feed`. If the plan is one segment and the device supports it, a run may be launched
        before the previous run's output is read; `set_state` takes effect in order with launches.

        Args:
            plan: a plan of this executor.
            feeds: inputs to write now, and by `feed`; others keep the last value they were fed.
            env: live values of the Vars.
            name: the output to return.
            profile: recorder of the runs.
            counts: returns further facts of the next run for the costs of its steps.
            others: names of the other outputs, see `DecodeLoop.take_others`.

        Raises:
            GraphError: an input was never fed, or a feed does not fit.
        """
        bound = self._bound(plan)
        values, fed = self._feed(plan, feeds, dict(env))
        for leaf in plan.inputs.values():
            if not self.buffers.written(leaf.name):
                raise GraphError(f"input {leaf.name!r} ({leaf.meta}) was never fed")
        outputs = [bound.outputs[each] for each in (name, *others)]
        launchers: list[Callable[[], object]] = [partial(s.run, None) for s, _ in bound.segments]
        if (recorder := self._recorder(profile)) is not None:
            recorded = partial(recorder.run, plan, bound.segments)
            launchers = [lambda: recorded({**values, **counts()})]
        return DecodeLoop.of(launchers, outputs, values, len(bound.segments) == 1, fed)

    def _recorder(self, profile: Recorder | None) -> Recorder | None:
        """Return the recorder of a run; None runs the segments without recording."""
        return profile or step_printer()

    def _feed(
        self, plan: Plan, feeds: Mapping[str, Any], env: dict[str, int]
    ) -> tuple[dict[str, int], list[Callable[[], None]]]:
        """Write the feeds that ``plan`` reads; return its Vars' values, and calls to repeat it."""
        used = {}
        for name in (each for each in feeds if each in plan.leaves):
            meta = plan.leaves[name].meta
            data = used[name] = converted(f"feed {name!r}", feeds[name], meta.dtype)
            rows = meta.rows
            if isinstance(rows, Var) and data.ndim:
                rows = env.setdefault(rows.name, len(data))
            if data.shape != (rows, *meta.inner) and not fits(data, meta.at(env)):
                raise GraphError(f"feed {name!r} is {data.shape}, not {meta.at(env).shape}")
        for name, var in plan.vars.items():
            if not var.lo <= env.get(name, -1) <= var.hi:
                raise GraphError(f"{name} = {env.get(name)} is not in {var.lo}..{var.hi}")
        calls: list[Callable[[], None]] = [partial(self.header.set, env)]
        calls += self.buffers.writers(used)
        for call in calls:
            call()
        return env, calls
