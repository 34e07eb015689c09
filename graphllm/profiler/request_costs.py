"""Costs by request: time, bytes and FLOPs of a profiled phase, divided among its requests.

Every nanosecond that `accounting` attributes to a cause is charged to a request, so that the costs
of all requests add up to the wall time, less what is unattributed. The rules of division, for each
step of each run of a plan:

- **FLOPs**: those that the op declares for the request's own tokens, (query, key) pairs and rows of
  logits, as if the request ran alone.
- **Time**: in proportion to FLOPs; that is by tokens for linears, by (query, key) pairs for
  attention, by rows for sampling. Time of an op without FLOPs: in proportion to the bytes that it
  moves for each request alone.
- **Bytes**: of an op that reads weights in proportion to FLOPs, so that all tokens share the
  weights equally; of any other op in proportion to what it moves for each request alone.
- **Gaps and host time**: equally among the sequences of the run; host time before a run belongs to
  that run, host time after the last step of a pass to the last run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.bill import OpCost
from .accounting import Pass, run_times, runs_of
from .record import Run, plans_of
from .step_shares import StepShares

if TYPE_CHECKING:
    from ..engine.sequence import ActiveSequence


@dataclass
class RequestCost:
    """Cost of one request, summed over the passes of a profile.

    Attributes:
        request: its index among the prompts.
        tokens: tokens that were computed for it; those found in the cache do not count.
        ops: cost by op, with the names of the profile's table; copies between memories included.
        gaps: its share of the nanoseconds in which a run is in progress, but none of its steps.
        host: its share of the nanoseconds between runs.
    """

    request: int
    tokens: int = 0
    ops: dict[str, OpCost] = field(default_factory=dict)
    gaps: float = 0.0
    host: float = 0.0

    @property
    def ns(self) -> float:
        """Nanoseconds of all ops, gaps and host time."""
        return sum(op.ns for op in self.ops.values()) + self.gaps + self.host

    @property
    def bytes(self) -> float:
        """Bytes of all ops."""
        return sum(op.bytes for op in self.ops.values())

    @property
    def flops(self) -> float:
        """FLOPs of all ops."""
        return sum(op.flops for op in self.ops.values())

    def add(self, other: RequestCost) -> None:
        """Add the cost of the same request in another phase."""
        self.tokens += other.tokens
        self.gaps += other.gaps
        self.host += other.host
        for name, op in other.ops.items():
            self.ops.setdefault(name, OpCost()).add(op.ns, op.bytes, op.flops)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form (docs/profile-format.md)."""
        ops = {name: vars(op) for name, op in self.ops.items()}
        whole = {"ns": self.ns, "bytes": self.bytes, "flops": self.flops}
        own = {"request": self.request, "tokens": self.tokens, **whole}
        return {**own, "gaps": self.gaps, "host": self.host, "ops": ops}


def request_costs(
    passes: Sequence[Pass], runs: Sequence[Run], requests: Mapping[ActiveSequence, int]
) -> list[RequestCost]:
    """Divide the time of a phase among its requests, by the rules at the top of this module.

    Args:
        passes: the profiled passes.
        runs: the runs of the phase.
        requests: index of the request of each sequence, in every pass. What belongs to other
            sequences, which ran at the same time, is left out.

    Returns:
        One cost for each request that took part, by index.
    """
    shares = {plan: StepShares(plan) for plan in plans_of([run for run in runs if run.chunks])}
    found: dict[int, RequestCost] = {}
    ignored = RequestCost(-1)
    for window in passes:
        own = [run for run in runs_of(window, runs) if run.chunks]
        times, rest = run_times(window, own)
        for at, (run, (host, gaps, _)) in enumerate(zip(own, times)):
            charged = [
                found.setdefault(index, RequestCost(index)) if index is not None else ignored
                for index in (requests.get(chunk.sequence) for chunk in run.chunks)
            ]
            last = rest if at == len(own) - 1 else 0
            parts = shares[run.plan].divide([run])
            for index, (cost, chunk) in enumerate(zip(charged, run.chunks)):
                cost.tokens += chunk.stop - chunk.start
                cost.gaps += gaps / len(charged)
                cost.host += (host + last) / len(charged)
                add_ops(cost.ops, shares[run.plan].names, parts[:, index])
    return [found[index] for index in sorted(found)]


def add_ops(ops: dict[str, OpCost], names: Sequence[str], parts: np.ndarray) -> None:
    """Add the nanoseconds, bytes and FLOPs of each op, ``parts`` [3, ops], to ``ops``."""
    for name, part in zip(names, parts.T.tolist()):
        ops.setdefault(name, OpCost()).add(*part)


def total_costs(phases: Iterable[Iterable[RequestCost]]) -> list[RequestCost]:
    """Return the costs of each request over several phases."""
    found: dict[int, RequestCost] = {}
    for phase in phases:
        for cost in phase:
            found.setdefault(cost.request, RequestCost(cost.request)).add(cost)
    return [found[index] for index in sorted(found)]
