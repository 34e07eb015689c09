"""Runs graphs: places them once, keeps a plan for each bucket, owns all buffers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import backends as registry
from ..backends import Bound, Header, Operand, Options, Segment
from ..compiler.placement import Pin, Placement, Tap, check_pins, pins_from, place
from ..compiler.plan import Allocation, Plan, Step, compile_plan, with_outputs
from ..debug import debug
from ..errors import GraphError
from ..graph import rewrite
from ..graph.op import get
from ..graph.tensor import WEIGHT, Meta, Tensor, Var
from ..weights import Arrays, Weights
from .buffer_guards import GUARD_BYTES, NAN_BYTE, check_arenas, check_guards
from .buffers import Buffers, allocate, converted, fits
from .debug_log import memory_lines, step_printer
from .decode_loop import DecodeLoop, Output
from .devices import Devices, Progress
from .recorder import Recorder

Bounds = Mapping[str, tuple[int, int]]  # of Vars, by name


@dataclass
class _Program:
    """A plan bound to buffers: its segments, ready to run."""

    segments: list[tuple[Segment, list[Step]]]
    arenas: dict[str, Any]
    outputs: dict[str, Output]


@dataclass
class _Graph:
    """What is kept of a graph while its outputs live: its placement, and its plans by bounds.

    ``more``: graphs that have one more output than this one, by its node and its name.
    """

    placement: Placement | None = None
    plans: dict[object, Plan] = field(default_factory=dict)
    more: WeakKeyDictionary[Tensor, dict[str, _Graph]] = field(default_factory=WeakKeyDictionary)

    def of(self, outputs: Mapping[str, Tensor]) -> _Graph:
        """That of a graph with these outputs."""
        found = self
        for name, node in outputs.items():
            found = found.more.setdefault(node, {}).setdefault(name, _Graph())
        return found


class Executor:
    """Gives every op of a graph to the first backend that can run it, and runs the plans.

    ``weights``: where weight leaves find their bytes. ``backends``: names in order of preference;
    unusable ones are skipped, with their reason kept in ``skipped``. ``pins``: scope pattern ->
    backend. ``strict``: PlacementError when an op misses the first usable backend. ``poison`` (for
    tests): arenas are filled with NaN before each run and every buffer has canaries around it.

    What is kept of a graph (placement, plans, buffers of inputs, states and weights) is dropped
    with it: with the last of its output nodes and of its plans. An adopted model is held.
    """

    def __init__(
        self,
        weights: Weights | None = None,
        backends: Sequence[str] | None = None,
        options: Options | None = None,
        *,
        pins: Mapping[str, str] | None = None,
        strict: bool = False,
        poison: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.weights = weights or Arrays({})
        self.options = options or Options()
        self.pins, self.strict, self.poison = pins_from(pins or {}), strict, poison
        self.progress = progress or (lambda what, done, total: None)
        self.backends, self.skipped = registry.select_usable(backends or registry.names())
        self.devices = self._devices()
        self.buffers = Buffers(self.devices, self.weights, poison)
        self.header = Header()
        self.load_times = {"weights_s": 0.0, "kernels_s": 0.0}  # seconds of preparing them so far
        self._arenas: dict[str, Any] = {}
        self._model: Mapping[str, Tensor] = {}  # what was adopted
        self._model_placement: Placement | None = None
        self._moved: Mapping[Tensor, Tensor] = {}  # the adopted model's nodes as they were placed
        self._graphs = _Graph()
        self._programs: WeakKeyDictionary[Plan, _Program | None] = WeakKeyDictionary()

    def _devices(self) -> Devices:
        return Devices(self.backends, self.options, self.progress)

    def close(self) -> None:
        """Let go of all buffers, weights and devices, whoever still holds a graph or a plan."""
        for each in (self._programs, self._arenas, self.buffers, self.devices):
            each.clear()
        self._graphs, self._model, self._moved = _Graph(), {}, {}
        self._model_placement, self.weights = None, Arrays({})

    # --------------------------------------------------------------------------------- placement

    def place_model(self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()) -> None:
        """Place a whole model, so that all plans for some of its outputs agree on where each site
        runs and each state lies.

        ``pins``: after the executor's own. PlacementError for one that names nothing, or an op
        without a backend. It must be done before any plan is bound.
        """
        assert not any(self._programs.values())
        check_pins(self.pins, rewrite.toposort(outputs.values()), self.backends)
        self._graphs = _Graph()
        self._programs.clear()
        self._model, (self._model_placement, self._moved) = outputs, self._place(outputs, pins)

    def _place(
        self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()
    ) -> tuple[Placement, Mapping[Tensor, Tensor]]:
        pins, memory_of = [*self.pins, *pins], self.devices.memory_of
        return place(outputs, self.backends, self.options, memory_of, pins, self.buffers.leaf)

    def _placement(self, outputs: Mapping[str, Tensor]) -> Placement:
        """Of these outputs, as part of the adopted model if they are."""
        adopted = all(self._model.get(name) is node for name, node in outputs.items())
        whole = (
            self._model_placement if adopted and self._model_placement else self._place(outputs)[0]
        )
        return whole.part(outputs)

    # ------------------------------------------------------------------------------------- plans

    def compile(self, outputs: Mapping[str, Tensor], bounds: Bounds | None = None) -> Plan:
        """The plan that computes ``outputs`` while the Vars stay within ``bounds``.

        Kept while the graph is: the same call returns the same plan. PlacementError when an op has
        no backend.
        """
        kept, key = self._graphs.of(outputs), tuple(sorted((bounds or {}).items()))
        if key not in kept.plans:
            kept.placement = kept.placement or self._placement(outputs)
            kept.plans[key] = self._compiled(kept.placement, bounds)
        return kept.plans[key]

    def tap(self, taps: Sequence[Tap], bounds: Bounds | None = None) -> Plan:
        """A plan whose outputs are values within the adopted model, some of them replaced on the
        way. It is not kept."""
        assert self._model_placement is not None
        return self._compiled(self._model_placement.tapped(taps, self._moved), bounds)

    def with_outputs(self, plan: Plan, values: Mapping[str, Tensor]) -> Plan:
        """``plan`` with more outputs: nodes of its graph, or views of them. It is not kept."""
        self._check_own(plan)
        extended = with_outputs(plan, values)
        self._programs[extended] = None
        return extended

    def _compiled(self, placement: Placement, bounds: Bounds | None) -> Plan:
        plan = compile_plan(placement, bounds, GUARD_BYTES if self.poison else 0)
        if self.strict:
            plan.check_strict()
        debug(1, plan.explain)
        self._programs[plan] = None
        return plan

    def _check_own(self, plan: Plan) -> None:
        if plan not in self._programs:
            raise GraphError(
                "the plan is not one of this executor: another one compiled it, or the model was "
                "placed anew since"
            )

    # ------------------------------------------------------------------------------------ binding

    def _arena(self, memory: str, nbytes: int) -> Any:
        """The memory's arena. Growing it unbinds every plan that points into the old one."""
        if memory not in self._arenas or self._arenas[memory].nbytes < nbytes:
            self._arenas.pop(memory, None)  # the old one is gone before there is a new one
            self._programs.update(dict.fromkeys(self._programs))
            self._arenas[memory] = allocate(self.devices.owner(memory), nbytes, "intermediates")
        return self._arenas[memory]

    def bind(self, plan: Plan) -> None:
        """Allocate buffers, pack weights and build the plan's segments, unless that was done.

        GraphError for a plan of another executor.
        """
        self._program(plan)

    def _program(self, plan: Plan) -> _Program:
        self._check_own(plan)
        program = self._programs[plan]
        if program is None:
            program = self._bound(plan)
            self._programs[plan] = program
        return program

    def _bound(self, plan: Plan) -> _Program:
        arenas = {memory: self._arena(memory, nbytes) for memory, nbytes in plan.arena.items()}
        total = sum(leaf.op == WEIGHT for leaf in plan.leaves.values())
        bound: list[Bound] = []
        start = time.perf_counter()
        for index, step in enumerate(plan.steps):
            inputs = tuple(self._input(plan, step, i, arenas) for i in range(len(step.node.src)))
            self.progress("preparing weights", min(self.buffers.packed, total), total)
            home = plan.memory[rewrite.root(step.node)]
            out = self._operand(plan, step.node, home, arenas)
            allocation = plan.scratch.get(index)
            scratch = _workspace(allocation, arenas) if allocation else None
            bound.append(Bound(step.node, step.kernel, inputs, out, scratch))
        ready = time.perf_counter()
        segments, at = [], 0
        for steps in plan.segments():
            device = self.devices.of(steps[0].backend)
            segments.append((device.build(bound[at : at + len(steps)], self.header), steps))
            at += len(steps)
        self.load_times["weights_s"] += ready - start
        self.load_times["kernels_s"] += time.perf_counter() - ready
        outputs = {}
        for name, node in plan.outputs.items():
            memory = plan.memory[rewrite.root(node)]
            operand = self._operand(plan, node, memory, arenas)
            outputs[name] = Output(self.devices.owner(memory), operand)
        debug(1, lambda: memory_lines(self.buffers.held(), self._arenas))
        return _Program(segments, arenas, outputs)

    def _input(
        self, plan: Plan, step: Step, index: int, arenas: Mapping[str, Any]
    ) -> Operand | None:
        source = step.node.src[index]
        if source is None:
            return None
        if source.base.op == WEIGHT:
            pack = step.kernel.pack.get(get(step.node.op).operand(index))
            device = self.devices.of(step.backend)
            if device.memory != step.memory:  # it is copied from the host's
                device = self.devices.owner(step.memory)
            return Operand(source.meta, self.buffers.weight(source.base.name, pack, device))
        return self._operand(plan, source, step.memory, arenas)

    def _operand(self, plan: Plan, node: Tensor, memory: str, arenas: Mapping[str, Any]) -> Operand:
        own = rewrite.root(node)
        if not own.is_leaf:
            return _in_arena(node, plan.allocations[own], arenas)
        leaf = self.buffers.operand(own.name, memory)
        return Operand(replace(node.meta, offset=node.meta.offset + leaf.meta.offset), leaf.buffer)

    # -------------------------------------------------------------------------------------- state

    def set_state(self, name: str, data: np.ndarray) -> None:
        """Write the leading rows of a state or an input, in every memory that holds it.

        ``data``: as a feed; of a block format its bytes, uint8 [rows, n]. GraphError where it does
        not fit.
        """
        self.buffers.write(name, data)

    def get_state(self, name: str, rows: int | None = None) -> np.ndarray:
        """A copy of a state or an input, or of its first ``rows``."""
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
        """Run ``plan`` on ``feeds`` (leaf name -> array) and return copies of its outputs.

        ``fetch``: the outputs to copy, all by default (a written KV pool is better left where it
        is). Vars take their value from the rows of what is fed, or from ``env``. With ``profile``,
        the time of every step is recorded in it.

        Every input of the plan must be fed; states keep their values unless they are fed. Feeds are
        converted to the dtype of their leaf. GraphError names an input that is missing, or a feed
        whose shape or dtype does not fit, see `graphllm.runtime.buffers.converted`.
        """
        program = self._program(plan)
        for name, leaf in plan.inputs.items():
            if name not in (feeds or {}):
                raise GraphError(f"input {name!r} ({leaf.meta}) is not fed")
        values = self._feed(plan, feeds or {}, dict(env or {}))
        self._run(plan, program, values, profile)
        outputs = program.outputs.items()
        return {n: o.reader(values)() for n, o in outputs if fetch is None or n in fetch}

    def _run(
        self, plan: Plan, program: _Program, values: Mapping[str, int], profile: Recorder | None
    ) -> None:
        if self.poison:
            for arena in program.arenas.values():
                arena[:] = NAN_BYTE
        if (profile := profile or step_printer()) is not None:
            profile.run(plan, program.segments, values)
        else:
            for segment, _ in program.segments:
                segment.run(None)
        if self.poison:
            check_guards(self.buffers.values())
            allocations = [*plan.allocations.values(), *plan.scratch.values()]
            check_arenas(program.arenas, allocations)

    def decode_loop(
        self,
        plan: Plan,
        feeds: Mapping[str, np.ndarray],
        env: Mapping[str, int],
        name: str,
        profile: Recorder | None = None,
        counts: Callable[[], Mapping[str, int]] = dict,
    ) -> DecodeLoop:
        """What runs ``plan`` again and again and gives one output, for the decode loop.

        ``feeds`` are written once, now; inputs that are not among them keep what they were fed
        last, and GraphError names one that never was. The result holds while the Vars and the bound
        buffers stay as they are; other feeds go through `set_state`, in order with what has been
        launched. Where the plan is one segment, the next run may be begun before the output of the
        last is there, if the device can do that. With ``profile`` runs are timed in it; ``counts``:
        what is known of each run besides the Vars, for the costs of its steps.
        """
        program = self._program(plan)
        values = self._feed(plan, feeds, dict(env))
        for leaf in plan.inputs.values():
            if not self.buffers.written(leaf.name):
                raise GraphError(f"input {leaf.name!r} ({leaf.meta}) was never fed")
        output = program.outputs[name]
        if self.poison:
            alone = partial(self._run, plan, program, profile=profile)
            return DecodeLoop([lambda: alone({**values, **counts()})], output.reader(values))
        begin: list[Callable[[], object]] = [partial(s.run, None) for s, _ in program.segments]
        if (profile := profile or step_printer()) is not None:
            timed = partial(profile.run, plan, program.segments)
            begin = [lambda: timed({**values, **counts()})]
        ring = output.ring(values) if len(program.segments) == 1 else None
        if ring is None:
            return DecodeLoop(begin, output.reader(values))
        return DecodeLoop([*begin, ring.put], ring.take, ring.lookahead)

    def _feed(self, plan: Plan, feeds: Mapping[str, Any], env: dict[str, int]) -> dict[str, int]:
        """Copy the feeds that this plan reads into their buffers; the values of all its Vars."""
        used = {}
        for name, data in feeds.items():
            if name not in plan.leaves:
                continue
            meta = plan.leaves[name].meta
            data = used[name] = converted(f"feed {name!r}", data, meta.dtype)
            if isinstance(meta.rows, Var) and data.ndim:
                env.setdefault(meta.rows.name, data.shape[0])
            if not fits(data, meta.at(env)):
                raise GraphError(f"feed {name!r} is {data.shape}, not {meta.at(env).shape}")
        for name, var in plan.vars.items():
            if not var.lo <= env.get(name, -1) <= var.hi:
                raise GraphError(f"{name} = {env.get(name)} is not in {var.lo}..{var.hi}")
        self.header.set(env)
        for name, data in used.items():
            self.set_state(name, data)
        return env


def _in_arena(node: Tensor, allocation: Allocation, arenas: Mapping[str, Any]) -> Operand:
    meta = replace(node.meta, offset=node.meta.offset + allocation.offset)
    return Operand(meta, arenas[allocation.memory])


def _workspace(allocation: Allocation, arenas: Mapping[str, Any]) -> Operand:
    meta = replace(Meta.of((allocation.nbytes,), "i8"), offset=allocation.offset)
    return Operand(meta, arenas[allocation.memory])
