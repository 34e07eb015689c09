"""Load test: requests that arrive over time, their latencies, and the throughput of the engine.

One thread submits the requests that are due and runs steps; while there is nothing to compute, it
sleeps until the next arrival. Times count from the scheduled arrival of a request, so a step that
was running then adds to its latency. Nothing is tokenized, and no token ends an answer early. A
warm-up binds the plans before, which a batch of a new size would otherwise wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..compiler.plan import HOST
from ..engine.batch_plans import bind_batch_plans
from ..engine.completion import Sampled
from ..engine.request import Sampling
from .bench import filler_prompts, leaf_bytes
from .engine_requests import cancelled_at_end, finish, run_step, submitted
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

if TYPE_CHECKING:
    from ..compiler.plan import Plan
    from ..engine.engine import Engine
    from ..engine.generation import Generation
    from ..engine.sequence import Chunk
    from ..loading.loaded_model import LoadedModel
    from ..runtime.recorder import BoundSegments


@dataclass(frozen=True)
class LoadResult(StepPhases, LoadTimes):
    """Result of a load test.

    Attributes:
        phases: the steps by kind.
        preemptions: number of preemptions.
        hit_rate: share of the prompts' tokens that were found in the prefix cache.
        nbytes: bytes of weights and cache that all steps moved, by the declared costs.
    """

    phases: Mapping[str, StepTotals]
    preemptions: int
    hit_rate: float
    nbytes: float

    @property
    def gb_s(self) -> float:
        """Memory bandwidth over the whole test in GB/s; prefill counts its bytes, too."""
        return self.nbytes / self.wall_s / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        own = {name: getattr(self, name) for name in ("preemptions", "hit_rate", "gb_s")}
        return {**self.steps_as_dict(), **own, **super().as_dict()}


class _StepLog:
    """A recorder without timestamps, for the bytes that the steps move.

    Attributes:
        begun: number of steps that began.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.runs: dict[tuple[Plan, tuple[tuple[str, int], ...]], int] = {}

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Count the step."""
        self.begun += 1

    def run(self, plan: Plan, segments: BoundSegments, env: Mapping[str, int]) -> None:
        """Run ``segments`` without timestamps."""
        for segment, _ in segments:
            segment.run(None)
        key = plan, tuple(env.items())
        self.runs[key] = self.runs.get(key, 0) + 1

    @property
    def nbytes(self) -> float:
        """Bytes of weights and cache that all runs moved."""
        return sum(
            count * sum(leaf_bytes(step.node, dict(env)) for step in plan.steps)
            for (plan, env), count in self.runs.items()
        )


@dataclass
class _Running:
    """A request that was submitted, and when its tokens were sampled."""

    request: LoadRequest
    generation: Generation
    times: list[float] = field(default_factory=list)


def run(
    llm: LoadedModel,
    requests: Sequence[LoadRequest],
    sampling: Sampling,
    seen: Callable[[int], None],
) -> LoadResult:
    """Run a load test.

    Args:
        llm: the model; its cache is cleared.
        requests: the requests, in the order of arrival.
        sampling: sampling settings; request i is sampled with the seed ``sampling.seed + i``.
        seen: callback with the number of requests that have ended.

    Raises:
        RequestError: a prompt does not fit the context.
        NumericError: logits are not finite.
    """
    engine = llm.engine
    with engine.lock.hold("a load test"):
        warm_up(engine, sampling)
        engine.clear_cache()
        manager, before = engine.manager, (engine.manager.hits, engine.manager.queries)
        preempted = engine.scheduler.preempted
        logs, phases, running = (_StepLog(), _StepLog()), step_totals(), list[_Running]()
        start = time.perf_counter()
        with cancelled_at_end(engine, (each.generation for each in running)):
            _serve(engine, requests, sampling, logs, phases, start, seen, running)
    found = [_times(each, start) for each in running]
    end = max(each.times[-1] for each in running)
    hits, queries = manager.hits - before[0], manager.queries - before[1]
    return LoadResult(
        requests=found,
        wall_s=end - start - requests[0].arrival_s,
        phases=phases,
        preemptions=engine.scheduler.preempted - preempted,
        hit_rate=hits / queries if queries else 0.0,
        nbytes=sum(log.nbytes for log in logs),
    )


def warm_up(engine: Engine, sampling: Sampling) -> None:
    """Bind the plans of all batches, and run a step of each size and a full step of prompts.

    The first runs load kernels. On a device, libraries choose and load one by the number of tokens,
    so prompts of all multiples of a block are run, too.
    """
    bind_batch_plans(engine, lambda what, done, total: None)
    limits, most, count = engine.limits, engine.scheduler.sequences, 1
    while count < most:
        _run_prompts(engine, sampling, count, 2)  # a prompt of one is computed by a decode step
        count = min(2 * count, most)
    _run_prompts(engine, sampling, most, 2)
    longest = max(1, limits.context - 8)
    on_host = all(step.memory == HOST for step in engine.decode_plan().steps)
    for tokens in range(limits.block, limits.tokens, limits.block) if not on_host else ():
        engine.clear_cache()
        count = min(most, -(-tokens // longest))
        _run_prompts(engine, sampling, count, min(longest, tokens // count))
    engine.clear_cache()
    _run_prompts(engine, sampling, most, max(1, min(longest, limits.tokens // most)))


def _run_prompts(engine: Engine, sampling: Sampling, count: int, length: int) -> None:
    with submitted(engine, filler_prompts(count, length, engine.vocab), sampling, 4) as own:
        finish(engine, own)


def _serve(
    engine: Engine, requests: Sequence[LoadRequest], sampling: Sampling,
    logs: tuple[_StepLog, _StepLog], phases: Mapping[str, StepTotals], start: float,
    seen: Callable[[int], None], running: list[_Running],
) -> None:  # fmt: skip
    """Submit requests when they are due, and run steps until all have ended.

    Args:
        engine: see `run`, as ``requests``, ``sampling`` and ``seen``.
        logs: get the steps with prefill, and the decode steps.
        phases: gets the steps.
        start: when the test began.
        running: empty; gets all requests, as they are submitted.
    """
    active: list[_Running] = []
    while len(running) < len(requests) or active:
        now = time.perf_counter()
        while len(running) < len(requests) and start + requests[len(running)].arrival_s <= now:
            request = requests[len(running)]
            own = replace(
                sampling, seed=(sampling.seed or 0) + len(running), max_tokens=request.max_tokens
            )
            running.append(_Running(request, engine.submit(request.prompt, own, (), ())))
            active.append(running[-1])
        if not active:
            time.sleep(max(0.0, start + requests[len(running)].arrival_s - time.perf_counter()))
            continue
        prefills = logs[0].begun
        run_step(engine, [each.generation for each in active], logs)
        kind = DECODE if logs[0].begun == prefills else PREFILL
        phases[kind].add(time.perf_counter() - now)
        for each in active:
            _collect(each)
        active = [each for each in active if not each.generation.done]
        seen(len(running) - len(active))


def _collect(each: _Running) -> None:
    """Take the results of a request."""
    events = each.generation.events
    while events:
        event = events.popleft()
        if isinstance(event, Sampled) and event.token is not None:
            each.times.append(event.at)


def _times(each: _Running, start: float) -> RequestTimes:
    generation, prompt = each.generation, len(each.request.prompt)
    return RequestTimes.of(
        arrival_s=each.request.arrival_s,
        started_s=generation.started - start,
        times=[at - start for at in each.times],
        prompt_tokens=prompt,
        cached_tokens=prompt - generation.prefill_tokens,
        preemptions=generation.sequence.preemptions,
    )
