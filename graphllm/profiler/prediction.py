"""Dry run of a model before any weight is loaded: placement, copies, memory and predicted time.

A dry run compiles the plans that a generation needs, from a model's header alone. A backend that is
not usable here can be asked for: kernels are selected without a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from .. import backends as registry
from ..arguments import Integer, Optional, check
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint, states_pooling
from ..compiler.plan import Copies, Plan
from ..engine.encoder_engine import EncoderEngine
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
    build_model,
    graph_limits,
    memory_left,
    model_spec,
    sized_limits,
)
from ..loading.loaded_encoder import encoder_arguments, head_of
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..model.spec import ModelSpec
from ..ops import get
from ..runtime.gpu_offload import leaf_buffers
from ..weights import Weights
from .batch_prediction import BatchPrediction, predict_batch
from .bench import Test, leaf_bytes, model_type
from .http_costs import HttpCosts
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

    A step of an encoder computes ``tokens`` tokens of several texts.

    Attributes:
        kind: "encode", "prefill" or "decode".
        ops: number of steps by backend and op.
        misses: steps that do not run on the first backend.
        copies: copies between memories.
        nbytes: bytes of weights and cache.
        flops: operations.
        seconds: predicted time; None if a measurement that it needs is missing.
    """

    kind: str
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
        kv_type: dtype of the KV cache; None for an encoder.
        encode: prediction of a step of an encoder, or over the source of an encoder-decoder; None
            for a decoder.
        prefill: prediction of a prefill step; None for an encoder.
        token: prediction of a decode step; None for an encoder.
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
    kv_type: str | None
    threads: int
    notes: Sequence[str]
    encode: StepPrediction | None
    prefill: StepPrediction | None
    token: StepPrediction | None
    memory: Mapping[str, MemoryUse]
    basis: Sequence[str]
    lacking: Sequence[str] = field(default_factory=tuple)
    batches: Sequence[BatchPrediction] = field(default_factory=tuple)
    load: LoadPrediction | None = None

    @property
    def phases(self) -> list[StepPrediction]:
        """Predictions of the steps that the model has."""
        return [each for each in (self.encode, self.prefill, self.token) if each is not None]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        memory = {name: {**vars(m), "total": m.total} for name, m in self.memory.items()}
        own = {"encode": self.encode, "prefill": self.prefill, "token": self.token}
        phases = {name: each and each.as_dict() for name, each in own.items()}
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
    prefill: str = "auto",
    deterministic: bool = False,
    low_mem: bool = False,
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
    spec = model_spec(file, model_def)
    if spec.is_encoder:
        default = {n: each.default for n, each in signature(dry_run).parameters.items()}
        encoder_arguments(given, default)
        for name, value in (("batches", batches), ("load", load)):
            if value:
                raise RequestError(f"{name} has no meaning for an encoder", name)
        return _encoder_run(file, spec, own)
    if load is not None and batches:
        raise RequestError("give batches or a load, not both", "batches")
    decoder = build_decoder(file, model_def, type)
    most = max([own["max_sequences"], *batches, *([load.parallel] if load else [])])
    wanted = graph_limits(own["context"], kv_type, device, most)
    planner = _planner(decoder.weights, own)
    limits = sized_limits(decoder, planner, wanted, own["kv_memory"])
    if load is not None and decoder.max_source(limits):
        raise RequestError("a load of an encoder-decoder is not predicted", "load")
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
    http = None
    if load.over_http and engine.gpu_offload is None:
        http = HttpCosts.on_shared_cores(threads)
    return predict_load(engine, decoder.caches, load.requests, threads, http)


def _planner(weights: Weights, own: Mapping[str, Any]) -> Planner:
    pinned = {"pins": own["place"], "strict": own["strict"]}
    return Planner(weights, own["device"], backend_options(own), own["free"], **pinned)


def _threads(planner: Planner) -> int:
    from ..backends.cpu.runtime.cores import thread_count

    return thread_count(planner.options)


def _encoder_run(file: Checkpoint, spec: ModelSpec, own: Mapping[str, Any]) -> DryRun:
    """Return the dry run of an encoder: a full batch of texts of ``depth`` tokens each."""
    pooled = states_pooling(file.path, file.metadata)
    head = "" if pooled else head_of(file, spec)
    encoder = build_model(file, spec, own["type"], head=head)
    assert isinstance(encoder, Encoder)
    planner, context = _planner(encoder.weights, own), encoder.cfg.context
    engine = EncoderEngine(encoder, planner, context)
    plan = engine.plans()["hidden"]
    length = min(own["depth"], context)
    texts = engine.limits.tokens // length
    env = {"T": texts * length, "Q": texts + 1, "S": texts, "kv_sum": texts * length**2}
    name = f"batch of {texts} texts of {length} tokens"
    predictor = TimePredictor.of([plan], _threads(planner))
    phase = _phase("encode", name, plan, env, 0, predictor)
    about = _about(file, encoder.weights, planner, predictor, [plan])
    memory = _memory([plan], [plan], set())
    return DryRun(
        **about, context=context, kv_type=None, encode=phase, prefill=None, token=None,
        memory=memory,
    )  # fmt: skip


def _about(
    file: Checkpoint, weights: Weights, planner: Planner, predictor: TimePredictor,
    plans: Sequence[Plan],
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of a `DryRun` that all models have."""
    notes = [f"{name} is not usable here: {why}" for name, why in planner.skipped.items()
             if registry.find(name).expected() or planner.backends[0].name == name]  # fmt: skip
    return {
        "model": str(file.path),
        "model_type": model_type(file, weights),
        "device": planner.backends[0].name,
        "threads": predictor.threads,
        "notes": notes,
        "basis": predictor.basis(),
        "lacking": predictor.lacking(plans),
    }


def _summarize(file: Checkpoint, decoder: Decoder, engine: Engine, planner: Planner) -> DryRun:
    prefill, token = plans = engine.generation_plans()
    encode = engine.source_plans()
    predictor = TimePredictor.of([*encode, *plans], _threads(planner))
    most, context = engine.limits.tokens, engine.limits.context
    kv = {name.removeprefix("kv.") for name in engine.outputs if name.startswith("kv.")}
    about = _about(file, decoder.weights, planner, predictor, [*encode, *plans])
    if engine.gpu_offload:
        about["notes"].append(str(engine.gpu_offload))
    source = decoder.max_source(engine.limits)
    if source:  # the target begins behind the source
        most = min(most, context - source)
    env = {"T": source, "Q": 2, "S": 1, "kv_sum": source**2}
    cached = min(most, context - source - 1)
    return DryRun(
        **about,
        context=context,
        kv_type=engine.limits.kv_dtype,
        encode=_phase("encode", f"source of {source} tokens", encode[0], env, 0, predictor)
        if encode
        else None,
        prefill=_phase(
            "prefill", f"prefill of {most} tokens", prefill, step_env(most, 0, source), 0, predictor
        ),
        token=_phase(
            "decode", "decode step", token, step_env(1, cached, source), cached, predictor
        ),
        memory=_memory([*encode, *plans], engine.all_plans(), kv),
    )


def _phase(
    kind: str, name: str, plan: Plan, env: Mapping[str, int], cached: int, predictor: TimePredictor
) -> StepPrediction:
    ops: dict[str, Counter[str]] = {}
    for step in plan.steps:
        ops.setdefault(step.backend.name, Counter())[step.node.op] += 1
    return StepPrediction(
        kind=kind,
        name=name,
        tokens=env["T"],
        cached=cached,
        ops=ops,
        misses=[Miss(*what, steps) for what, steps in plan.misses().items()],
        copies=plan.copies(),
        nbytes=sum(leaf_bytes(step.node, dict(env)) for step in plan.steps),
        flops=sum(get(step.node.op).node_cost(step.node, dict(env)).flops for step in plan.steps),
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
