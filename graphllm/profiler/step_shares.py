"""Shares of a step: the time, bytes and FLOPs of a run of a plan, divided among its chunks.

The rules are those of `request_costs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.forward_feeds import kv_pairs
from ..graph.tensor import WEIGHT
from ..ops import get
from .record import Run

if TYPE_CHECKING:
    from ..compiler.plan import Plan, Step
    from ..engine.sequence import Chunk
    from ..graph.tensor import Tensor

_MOST_SIZES = 256  # sizes of steps whose costs are kept
_PAIRS = ("kv_sum", "prefix_sum")  # values of a step that count (query, key) pairs


def op_name(step: Step) -> str:
    """Return the name of a step in tables: its op, and the formats of its weights."""
    return f"{step.node.op} {step.weight_formats}".strip()


class StepShares:
    """Divides the runs of one plan.

    Attributes:
        names: names of the plan's ops, see `op_name`.
    """

    def __init__(self, plan: Plan) -> None:
        steps = plan.steps
        self.names = list(dict.fromkeys(map(op_name, steps)))
        self._op = np.zeros((len(steps), len(self.names)))  # 1 where a step is of an op
        for index, step in enumerate(steps):
            self._op[index, self.names.index(op_name(step))] = 1
        self._reads_weights = np.array([_reads_weights(step) for step in steps], bool)
        kinds: dict[object, int] = {}
        nodes: list[Tensor] = []
        self._kind = np.zeros(len(steps), int)  # steps of one kind always cost the same
        for index, step in enumerate(steps):
            self._kind[index] = kinds.setdefault(_cost_key(step.node), len(kinds))
            if len(kinds) > len(nodes):
                nodes.append(step.node)
        self._costs = [_NodeCost(node) for node in nodes]
        # Only attention's cost depends on the number of (query, key) pairs, which grows with each
        # token; the other costs are the same in all steps of one size.
        self._by_pairs = [index for index, cost in enumerate(self._costs) if cost.depends_on_pairs]
        self._known: dict[tuple[int, int, int], np.ndarray] = {}

    def divide(self, runs: Sequence[Run]) -> np.ndarray:
        """Return the nanoseconds, bytes and FLOPs by chunk and op [3, chunks, ops].

        Args:
            runs: runs whose chunks are of the same sequences and sizes. Their costs are those at
                the mean number of (query, key) pairs, times the number of runs.
        """
        each = [
            self._at(_mean([*map(chunk_env, chunks)]))
            for chunks in zip(*(run.chunks for run in runs))
        ]
        nbytes, flops = len(runs) * np.stack(each, 1)
        tokens = np.array([[chunk.stop - chunk.start] for chunk in runs[0].chunks], float)
        by_tokens = np.broadcast_to(tokens / tokens.sum(), flops.shape)
        moved = _shares(nbytes, by_tokens)
        work = _shares(flops, moved)
        by_bytes = np.where(self._reads_weights, work, np.where(nbytes.sum(0) > 0, moved, work))
        whole = len(runs) * self._at(_mean([run.env for run in runs]))[0]
        times = np.sum([run.times for run in runs], 0)
        return np.stack([times * work, whole * by_bytes, flops]) @ self._op

    def _at(self, env: Mapping[str, Any]) -> np.ndarray:
        """Return the bytes and FLOPs of all steps [2, steps] at the values of the Vars."""
        size = env.get("T", 0), env.get("S", 0), env.get("N", 0)
        if size not in self._known:
            if len(self._known) >= _MOST_SIZES:
                self._known.clear()
            self._known[size] = np.array([cost.at(env) for cost in self._costs]).T
        found = self._known[size].copy()
        for index in self._by_pairs:
            found[:, index] = self._costs[index].at(env)
        return found[:, self._kind]


class _NodeCost:
    """The declared cost of a node, as a function of the values of Vars."""

    def __init__(self, node: Tensor) -> None:
        self._node, self._op = node, get(node.op)
        self._metas: dict[tuple[float, ...], list[Any]] = {}  # by the values of the Vars
        env = {"T": 1, "S": 1, "Q": 2, "N": 1}
        few, many = (
            self.at({**env, "kv_sum": pairs, "prefix_sum": pairs // 2}) for pairs in (1, 1000)
        )
        self.depends_on_pairs = few != many

    def at(self, env: Mapping[str, Any]) -> tuple[float, float]:
        """Return bytes and FLOPs."""
        size = tuple(env.get(name, 0) for name in "TSQN")
        if size not in self._metas:
            if len(self._metas) >= _MOST_SIZES:
                self._metas.clear()
            nodes = (self._node, *self._node.src)
            self._metas[size] = [None if n is None else n.meta.at(env) for n in nodes]
        cost = self._op.cost(*self._metas[size], env=env, **self._node.attrs)
        return cost.bytes, cost.flops


def chunk_env(chunk: Chunk) -> dict[str, int]:
    """Return the values of the Vars of a step that computes one chunk alone."""
    tokens, sequence = chunk.stop - chunk.start, chunk.sequence
    is_source = chunk.start < sequence.source
    pairs = tokens**2 if is_source else kv_pairs(chunk.start, tokens)
    env = {"T": tokens, "S": 1, "Q": 2, "N": int(chunk.samples), "kv_sum": pairs}
    return env | {"prefix_sum": tokens * sequence.prefix}


def _mean(envs: Sequence[Mapping[str, int]]) -> Mapping[str, float]:
    """Return the first one with the mean numbers of (query, key) pairs of all."""
    if len(envs) == 1:
        return envs[0]
    means = {name: sum(env.get(name, 0) for env in envs) / len(envs) for name in _PAIRS}
    return {**envs[0], **means}


def _reads_weights(step: Step) -> bool:
    return any(source.base.op == WEIGHT for source in step.node.sources)


def _cost_key(node: Tensor) -> object:
    """Return a key that nodes of equal cost have in common."""
    key = (node.op, node.meta, tuple(None if s is None else s.meta for s in node.src),
           tuple(sorted(node.attrs.items())))  # fmt: skip
    try:
        hash(key)
    except TypeError:  # an attribute is not hashable
        return node
    return key


def _shares(values: np.ndarray, default: np.ndarray) -> np.ndarray:
    """Return each value's share of the sum of its column, or ``default`` where the sum is 0."""
    total = values.sum(0)
    return np.where(total > 0, values / np.where(total > 0, total, 1), default)
