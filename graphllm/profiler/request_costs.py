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

from ..engine.forward_feeds import kv_pairs
from ..graph.tensor import WEIGHT
from ..ops import get
from .accounting import Pass, run_times, runs_of
from .record import GROUP_KEYS, Row, Run

if TYPE_CHECKING:
    from ..compiler.plan import Plan, Step
    from ..engine.sequence import ActiveSequence, Chunk
    from ..graph.op import Cost


@dataclass
class OpCost:
    """Nanoseconds, bytes and FLOPs of an op."""

    ns: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, ns: float, nbytes: float, flops: float) -> None:
        """Add a cost."""
        self.ns += ns
        self.bytes += nbytes
        self.flops += flops


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
    passes: Sequence[Pass],
    runs: Sequence[Run],
    rows: Iterable[Row],
    requests: Mapping[ActiveSequence, int],
) -> list[RequestCost]:
    """Divide the time of a phase among its requests, by the rules at the top of this module.

    Args:
        passes: the profiled passes.
        runs: the runs of the phase.
        rows: the rows of these runs, whose ops' names are used.
        requests: index of the request of each sequence, in every pass. What belongs to other
            sequences, which ran at the same time, is left out.

    Returns:
        One cost for each request that took part, by index.
    """
    names = {(row.plan, row.step): GROUP_KEYS["op"](row) for row in rows}
    plans = {plan: _PlanCosts(plan) for plan in dict.fromkeys(run.plan for run in runs)}
    number = {plan: index for index, plan in enumerate(plans)}
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
            for cost, chunk in zip(charged, run.chunks):
                cost.tokens += chunk.stop - chunk.start
                cost.gaps += gaps / len(charged)
                cost.host += (host + last) / len(charged)
            for step, ns in enumerate(run.times.tolist()):
                name = names[number[run.plan], step]
                for cost, part in zip(charged, plans[run.plan].divide(step, ns, run)):
                    cost.ops.setdefault(name, OpCost()).add(*part)
    return [found[index] for index in sorted(found)]


def total_costs(phases: Iterable[Iterable[RequestCost]]) -> list[RequestCost]:
    """Return the costs of each request over several phases."""
    found: dict[int, RequestCost] = {}
    for phase in phases:
        for cost in phase:
            found.setdefault(cost.request, RequestCost(cost.request)).add(cost)
    return [found[index] for index in sorted(found)]


class _PlanCosts:
    """Declared costs of the steps of a plan, by what a request computes in a run."""

    def __init__(self, plan: Plan) -> None:
        self._steps = plan.steps
        # Only attention's cost depends on the number of (query, key) pairs, which grows with each
        # token; the other costs are the same in all decode steps.
        self._by_pairs = [_depends_on_pairs(step) for step in plan.steps]
        self._reads_weights = [any(s.base.op == WEIGHT for s in p.node.sources) for p in plan.steps]
        self._known: dict[tuple[int, int, int, int, int], Cost] = {}

    def divide(self, step: int, ns: int, run: Run) -> list[tuple[float, float, float]]:
        """Return the (nanoseconds, bytes, FLOPs) of one step of a run for each of its chunks."""
        alone = [self._cost(step, chunk_env(chunk)) for chunk in run.chunks]
        flops = [cost.flops for cost in alone]
        nbytes = [cost.bytes for cost in alone]
        by_work = _shares(flops) or _shares(nbytes)
        by_work = by_work or _shares([chunk.stop - chunk.start for chunk in run.chunks])
        by_bytes = by_work if self._reads_weights[step] else _shares(nbytes) or by_work
        moved = self._cost(step, run.env).bytes
        return [
            (ns * work, moved * share, own) for work, share, own in zip(by_work, by_bytes, flops)
        ]

    def _cost(self, step: int, env: Mapping[str, int]) -> Cost:
        pairs = env.get("kv_sum", 0) if self._by_pairs[step] else 0
        key = step, env.get("T", 0), env.get("S", 0), env.get("N", 0), pairs
        if key not in self._known:
            node = self._steps[step].node
            self._known[key] = get(node.op).node_cost(node, env)
        return self._known[key]


def chunk_env(chunk: Chunk) -> dict[str, int]:
    """Return the values of the Vars of a step that computes one chunk alone."""
    tokens = chunk.stop - chunk.start
    pairs = kv_pairs(chunk.start, tokens)
    return {"T": tokens, "S": 1, "Q": 2, "N": int(chunk.samples), "kv_sum": pairs}


def _depends_on_pairs(step: Step) -> bool:
    """Whether the declared cost of a step depends on the number of (query, key) pairs."""
    op, env = get(step.node.op), {"T": 1, "S": 1, "Q": 2, "N": 1}
    few, many = (op.node_cost(step.node, {**env, "kv_sum": pairs}) for pairs in (1, 1000))
    return few != many


def _shares(values: Sequence[float]) -> list[float]:
    """Return each value's share of the sum; empty if the sum is 0."""
    total = sum(values)
    return [value / total for value in values] if total > 0 else []
