"""Prediction of a load: the engine's own scheduler, on a clock of predicted step times.

The requests arrive and are scheduled, admitted and preempted as in a load test, but nothing is
computed: each step takes the time that `step_times` predicts for it from the measured ceilings.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..compiler.plan import HOST, Plan
from ..engine.forward_feeds import kv_pairs
from ..engine.sequence import ActiveSequence, Chunk, is_decode_step
from .batch_prediction import predict_prefill, predict_step
from .http_costs import HttpCosts
from .load_requests import LoadRequest
from .load_times import (
    DECODE,
    PREFILL,
    LoadTimes,
    RequestTimes,
    StepPhases,
    StepTotals,
    step_totals,
)
from .step_times import TimePredictor

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model.batch import CacheSpec

# Host time of a step, that of its ops not included: of the step itself, and of each sequence.
# Measured with 1 and 16 sequences of the demo on two threads of a Xeon: the gaps and the time
# between steps.
_HOST_S, _HOST_SEQUENCE_S = 250e-6, 14e-6
# Of enqueueing a step of a plan on a device, about two launches. Measured with prompts for Mistral
# 7B on an H200 (Emerald Rapids): 262 take 5 to 6 ms.
_ENQUEUE_S = 20e-6
_GRAIN = 64  # tokens of a sequence within which steps are predicted to take the same time


@dataclass(frozen=True)
class Capacity:
    """The load at which something is full, predicted from mean lengths.

    Attributes:
        sequences: most sequences that run at once.
        pool_sequences: sequences of mean length that the KV cache holds.
        requests_s: requests per second at which as many sequences run as the lower of both.
        output_tok_s: tokens that are sampled per second then.
    """

    sequences: int
    pool_sequences: int
    requests_s: float
    output_tok_s: float

    @property
    def full(self) -> str:
        """What is full at that load: ``KV cache`` or ``compute``."""
        return "KV cache" if self.pool_sequences < self.sequences else "compute"


@dataclass(frozen=True)
class LoadPrediction(StepPhases):
    """Prediction of a load.

    Attributes:
        times: predicted times of the requests.
        phases: the steps by kind.
        preemptions: number of preemptions.
        capacity: the load at which something is full.
        http: what HTTP takes of the engine's cores; None for nothing.
    """

    times: LoadTimes
    phases: Mapping[str, StepTotals]
    preemptions: int
    capacity: Capacity
    http: HttpCosts | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **self.steps_as_dict(),
            "preemptions": self.preemptions,
            **self.times.as_dict(),
            "capacity": vars(self.capacity),
            "http": self.http and vars(self.http),
        }


def predict_load(
    engine: Engine, groups: Iterable[CacheSpec], requests: Sequence[LoadRequest], threads: int,
    http: HttpCosts | None = None,
) -> LoadPrediction | None:  # fmt: skip
    """Predict a load test; None if a measurement that it needs is missing.

    Args:
        engine: an idle engine, whose plans are compiled but not run. Its cache is forgotten.
        groups: KV cache groups of the model.
        requests: the requests, in the order of arrival.
        threads: number of CPU threads.
        http: what HTTP takes of the engine's cores, which delays steps by as much.
    """
    clock, scheduler = _StepClock(engine, threads, http), engine.scheduler
    known = _capacity(engine, groups, requests, threads, http)
    if known is None:
        return None
    preempted = scheduler.preempted
    simulated = _Simulation(engine, requests)
    try:
        while simulated.left:
            chunks = simulated.schedule()
            seconds = clock.seconds(chunks)
            if seconds is None:
                return None
            simulated.complete(chunks, seconds)
    finally:
        simulated.forget()
    times = LoadTimes(simulated.times(), simulated.now - requests[0].arrival_s)
    preemptions = scheduler.preempted - preempted
    return LoadPrediction(times, simulated.phases, preemptions, known, http)


@dataclass
class _Running:
    request: LoadRequest
    sequence: ActiveSequence
    started: float = -1.0
    times: list[float] = field(default_factory=list)


class _Simulation:
    """Requests of a load on a simulated clock.

    Attributes:
        now: the time in seconds.
        phases: the steps by kind.
    """

    def __init__(self, engine: Engine, requests: Sequence[LoadRequest]) -> None:
        self._engine = engine
        sequences = (ActiveSequence(list(each.prompt), len(each.prompt)) for each in requests)
        self._all = [_Running(request, own) for request, own in zip(requests, sequences)]
        self._by_sequence = {each.sequence: each for each in self._all}
        self._next = 0  # to arrive
        self.left = len(self._all)
        self.now, self.phases = requests[0].arrival_s, step_totals()
        engine.manager.clear()

    def schedule(self) -> list[Chunk]:
        """Let requests arrive, and return the next step."""
        while True:
            while self._next < len(self._all) and self._due <= self.now:
                self._engine.scheduler.add(self._all[self._next].sequence)
                self._next += 1
            if chunks := self._engine.scheduler.schedule():
                return chunks
            self.now = self._due  # nothing runs before

    @property
    def _due(self) -> float:
        return self._all[self._next].request.arrival_s

    def complete(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Take note of a step."""
        for chunk in chunks:
            own = self._by_sequence[chunk.sequence]
            own.started = self.now if own.started < 0 else own.started
        self.now += seconds
        self.phases[DECODE if is_decode_step(chunks) else PREFILL].add(seconds)
        self._engine.scheduler.complete(chunks)
        for chunk in chunks:
            if not chunk.samples:
                continue
            own = self._by_sequence[chunk.sequence]
            own.times.append(self.now)
            chunk.sequence.tokens.append(0)
            if len(own.times) == own.request.max_tokens:
                self._engine.scheduler.remove(chunk.sequence)
                self.left -= 1

    def forget(self) -> None:
        """Release all blocks, and forget what they contain."""
        for each in self._all[: self._next]:
            if len(each.times) < each.request.max_tokens:
                self._engine.scheduler.remove(each.sequence)
        self._engine.manager.clear()

    def times(self) -> list[RequestTimes]:
        """Return the times of the requests."""
        return [
            RequestTimes.of(
                arrival_s=each.request.arrival_s,
                started_s=each.started,
                times=each.times,
                prompt_tokens=len(each.request.prompt),
                preemptions=each.sequence.preemptions,
            )
            for each in self._all
        ]


class _StepClock:
    """Predicted times of steps."""

    def __init__(self, engine: Engine, threads: int, http: HttpCosts | None) -> None:
        self._engine, self._threads, self._http = engine, threads, http or HttpCosts(0.0, 0.0)
        self._predictors: dict[Plan, TimePredictor] = {}
        self._known: dict[tuple[object, ...], float | None] = {}
        self._decoded: list[ActiveSequence] = []  # by the step before; empty if it was a prefill

    def seconds(self, chunks: Sequence[Chunk]) -> float | None:
        """Predict the seconds of the next step; None if a measurement is missing."""
        count = len(chunks)
        tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        decodes = is_decode_step(chunks)
        engine = self._engine
        plan = engine.decode_plan(count) if decodes else engine.prefill_plan(count)
        pairs = sum(kv_pairs(chunk.start, chunk.stop - chunk.start) for chunk in chunks)
        grain = _GRAIN * tokens
        pairs = pairs // grain * grain + grain // 2
        rows = max(1, sum(chunk.samples for chunk in chunks))
        env = {"T": tokens, "S": count, "Q": count + 1, "N": rows, "kv_sum": pairs}
        key = plan, *env.values()
        if key not in self._known:
            if plan not in self._predictors:
                self._predictors[plan] = TimePredictor.of([plan], self._threads)
            self._known[key] = self._predictors[plan].seconds(plan, env)
        found, http = self._known[key], self._http
        if found is None:
            return None
        sampled = [chunk for chunk in chunks if chunk.samples]
        begun = sum(chunk.stop == chunk.sequence.prompt_tokens for chunk in sampled)
        shared = len(sampled) * http.token_s + begun * http.request_s
        before, self._decoded = self._decoded, [c.sequence for c in chunks] if decodes else []
        ahead = decodes and self._decoded == before
        if not decodes:
            found = with_enqueueing(found, plan)
        return with_host_time(found, plan, count, ahead) + shared


def with_host_time(seconds: float, plan: Plan, sequences: int, ahead: bool) -> float:
    """Return the time of a step and of the host's work for it.

    A device runs a step meanwhile if it was launched before the results of the last one were read.

    Args:
        seconds: time of the ops.
        plan: plan of the step.
        sequences: number of sequences.
        ahead: whether the step decodes the same sequences as the last one.
    """
    host = _HOST_S + sequences * _HOST_SEQUENCE_S
    if ahead and all(step.memory != HOST for step in plan.steps):
        return max(seconds, host)
    return seconds + host


def with_enqueueing(seconds: float, plan: Plan) -> float:
    """Return the time of the ops of a prefill step, which a device runs while they are enqueued.

    Decode steps are replayed as CUDA graphs.
    """
    return max(seconds, _ENQUEUE_S * sum(step.memory != HOST for step in plan.steps))


def _capacity(
    engine: Engine, groups: Iterable[CacheSpec], requests: Sequence[LoadRequest], threads: int,
    http: HttpCosts | None,
) -> Capacity | None:  # fmt: skip
    """Return the load at which something is full; None if a measurement is missing.

    With n sequences at once, n requests take as long as their prefills and the decode steps of one.
    """
    limits, sequences = engine.limits, engine.scheduler.sequences
    prompt = max(1, round(statistics.mean(len(each.prompt) for each in requests)))
    output = max(1, round(statistics.mean(each.max_tokens for each in requests)))
    length = prompt + output // 2
    each = -(-length // limits.block)  # blocks of a sequence in a group without a window
    pools = [limits.pool_blocks(0) // each for group in groups if not group.window]
    pool = min(pools, default=sequences)
    count = max(1, min(sequences, pool))
    prefill = predict_prefill(engine, [prompt] * count, threads)
    step = predict_step(engine, [length] * count, threads)
    if prefill is None or step is None:
        return None
    step = with_host_time(step, engine.decode_plan(count), count, ahead=True)
    if http is not None:
        prefill, step = prefill + count * http.request_s, step + count * http.token_s
    rate = count / (prefill + (output - 1) * step)
    return Capacity(sequences, pool, rate, rate * output)
