"""Times of the requests of a load: latencies and throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
PREFILL, DECODE = "prefill", "decode"  # kinds of steps; a step with a part of a prompt is a prefill


@dataclass
class StepTotals:
    """Number of steps of one kind, and their time in seconds."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a step."""
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds


def step_totals() -> dict[str, StepTotals]:
    """Return totals of no steps, by kind."""
    return {kind: StepTotals() for kind in (PREFILL, DECODE)}


class StepPhases:
    """Base of results with steps: their number and time, in all and by kind (``phases``)."""

    phases: Mapping[str, StepTotals]

    @property
    def busy_s(self) -> float:
        """Time in which steps run."""
        return sum(each.seconds for each in self.phases.values())

    @property
    def steps(self) -> int:
        """Number of steps."""
        return sum(each.steps for each in self.phases.values())

    def steps_as_dict(self) -> dict[str, Any]:
        """Return the JSON form of the steps."""
        phases = {kind: vars(totals) for kind, totals in self.phases.items()}
        return {"busy_s": self.busy_s, "steps": self.steps, "phases": phases}


@dataclass
class RequestTimes:
    """Times of one request in seconds, from its scheduled arrival.

    Attributes:
        arrival_s: scheduled arrival, from the beginning of the test.
        queue_s: until the first step that computes it; None if unknown.
        ttft_s: until its first token.
        end_s: until its last token.
        intervals_s: between consecutive tokens.
        prompt_tokens: tokens of its prompt.
        cached_tokens: tokens of its prompt that were found in the cache.
        output_tokens: tokens sampled.
        preemptions: number of times it had to give up its blocks.
    """

    arrival_s: float
    queue_s: float | None
    ttft_s: float
    end_s: float
    intervals_s: list[float]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int

    @classmethod
    def of(
        cls,
        arrival_s: float,
        started_s: float | None,
        times: Sequence[float],
        prompt_tokens: int,
        cached_tokens: int = 0,
        output_tokens: int | None = None,
        preemptions: int = 0,
    ) -> RequestTimes:
        """Return the times of a request.

        Args:
            arrival_s: its scheduled arrival.
            started_s: start of its first step; None if unknown.
            times: when its tokens came.
            prompt_tokens: see above, as the others.
            cached_tokens: see above.
            output_tokens: as many as ``times`` by default.
            preemptions: see above.
        """
        return cls(
            arrival_s=arrival_s,
            queue_s=None if started_s is None else started_s - arrival_s,
            ttft_s=times[0] - arrival_s,
            end_s=times[-1] - arrival_s,
            intervals_s=np.diff(times).tolist(),
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=len(times) if output_tokens is None else output_tokens,
            preemptions=preemptions,
        )


@dataclass(frozen=True)
class LoadTimes:
    """Times of all requests.

    Attributes:
        requests: times of each request, in the order of arrival.
        wall_s: from the first arrival to the last token.
    """

    requests: Sequence[RequestTimes]
    wall_s: float

    @property
    def rates(self) -> dict[str, float]:
        """Requests, sampled tokens, and all tokens (those of prompts, too) per second."""
        sampled = sum(each.output_tokens for each in self.requests)
        prompts = sum(each.prompt_tokens for each in self.requests)
        counts = {
            "requests_s": len(self.requests), "output_tok_s": sampled,
            "total_tok_s": prompts + sampled,
        }  # fmt: skip
        return {name: count / self.wall_s for name, count in counts.items()}

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Return mean and percentiles in seconds, by name of the latency."""
        kinds = {
            "ttft_s": [each.ttft_s for each in self.requests],
            "itl_s": [gap for each in self.requests for gap in each.intervals_s],
            "queue_s": [each.queue_s for each in self.requests if each.queue_s is not None],
            "e2e_s": [each.end_s for each in self.requests],
        }
        return {name: _percentiles(values) for name, values in kinds.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        requests = [asdict(each) for each in self.requests]
        own = {"wall_s": self.wall_s, **self.rates, **self.percentiles()}
        return {**own, "requests": requests}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    names = [f"p{number}" for number in PERCENTILES]
    return {"mean": float(np.mean(values)), **dict(zip(names, found))}
