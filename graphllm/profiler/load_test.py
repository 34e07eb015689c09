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

from ..engine.completion import Sampled
from ..engine.request import Sampling
from .bench import filler_prompts, filler_tokens, leaf_bytes
from .engine_requests import cancelled_at_end, finish, run_step, submitted
from .load_requests import LoadRequest
from .load_times import LoadTimes, RequestTimes

if TYPE_CHECKING:
    from ..compiler.plan import Plan
    from ..engine.engine import Engine
    from ..engine.generation import Generation
    from ..engine.sequence import Chunk
    from ..loading.loaded_model import LoadedModel
    from ..runtime.recorder import BoundSegments


@dataclass(frozen=True)
class LoadResult(LoadTimes):
    """Result of a load test.

    Attributes:
        busy_s: time in which steps ran.
        steps: number of steps.
        preemptions: number of preemptions.
        hit_rate: share of the prompts' tokens that were found in the prefix cache.
        nbytes: bytes of weights and cache that all steps moved, by the declared costs.
    """

    busy_s: float
    steps: int
    preemptions: int
    hit_rate: float
    nbytes: float

    @property
    def gb_s(self) -> float:
        """Memory bandwidth over the whole test in GB/s; prefill counts its bytes, too."""
        return self.nbytes / self.wall_s / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = "busy_s", "steps", "preemptions", "hit_rate", "gb_s"
        return {**{name: getattr(self, name) for name in names}, **super().as_dict()}


class _StepLog:
    """A recorder without timestamps, for the bytes that the steps move."""

    def __init__(self) -> None:
        self.runs: dict[tuple[Plan, tuple[tuple[str, int], ...]], int] = {}

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """Take no note of the chunks."""

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
        preempted, steps = engine.scheduler.preempted, engine.batcher.steps
        log, busy, running = _StepLog(), [0.0], list[_Running]()
        start = time.perf_counter()
        with cancelled_at_end(engine, (each.generation for each in running)):
            _serve(engine, requests, sampling, log, busy, start, seen, running)
    found = [_times(each, start) for each in running]
    end = max(each.times[-1] for each in running)
    hits, queries = manager.hits - before[0], manager.queries - before[1]
    return LoadResult(
        requests=found,
        wall_s=end - start - requests[0].arrival_s,
        busy_s=busy[0],
        steps=engine.batcher.steps - steps,
        preemptions=engine.scheduler.preempted - preempted,
        hit_rate=hits / queries if queries else 0.0,
        nbytes=log.nbytes,
    )


def warm_up(engine: Engine, sampling: Sampling) -> None:
    """Run each kind of step with each number of sequences that has a plan of its own."""
    limits, most, count = engine.limits, engine.scheduler.sequences, 1
    long = filler_tokens(min(limits.context - 8, limits.tokens + 1), engine.vocab)
    while True:
        # Of two tokens: a prompt of one is computed by a decode step.
        short = filler_prompts(count, 2, engine.vocab)
        with submitted(engine, short, sampling, 4) as alone:
            finish(engine, alone)
        if limits.context > 8:  # others decode while a prompt is prefilled in several steps
            with submitted(engine, short[1:], sampling, 8) as mixed:
                engine.step()
                with submitted(engine, [long], sampling, 4) as prefilled:
                    finish(engine, [*mixed, *prefilled])
        if count == most:
            return
        count = min(2 * count, most)


def _serve(
    engine: Engine, requests: Sequence[LoadRequest], sampling: Sampling, log: _StepLog,
    busy: list[float], start: float, seen: Callable[[int], None], running: list[_Running],
) -> None:  # fmt: skip
    """Submit requests when they are due, and run steps until all have ended.

    ``running``: empty; gets all requests, as they are submitted.
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
        run_step(engine, [each.generation for each in active], (log, log))
        busy[0] += time.perf_counter() - now
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
