"""Runs graphs: places them once, keeps a plan for each bucket, owns all buffers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from . import backends as registry
from . import graph
from .backends import Backend, Bound, Device, Header, Operand, Options, Segment
from .canaries import GUARD, POISON, check_arenas, check_surrounded, surround
from .debug import debug
from .errors import GraphError, GraphllmError, OutOfMemory
from .memory import aligned
from .ops import get
from .placement import Pin, Placement, Tap, check_pins, pins_from, place
from .plan import Place, Plan, Step, compile_plan
from .profiler.printer import memory_lines, printer
from .profiler.rows import Recorder
from .repeat import Output, Repeat
from .tensor import WEIGHT, Meta, Tensor, Var
from .weights import Arrays, Weights

Progress = Callable[[str, int, int], None]  # what, done, total
Bounds = Mapping[str, tuple[int, int]]  # of Vars, by name


@dataclass
class _Program:
    """A plan bound to buffers: its segments, ready to run."""

    plan: Plan
    segments: list[tuple[Segment, list[Step]]]
    arenas: dict[str, Any]
    outputs: dict[str, Output]


class Executor:
    """Gives every op of a graph to the first backend that can run it, and runs the plans.

    ``weights``: where weight leaves find their bytes. ``backends``: names in order of preference;
    unusable ones are skipped, with their reason kept in ``skipped``. ``pins``: scope pattern ->
    backend. ``strict``: PlacementError when an op misses the first usable backend. ``poison`` (for
    tests): arenas are filled with NaN before each run and every buffer has canaries around it.
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
        self.backends, self.skipped = registry.usable(backends or registry.names())
        self.devices: dict[str, Device] = {}
        self.header = Header()
        self.spent = {"weights_s": 0.0, "kernels_s": 0.0}  # seconds of preparing them so far
        self._leaves: dict[str, Tensor] = {}  # as the graphs have them, at their widest
        self._buffers: dict[tuple[str, str], Operand] = {}  # of inputs and states: (name, memory)
        self._prepared: dict[tuple[str, object, str], Any] = {}  # weights: (name, pack, memory)
        self._arenas: dict[str, Any] = {}
        self._guarded: list[tuple[Any, int, str]] = []  # buffer with canaries, payload, name
        self._model: Mapping[str, Tensor] = {}  # what was adopted
        self._adopted: Placement | None = None
        self._placements: dict[object, Placement] = {}
        self._plans: dict[object, Plan] = {}
        self._programs: dict[Plan, _Program] = {}

    def device(self, backend: Backend) -> Device:
        """The backend's device, opened at first use."""
        if backend.name not in self.devices:
            device = backend.open_device(self.options)
            device.progress = self.progress
            self.devices[backend.name] = device
        return self.devices[backend.name]

    def memory_of(self, backend: Backend) -> str:
        """The memory that the backend's device works in."""
        return self.device(backend).memory

    def _owner(self, memory: str) -> Device:
        """A device that can allocate and copy in ``memory``."""
        open_ones = list(self.devices.values())
        rest = (self.device(backend) for backend in self.backends)  # not before it is needed
        return next(d for d in itertools.chain(open_ones, rest) if d.memory == memory)

    # --------------------------------------------------------------------------------- placement

    def adopt(self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()) -> None:
        """Place a whole model, so that all plans for some of its outputs agree on where each site
        runs and each state lies.

        ``pins``: after the executor's own. PlacementError for one that names nothing, or an op
        without a backend. It must be done before any plan is bound.
        """
        assert not self._buffers and not self._programs
        check_pins(self.pins, graph.toposort(outputs.values()), self.backends)
        self._placements.clear()
        self._plans.clear()
        self._model, self._adopted = outputs, self._place(outputs, pins)

    def _place(self, outputs: Mapping[str, Tensor], pins: Sequence[Pin] = ()) -> Placement:
        own = [*self.pins, *pins]
        placement = place(outputs, self.backends, self.options, self.memory_of, own)
        for node in graph.toposort(placement.outputs.values()):
            if node.is_leaf:
                known = self._leaves.setdefault(node.name, node)
                if known.meta != node.meta:
                    raise GraphError(f"leaf {node.name!r} is {node.meta}, elsewhere {known.meta}")
        return placement

    def _placement(self, outputs: Mapping[str, Tensor]) -> Placement:
        """Of these outputs, as part of the adopted model if they are."""
        adopted = all(self._model.get(name) is node for name, node in outputs.items())
        whole = self._adopted if adopted and self._adopted else self._place(outputs)
        return whole.part(outputs)

    # ------------------------------------------------------------------------------------- plans

    def compile(self, outputs: Mapping[str, Tensor], bounds: Bounds | None = None) -> Plan:
        """The plan that computes ``outputs`` while the Vars stay within ``bounds``.

        Kept: the same call returns the same plan. PlacementError when an op has no backend.
        """
        which = tuple(outputs.items())
        key = (which, tuple(sorted((bounds or {}).items())))
        if key not in self._plans:
            if which not in self._placements:
                self._placements[which] = self._placement(outputs)
            self._plans[key] = self._compiled(self._placements[which], bounds)
        return self._plans[key]

    def tap(self, taps: Sequence[Tap], bounds: Bounds | None = None) -> Plan:
        """A plan whose outputs are values within the adopted model, some of them replaced on the
        way. It is not kept: `drop` it when it is not needed any more."""
        assert self._adopted is not None
        return self._compiled(self._adopted.tapped(taps), bounds)

    def _compiled(self, placement: Placement, bounds: Bounds | None) -> Plan:
        plan = compile_plan(placement, bounds, GUARD if self.poison else 0)
        if self.strict:
            plan.check_strict()
        debug(1, plan.explain)
        return plan

    def drop(self, plan: Plan) -> None:
        """Forget what a plan was bound to; the arenas stay."""
        self._programs.pop(plan, None)

    # ----------------------------------------------------------------------------------- buffers

    def _leaf(self, name: str, memory: str) -> Operand:
        """The buffer of an input or a state in ``memory``, for the widest shape of the leaf."""
        if (name, memory) not in self._buffers:
            meta, device = self._leaves[name].meta, self._owner(memory)
            nbytes, offset = meta.bound().nbytes, GUARD if self.poison else 0
            if self.poison:
                buffer = _alloc(device, aligned(nbytes) + 2 * GUARD, name)
                surround(buffer, nbytes)
                self._guarded.append((buffer, nbytes, name))
            else:
                buffer = _alloc(device, max(nbytes, 1), name)
            self._buffers[name, memory] = Operand(replace(meta, offset=offset), buffer)
        return self._buffers[name, memory]

    def _weight(self, leaf: Tensor, step: Step, index: int) -> Any:
        """The device's buffer of a weight, in the form that the step's kernel wants it."""
        pack = step.kernel.pack.get(get(step.node.op).operand(index))
        device = self.device(step.backend)
        if device.memory != step.memory:  # it is copied from the host's
            device = self._owner(step.memory)
        key = (leaf.name, pack, device.memory)
        if key not in self._prepared:
            stored = self.weights.meta(leaf.name)
            if stored is None or (stored.shape, stored.dtype) != (leaf.shape, leaf.dtype):
                raise GraphError(f"weight {leaf.name!r} is {stored}, the graph wants {leaf.meta}")
            raw = self.weights.raw(leaf.name)
            what = f"tensor {leaf.name!r}"
            try:
                with _room(device, what, raw.nbytes, "fewer layers there (gpu_layers) need less"):
                    self._prepared[key] = device.prepare(pack, raw, leaf.meta)
            except OutOfMemory:
                raise
            except GraphllmError as error:
                raise type(error)(f"{what}: {error}") from None
            if pack is not None:
                self.weights.release(leaf.name)
        return self._prepared[key]

    def _arena(self, memory: str, nbytes: int) -> Any:
        """The memory's arena. Growing it unbinds every plan that points into the old one."""
        if memory not in self._arenas or self._arenas[memory].nbytes < nbytes:
            self._arenas.pop(memory, None)  # the old one is gone before there is a new one
            self._programs.clear()
            self._arenas[memory] = _alloc(self._owner(memory), nbytes, "intermediates")
        return self._arenas[memory]

    # ------------------------------------------------------------------------------------ binding

    def bind(self, plan: Plan) -> None:
        """Allocate buffers, pack weights and build the plan's segments, unless that was done."""
        if plan in self._programs:
            return
        arenas = {memory: self._arena(memory, nbytes) for memory, nbytes in plan.arena.items()}
        total = sum(leaf.op == WEIGHT for leaf in plan.leaves.values())
        bound: list[Bound] = []
        start = time.perf_counter()
        for index, step in enumerate(plan.steps):
            inputs = tuple(self._input(plan, step, i, arenas) for i in range(len(step.node.src)))
            self.progress("preparing weights", min(len(self._prepared), total), total)
            home = plan.memory[graph.root(step.node)]
            out = self._operand(plan, step.node, home, arenas)
            spot = plan.scratch.get(index)
            scratch = _workspace(spot, arenas) if spot else None
            bound.append(Bound(step.node, step.kernel, inputs, out, scratch))
        ready = time.perf_counter()
        segments, at = [], 0
        for steps in plan.segments():
            device = self.device(steps[0].backend)
            segments.append((device.build(bound[at : at + len(steps)], self.header), steps))
            at += len(steps)
        self.spent["weights_s"] += ready - start
        self.spent["kernels_s"] += time.perf_counter() - ready
        outputs = {}
        for name, node in plan.outputs.items():
            memory = plan.memory[graph.root(node)]
            operand = self._operand(plan, node, memory, arenas)
            outputs[name] = Output(self._owner(memory), operand)
        self._programs[plan] = _Program(plan, segments, arenas, outputs)
        debug(1, lambda: memory_lines(self._prepared, self._buffers, self._arenas))

    def _input(
        self, plan: Plan, step: Step, index: int, arenas: Mapping[str, Any]
    ) -> Operand | None:
        source = step.node.src[index]
        if source is None:
            return None
        if source.base.op == WEIGHT:
            return Operand(source.meta, self._weight(source.base, step, index))
        return self._operand(plan, source, step.memory, arenas)

    def _operand(self, plan: Plan, node: Tensor, memory: str, arenas: Mapping[str, Any]) -> Operand:
        own = graph.root(node)
        if not own.is_leaf:
            return _in_arena(node, plan.places[own], arenas)
        leaf = self._leaf(own.name, memory)
        return Operand(replace(node.meta, offset=node.meta.offset + leaf.meta.offset), leaf.buffer)

    # -------------------------------------------------------------------------------------- state

    def set_state(self, name: str, data: np.ndarray) -> None:
        """Write the leading rows of a state or an input, in every memory that holds it.

        ``data``: of a block format its bytes, [rows, n].
        """
        for (_, memory), leaf in self._held(name):
            shape = data.shape if leaf.meta.dtype.numpy else (len(data), *leaf.meta.inner)
            meta = replace(leaf.meta, shape=shape)
            self._owner(memory).copy_in(Operand(meta, leaf.buffer), data)

    def get_state(self, name: str, rows: int | None = None) -> np.ndarray:
        """A copy of a state or an input, or of its first ``rows``."""
        (_, memory), leaf = self._held(name)[0]
        meta = leaf.meta.bound()
        shape = meta.shape if rows is None else (rows, *meta.inner)
        return self._owner(memory).copy_out(Operand(replace(meta, shape=shape), leaf.buffer))

    def _held(self, name: str) -> list[tuple[tuple[str, str], Operand]]:
        found = [(key, leaf) for key, leaf in self._buffers.items() if key[0] == name]
        if not found:
            raise GraphError(f"no input or state {name!r} in any bound plan")
        return found

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
        the time of every step is recorded in it. GraphError names a feed that does not fit.
        """
        self.bind(plan)
        program = self._programs[plan]
        values = self._feed(plan, feeds or {}, dict(env or {}))
        if self.poison:
            for arena in program.arenas.values():
                arena[:] = POISON
        if (profile := profile or printer()) is not None:
            profile.run(plan, program.segments, values)
        else:
            for segment, _ in program.segments:
                segment.run(None)
        if self.poison:
            check_surrounded(self._guarded)
            spots = [*plan.places.values(), *plan.scratch.values()]
            check_arenas(program.arenas, spots)
        outputs = program.outputs.items()
        return {n: o.reader(values)() for n, o in outputs if fetch is None or n in fetch}

    def repeat(
        self,
        plan: Plan,
        feeds: Mapping[str, np.ndarray],
        env: Mapping[str, int],
        name: str,
        profile: Recorder | None = None,
        counts: Callable[[], Mapping[str, int]] = dict,
    ) -> Repeat:
        """What runs ``plan`` again and again and gives one output, for the decode loop.

        ``feeds`` are written once, now. It holds while the Vars and the bound buffers stay as they
        are; other feeds go through `set_state`, in order with what has been launched. Where the
        plan is one segment, the next run may be begun before the output of the last is there, if
        the device can do that. With ``profile`` runs are timed in it; ``counts``: what is known of
        each beside the Vars, for the costs of its steps.
        """
        self.bind(plan)
        program = self._programs[plan]
        values = self._feed(plan, feeds, dict(env))
        output = program.outputs[name]
        if self.poison:
            alone = partial(self.run, plan, {}, profile=profile, fetch=())
            return Repeat([lambda: alone(env={**env, **counts()})], output.reader(values))
        begin: list[Callable[[], object]] = [partial(s.run, None) for s, _ in program.segments]
        if (profile := profile or printer()) is not None:
            timed = partial(profile.run, plan, program.segments)
            begin = [lambda: timed({**values, **counts()})]
        ring = output.ring(values) if len(program.segments) == 1 else None
        if ring is None:
            return Repeat(begin, output.reader(values))
        return Repeat([*begin, ring.put], ring.take, ring.ahead)

    def _feed(
        self, plan: Plan, feeds: Mapping[str, np.ndarray], env: dict[str, int]
    ) -> dict[str, int]:
        """Copy the feeds that this plan reads into their buffers; the values of all its Vars."""
        used = {name: data for name, data in feeds.items() if name in plan.leaves}
        for name, data in used.items():
            meta = plan.leaves[name].meta
            if isinstance(meta.rows, Var) and data.ndim:
                env.setdefault(meta.rows.name, data.shape[0])
            if data.shape != meta.at(env).shape:
                raise GraphError(f"feed {name!r} is {data.shape}, not {meta.at(env).shape}")
        for name, var in plan.vars.items():
            if not var.lo <= env.get(name, -1) <= var.hi:
                raise GraphError(f"{name} = {env.get(name)} is not in {var.lo}..{var.hi}")
        self.header.set(env)
        for name, data in used.items():
            self.set_state(name, data)
        return env


@contextmanager
def _room(device: Device, what: str, nbytes: int, hint: str) -> Iterator[None]:
    """OutOfMemory with these words where the device has no memory for ``nbytes``."""
    try:
        yield
    except OutOfMemory as error:
        raise OutOfMemory(what, device.memory, error.needed, error.free, hint) from None
    except MemoryError:
        raise OutOfMemory(what, device.memory, nbytes, device.free(), hint) from None


def _alloc(device: Device, nbytes: int, what: str) -> Any:
    with _room(device, what, nbytes, "a smaller context (-c) needs less"):
        return device.alloc(nbytes)


def _in_arena(node: Tensor, spot: Place, arenas: Mapping[str, Any]) -> Operand:
    meta = replace(node.meta, offset=node.meta.offset + spot.offset)
    return Operand(meta, arenas[spot.memory])


def _workspace(spot: Place, arenas: Mapping[str, Any]) -> Operand:
    meta = replace(Meta.of((spot.nbytes,), "i8"), offset=spot.offset)
    return Operand(meta, arenas[spot.memory])
