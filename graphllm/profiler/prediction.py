"""What a model would do, before anything of it is loaded: placement, copies, memory, time.

A dry run compiles the plans that a generation needs, from a model's header alone. Backends that
cannot be used here take part if they are asked for: kernels are selected without a device.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import backends as registry
from ..arguments import Integer, Optional, check
from ..backends import Backend, Device, Options
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..compiler.plan import HOST, Copies, Plan, Step
from ..engine.engine import Engine
from ..errors import PlacementError
from ..graph.tensor import WEIGHT
from ..loading.load import DEFAULT_CONTEXT, RULES, backend_options, build_decoder, graph_limits
from ..model.decoder import Decoder
from ..ops import get
from ..runtime.devices import Devices
from ..runtime.executor import Executor
from ..runtime.gpu_offload import leaf_buffers
from . import roofline
from .bench import Test, leaf_bytes, model_type
from .kernel_probes import FLOAT, operations
from .roofline import Ceilings

if TYPE_CHECKING:
    from ..weights import Weights


# ------------------------------------------------------------------------ devices that are not here


@dataclass
class _PlannedDevice:
    """A device that is only planned for: the name of its memory, and what is free there."""

    memory: str
    room: int | None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def free(self) -> int | None:
        return self.room


class _PlannedDevices(Devices):
    """Devices that need not be there. ``skipped``: backends that are not usable here; ``free``:
    bytes of a memory beside the host's, instead of what its device says."""

    def __init__(self, skipped: Container[str], free: int | None, *more: Any) -> None:
        super().__init__(*more)
        self._skipped, self._free = skipped, free

    def of(self, backend: Backend) -> Device:
        if backend.name not in self:
            if backend.name in self._skipped:
                self[backend.name] = _planned_device(backend.memory, self._free)
            else:
                own = super().of(backend)
                if self._free is not None and own.memory != HOST:
                    self[backend.name] = _planned_device(own.memory, self._free)
        return self[backend.name]


class _Planner(Executor):
    """An Executor for plans alone: ``asked``, first in the order, need not be usable here.

    ``free``: see `_PlannedDevices`.
    """

    def __init__(
        self, weights: Weights, asked: str, options: Options, free: int | None, **more: Any
    ) -> None:
        self._asked, self._free = asked, free
        names = registry.names() if asked == "auto" else registry.fallbacks(asked)
        super().__init__(weights, names, options, **more)

    def _devices(self) -> Devices:
        if self._asked in self.skipped:
            missing = registry.find(self._asked)
            if not missing.kernels:
                why = self.skipped[self._asked]
                what = f"device = {self._asked!r} cannot be planned for: {why}"
                raise PlacementError(what, "device")
            self.backends.insert(0, missing)
        return _PlannedDevices(self.skipped, self._free, self.backends, self.options, self.progress)


def _planned_device(memory: str, room: int | None) -> Device:
    return _PlannedDevice(memory, room)  # type: ignore[return-value]  # no plan is bound to it


# -------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True)
class Miss:
    """Steps of one op that the first backend does not run, and why."""

    op: str
    backend: str
    why: str
    steps: int


@dataclass(frozen=True)
class Phase:
    """One step of a generation: ``tokens`` of one sequence after ``cached`` ones.

    ``ops``: steps by backend and op. ``nbytes``: of weights and cache; ``flops``: operations.
    ``seconds``: predicted, None where something to predict it from is missing.
    """

    name: str
    tokens: int
    cached: int
    ops: Mapping[str, Mapping[str, int]]
    misses: Sequence[Miss]
    copies: Sequence[Copies]
    nbytes: float
    flops: float
    seconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        copies = [{**vars(copy), "users": dict(copy.users)} for copy in self.copies]
        return {**vars(self), "misses": list(map(asdict, self.misses)), "copies": copies}


@dataclass(frozen=True)
class Memory:
    """Bytes of one memory: weights, keys and values, other inputs and state, intermediates."""

    weights: int = 0
    kv: int = 0
    state: int = 0
    arena: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.arena


@dataclass(frozen=True)
class DryRun:
    """What `dry_run` found. ``notes``: where layers go, and what is not used; ``lacking``: why no
    time is predicted, or not for all; ``basis``: the measurements that times come from."""

    model: str
    model_type: str
    device: str
    context: int
    kv_type: str
    threads: int
    notes: Sequence[str]
    prefill: Phase
    token: Phase
    memory: Mapping[str, Memory]
    basis: Sequence[str]
    lacking: Sequence[str] = field(default_factory=tuple)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        memory = {name: {**vars(m), "total": m.total} for name, m in self.memory.items()}
        phases = {"prefill": self.prefill.as_dict(), "token": self.token.as_dict()}
        return {**vars(self), **phases, "memory": memory}


# --------------------------------------------------------------------------------------------- time


@dataclass(frozen=True)
class TimePredictor:
    """The kept ceilings of backends, and how many threads of the host's are used."""

    known: Mapping[str, Ceilings]
    threads: int

    @classmethod
    def of(cls, plans: Sequence[Plan], threads: int) -> TimePredictor:
        """Those of the plans' backends that were measured."""
        names = {step.backend.name for plan in plans for step in plan.steps}
        found = {name: roofline.load_cached(name) for name in sorted(names)}
        return cls({name: c for name, c in found.items() if c is not None}, threads)

    def seconds(self, plan: Plan, env: Mapping[str, int]) -> float | None:
        """Of one run; None where a ceiling that it needs is missing.

        Each step takes as long as its bytes or its operations, whichever is longer, and what every
        step costs beside them. Intermediates count only where they are of many tokens: one token's
        stay in the nearest caches.
        """
        total = 0.0
        for step in plan.steps:
            own = self._step_seconds(step, env)
            if own is None:
                return None
            total += own
        return total

    def _step_seconds(self, step: Step, env: Mapping[str, int]) -> float | None:
        ceiling = self.known.get(step.backend.name)
        if ceiling is None:
            return None
        threads, many = self.threads, env["T"] > 1
        best, computes = ceiling.bytes_s(threads), _compute_seconds(step, env, ceiling, threads)
        if not best or (computes is None and many):
            return None
        if many:
            moved = get(step.node.op).node_cost(step.node, env).bytes
        else:
            moved = leaf_bytes(step.node, env) * _format_slowdown(step, ceiling)
        return max(moved / best, computes or 0.0) + ceiling.step(threads)

    def lacking(self, plans: Sequence[Plan]) -> list[str]:
        """A line for each backend of which something was not measured."""
        lines = []
        how = "graphllm doctor --measure, where it runs"
        for name in sorted({step.backend.name for plan in plans for step in plan.steps}):
            if registry.find(name).measure is None:
                lines.append(f"no prediction: nothing is known of the speed of {name}")
            elif name not in self.known:
                lines.append(f"no prediction: {name} was not measured ({how})")
            elif not self.known[name].flops:
                lines.append(f"no prediction of a prompt: {name}'s arithmetic was not measured "
                             f"({how})")  # fmt: skip
        return lines

    def basis(self) -> list[str]:
        """Where the ceilings come from."""
        return [
            f"{name}: {c.bytes_s(self.threads) / 1e9:.1f} GB/s, {c.provenance()}"
            for name, c in self.known.items()
        ]


def _compute_seconds(
    step: Step, env: Mapping[str, int], ceiling: Ceilings, threads: int
) -> float | None:
    """Seconds of the step's operations, each kind at its rate; None where one is not known."""
    seconds = 0.0
    for kind, form, flops in operations(step.node, env):
        # What was not measured is taken for float linears: a third party's backend may lack an op.
        gives = ceiling.flop_s(kind, threads) or ceiling.flop_s(FLOAT, threads)
        if not gives:
            return None
        seconds += flops / gives / (ceiling.many.get(form, 1.0) if env["T"] > 1 else 1.0)
    return seconds


def _format_slowdown(step: Step, ceiling: Ceilings) -> float:
    """How much longer than at the memory's rate the step's weights take, by their formats."""
    sizes = [
        (s.meta.bound().nbytes, ceiling.shares.get(s.dtype.name, 1.0))
        for s in step.node.sources
        if s.base.op == WEIGHT
    ]
    total = sum(nbytes for nbytes, _ in sizes)
    return sum(nbytes / share for nbytes, share in sizes) / total if total else 1.0


def step_env(tokens: int, cached: int) -> dict[str, int]:
    """The Vars of a step of ``tokens`` of one sequence, whose last one's logits are wanted."""
    kv_sum = tokens * cached + tokens * (tokens + 1) // 2
    return {"T": tokens, "S": 1, "Q": 2, "N": 1, "kv_sum": kv_sum}


def predict_test(engine: Engine, test: Test, threads: int) -> float | None:
    """Seconds of a test of `bench`, predicted; None where something for that was not measured."""
    prompt, token = plans = engine.generation_plans()
    predictor = TimePredictor.of(plans, threads)
    if test.gen:
        own = predictor.seconds(token, step_env(1, test.middle_length - 1))
        return None if own is None else own * test.gen
    end, most = test.depth + test.prompt, engine.limits.tokens
    chunks = [(min(most, end - at), at) for at in range(test.depth, end, most)]
    parts = [predictor.seconds(prompt, step_env(*chunk)) for chunk in chunks]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


# ------------------------------------------------------------------------------------------ dry run


def dry_run(
    model: str | Path | Checkpoint,
    *,
    model_def: str | Path | None = None,
    type: str | None = None,
    device: str = "auto",
    gpu_layers: int | str = "auto",
    context: int = DEFAULT_CONTEXT,
    kv_type: str | None = None,
    linear: str = "auto",
    threads: int = 0,
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    no_fuse: str | Sequence[str] = (),
    no_kernels: str | Sequence[str] = (),
    free: int | None = None,
) -> DryRun:
    """What `load` and a generation would do with ``model``, from its header: no tensor is read.

    Arguments as in `load`; ``device`` may be one that is not usable here. ``free``: bytes that are
    free in a memory beside the host's; None: what its device says, and enough where there is none.
    """
    own = check(RULES | {"free": Optional(Integer())}, dict(locals()))
    file = open_checkpoint(model, data=False) if isinstance(model, (str, os.PathLike)) else model
    decoder = build_decoder(file, model_def, type)
    limits = decoder.limits(graph_limits(own["context"], kv_type, device))
    pinned = {"pins": own["place"], "strict": own["strict"]}
    planner = _Planner(decoder.weights, device, backend_options(own), own["free"], **pinned)
    engine = Engine(decoder, planner, limits)
    engine.offload_layers(own["gpu_layers"])
    return _summarize(file, decoder, engine, planner)


def _summarize(file: Checkpoint, decoder: Decoder, engine: Engine, planner: _Planner) -> DryRun:
    from ..backends.cpu.runtime.isa import thread_count

    prefill, token = plans = engine.generation_plans()
    predictor = TimePredictor.of(plans, thread_count(planner.options))
    most = engine.limits.tokens
    kv = {name.removeprefix("kv.") for name in engine.outputs if name.startswith("kv.")}
    notes = [f"{name} is not usable here: {why}" for name, why in planner.skipped.items()
             if registry.find(name).expected() or planner.backends[0].name == name]  # fmt: skip
    if engine.gpu_offload:
        notes.append(str(engine.gpu_offload))
    return DryRun(
        model=str(file.path),
        model_type=model_type(file, decoder.weights),
        device=planner.backends[0].name,
        context=engine.limits.context,
        kv_type=engine.limits.kv_dtype,
        threads=predictor.threads,
        notes=notes,
        prefill=_phase(f"a prompt of {most}", prefill, most, 0, predictor),
        token=_phase("a token", token, 1, min(most, engine.limits.context - 1), predictor),
        memory=_memory(plans, kv),
        basis=predictor.basis(),
        lacking=predictor.lacking(plans),
    )


def _phase(name: str, plan: Plan, tokens: int, cached: int, predictor: TimePredictor) -> Phase:
    env = step_env(tokens, cached)
    ops: dict[str, Counter[str]] = {}
    for step in plan.steps:
        ops.setdefault(step.backend.name, Counter())[step.node.op] += 1
    return Phase(
        name=name,
        tokens=tokens,
        cached=cached,
        ops=ops,
        misses=[Miss(*what, steps) for what, steps in plan.misses().items()],
        copies=plan.copies(),
        nbytes=sum(leaf_bytes(step.node, env) for step in plan.steps),
        flops=sum(get(step.node.op).node_cost(step.node, env).flops for step in plan.steps),
        seconds=predictor.seconds(plan, env),
    )


def _memory(plans: Sequence[Plan], kv: set[str]) -> dict[str, Memory]:
    """What the plans need in each memory, weights as they are stored."""
    buffers: dict[str, dict[tuple[str, object], tuple[str, int]]] = {}
    for plan in plans:
        for step in plan.steps:
            for key, nbytes, _ in leaf_buffers(step):
                is_weight = plan.leaves[key[0]].op == WEIGHT
                kind = "weights" if is_weight else "kv" if key[0] in kv else "state"
                buffers.setdefault(step.memory, {})[key] = kind, nbytes
    found = {}
    for memory in sorted({*buffers, *(m for plan in plans for m in plan.arena)}):
        sums = Counter[str]()
        for kind, nbytes in buffers.get(memory, {}).values():
            sums[kind] += nbytes
        sums["arena"] = max(plan.arena.get(memory, 0) for plan in plans)
        found[memory] = Memory(**sums)
    return found
