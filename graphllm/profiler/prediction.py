"""Dry run of a model before any weight is loaded: placement, copies, memory and predicted time.

A dry run compiles the plans that a generation needs, from a model's header alone. A backend that is
not usable here can be asked for: kernels are selected without a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import backends as registry
from ..arguments import Integer, Optional, check
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..compiler.plan import Copies, Plan
from ..engine.engine import Engine
from ..engine.kv_memory import kv_budget
from ..errors import RequestError
from ..graph.tensor import WEIGHT
from ..loading.load import (
    DEFAULT_CONTEXT,
    DEFAULT_SEQUENCES,
    RULES,
    backend_options,
    build_decoder,
    graph_limits,
    memory_left,
    sized_limits,
)
from ..model.decoder import Decoder
from ..ops import get
from ..runtime.gpu_offload import leaf_buffers
from .batch_prediction import BatchPrediction, predict_batch
from .bench import Test, leaf_bytes, model_type
from .load_prediction import LoadPrediction, predict_load
from .load_requests import Load
from .planner import Planner
from .step_times import TimePredictor, step_env

DEFAULT_DEPTH = 512  # tokens of each prompt of a batch

# ------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Miss:
    """Steps of one op that do not run on the first backend, and why."""

    op: str
    backend: str
    why: str
    steps: int


@dataclass(frozen=True)
class StepPrediction:
    """Prediction of one step: ``tokens`` tokens of one sequence after ``cached`` ones.

    Attributes:
        ops: number of steps by backend and op.
        misses: steps that do not run on the first backend.
        copies: copies between memories.
        nbytes: bytes of weights and cache.
        flops: operations.
        seconds: predicted time; None if a measurement that it needs is missing.
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
        """Return the JSON form."""
        copies = [{**vars(copy), "users": dict(copy.users)} for copy in self.copies]
        return {**vars(self), "misses": list(map(asdict, self.misses)), "copies": copies}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in one memory: weights, KV cache, other inputs and state, intermediates."""

    weights: int = 0
    kv: int = 0
    state: int = 0
    arena: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return self.weights + self.kv + self.state + self.arena


@dataclass(frozen=True)
class DryRun:
    """Result of `dry_run`.

    Attributes:
        notes: GPU offload, and backends that are not usable.
        prefill: prediction of a prefill step.
        token: prediction of a decode step.
        memory: bytes by memory.
        basis: measurements that the predicted times are based on.
        lacking: why a time is not predicted.
        batches: predictions of many sequences.
        load: prediction of a load; None if none was asked for, or a measurement is missing.
    """

    model: str
    model_type: str
    device: str
    context: int
    kv_type: str
    threads: int
    notes: Sequence[str]
    prefill: StepPrediction
    token: StepPrediction
    memory: Mapping[str, MemoryUse]
    basis: Sequence[str]
    lacking: Sequence[str] = field(default_factory=tuple)
    batches: Sequence[BatchPrediction] = field(default_factory=tuple)
    load: LoadPrediction | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        memory = {name: {**vars(m), "total": m.total} for name, m in self.memory.items()}
        phases = {"prefill": self.prefill.as_dict(), "token": self.token.as_dict()}
        batches = list(map(asdict, self.batches))
        load = self.load and self.load.as_dict()
        return {**vars(self), **phases, "memory": memory, "batches": batches, "load": load}


def predict_test(engine: Engine, test: Test, threads: int) -> float | None:
    """Predict the seconds of a test of `bench`; None if a measurement is missing.

    Args:
        engine: the engine that the test runs on.
        test: the test.
        threads: number of CPU threads.
    """
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
    max_sequences: int = DEFAULT_SEQUENCES,
    kv_memory: int | str = "auto",
    kv_type: str | None = None,
    linear: str = "auto",
    deterministic: bool = False,
    threads: int = 0,
    place: Mapping[str, str] | None = None,
    strict: bool = False,
    no_fuse: str | Sequence[str] = (),
    no_kernels: str | Sequence[str] = (),
    free: int | None = None,
    batches: Sequence[int] = (),
    depth: int = DEFAULT_DEPTH,
    load: Load | None = None,
) -> DryRun:
    """Predict placement, memory and time of ``model`` from its header; no tensor is read.

    Args:
        model: path or open model file. Other arguments are those of `load`.
        device: may be a backend that is not usable here.
        free: free bytes of device memory; None for what the device reports, or unlimited if the
            device does not exist.
        batches: numbers of sequences to predict prefill and decode of; they raise
            ``max_sequences``.
        depth: tokens of each prompt of these.
        load: a load to predict; it raises ``max_sequences``.

    Raises:
        GraphllmError: as in `load`.
    """
    given = {name: value for name, value in locals().items() if name not in ("batches", "load")}
    own = check(RULES | {"free": Optional(Integer()), "depth": Integer(1)}, given)
    file = open_checkpoint(model, data=False)
    decoder = build_decoder(file, model_def, type)
    most = max([own["max_sequences"], *batches, *([load.parallel] if load else [])])
    wanted = graph_limits(own["context"], kv_type, device, most)
    pinned = {"pins": own["place"], "strict": own["strict"]}
    planner = Planner(decoder.weights, device, backend_options(own), own["free"], **pinned)
    limits = sized_limits(decoder, planner, wanted, own["kv_memory"])
    engine = Engine(decoder, planner, limits)
    engine.offload_layers(own["gpu_layers"])
    found = _summarize(file, decoder, engine, planner)
    left = memory_left(decoder, planner)
    room = kv_budget(own["kv_memory"], left)
    depth = min(own["depth"], limits.context - 1)
    many = [predict_batch(engine, decoder.caches, n, depth, room, found.threads) for n in batches]
    loaded = None if load is None else _predict_load(engine, decoder, load, found.threads)
    return replace(found, batches=many, load=loaded)


def _predict_load(
    engine: Engine, decoder: Decoder, load: Load, threads: int
) -> LoadPrediction | None:
    """Predict a load. RequestError: a request does not fit the context."""
    if load.context > engine.limits.context:
        what = f"a request of {load.context} tokens exceeds the context of {engine.limits.context}"
        raise RequestError(what, "context")
    engine.scheduler.sequences = load.parallel
    return predict_load(engine, decoder.caches, load.requests, threads)


def _summarize(file: Checkpoint, decoder: Decoder, engine: Engine, planner: Planner) -> DryRun:
    from ..backends.cpu.runtime.cores import thread_count

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
        prefill=_phase(f"prefill of {most} tokens", prefill, most, 0, predictor),
        token=_phase("decode step", token, 1, min(most, engine.limits.context - 1), predictor),
        memory=_memory(plans, engine.all_plans(), kv),
        basis=predictor.basis(),
        lacking=predictor.lacking(plans),
    )


def _phase(
    name: str, plan: Plan, tokens: int, cached: int, predictor: TimePredictor
) -> StepPrediction:
    env = step_env(tokens, cached)
    ops: dict[str, Counter[str]] = {}
    for step in plan.steps:
        ops.setdefault(step.backend.name, Counter())[step.node.op] += 1
    return StepPrediction(
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


def _memory(plans: Sequence[Plan], reserved: Sequence[Plan], kv: set[str]) -> dict[str, MemoryUse]:
    """Return the bytes of each memory after loading.

    Args:
        plans: plans that are bound, whose weights and state are allocated.
        reserved: plans for whose intermediates memory is allocated.
        kv: names of the state that is the KV cache.
    """
    buffers: dict[str, dict[tuple[str, object], tuple[str, int]]] = {}
    for plan in plans:
        for step in plan.steps:
            for key, nbytes, _ in leaf_buffers(step):
                is_weight = plan.leaves[key[0]].op == WEIGHT
                kind = "weights" if is_weight else "kv" if key[0] in kv else "state"
                buffers.setdefault(step.memory, {})[key] = kind, nbytes
    found = {}
    for memory in sorted({*buffers, *(m for plan in reserved for m in plan.arena)}):
        sums = Counter[str]()
        for kind, nbytes in buffers.get(memory, {}).values():
            sums[kind] += nbytes
        sums["arena"] = max(plan.arena.get(memory, 0) for plan in reserved)
        found[memory] = MemoryUse(**sums)
    return found
