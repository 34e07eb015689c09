"""The two sides of a comparison: one runs its plan, the other the same steps in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...compiler import fusion
from ...compiler.plan import LAYOUT, TRANSFER, Plan, Step
from ...graph.fused_op import results
from ...graph.rewrite import toposort
from ...graph.tensor import INPUT, STATE, Meta, Tensor, scope
from ...ops import get, role
from ...runtime.executor import Executor

GROUP_BYTES = 256 << 20  # of values that are looked at in one run

Values = dict[str, np.ndarray]


@dataclass
class StepInputs:
    """What one step of a model is run with."""

    feeds: Mapping[str, np.ndarray]
    env: dict[str, int]


@dataclass(frozen=True)
class StepItem:
    """A step of the first side, and its results: nodes of its plan, or views of them."""

    index: int
    step: Step
    results: tuple[Tensor, ...]

    @classmethod
    def of(cls, index: int, step: Step) -> StepItem:
        node = step.node
        return cls(index, step, results(node) if get(node.op).fusion else (node,))

    @cached_property
    def read(self) -> dict[int, Tensor]:
        """By index the operands whose values another step of the plan has made."""
        written = get(self.step.node.op).written(self.step.node)
        return {
            i: s
            for i, s in enumerate(self.step.node.src)
            if s is not None and i not in written and _leaf(s) is None
        }

    @property
    def names(self) -> list[str]:
        """What its results are called among the values of a run."""
        return [result_name(self.index, j) for j in range(len(self.results))]

    def operand(self, number: int) -> str:
        return f"{self.index}.in{number}"

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Of its results and of what it reads."""
        return sum(n.meta.at(env).nbytes for n in (*self.results, *self.read.values()))


def result_name(step: int, number: int) -> str:
    """What result ``number`` of a step is called among the values of a run."""
    return f"{step}.out{number}"


def _leaf(node: Tensor) -> Tensor | None:
    """The leaf that ``node`` is, or is a view of; None where a step has been at it."""
    while node.is_view:
        if len(node.sources) > 1:
            return None
        (node,) = node.sources
    return node if node.is_leaf else None


def step_items(plan: Plan) -> list[StepItem]:
    """The plan's steps, but for those that copy between memories."""
    found = [StepItem.of(i, step) for i, step in enumerate(plan.steps)]
    return [item for item in found if get(item.step.node.op).role != TRANSFER]


def group_items(all_items: Sequence[StepItem], env: Mapping[str, int]) -> Iterator[list[StepItem]]:
    """Consecutive items whose values fit in `GROUP_BYTES`, one at least."""
    group: list[StepItem] = []
    size = 0
    for item in all_items:
        nbytes = item.nbytes(env)
        if group and size + nbytes > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes
    if group:
        yield group


# ------------------------------------------------------------------------------------ first side


def run_instrumented(
    executor: Executor, plan: Plan, group: Sequence[StepItem], run: StepInputs
) -> Values:
    """Results and operands of the group's steps, as the plan has them on its way."""
    wanted = {name: r for item in group for name, r in zip(item.names, item.results)}
    wanted |= {item.operand(i): s for item in group for i, s in item.read.items()}
    wider = executor.with_outputs(plan, wanted)
    return executor.run(wider, run.feeds, run.env, fetch=wanted.keys())


# ----------------------------------------------------------------------------------- second side


def run_isolated(
    executor: Executor, group: Sequence[StepItem], run: StepInputs, values: Mapping[str, np.ndarray]
) -> Values:
    """The results of the group's steps on another executor, each from the first side's operands.

    States that a step writes begin with zeros, as the first side's do.
    """
    outputs: dict[str, Tensor] = {}
    for item in group:
        made = _rebuilt(
            item.step.node, [_stand_in(item, i) for i in range(len(item.step.node.src))]
        )
        outputs |= dict(zip(item.names, made))
    read = {item.operand(i): values[item.operand(i)] for item in group for i in item.read}
    return executor.run(executor.compile(outputs), {**run.feeds, **read}, run.env)


def _stand_in(item: StepItem, index: int) -> Tensor | None:
    """Operand ``index`` as a leaf: what the first side has computed is fed, dense."""
    source = item.step.node.src[index]
    written = index in get(item.step.node.op).written(item.step.node)
    if source is None or not (written or index in item.read):
        return source
    kind = STATE if written else INPUT
    meta = Meta.of(source.shape, source.dtype)
    return Tensor(kind, (), {"name": item.operand(index)}, meta, source.scopes, source.origin)


def _rebuilt(node: Tensor, src: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results of ``node``'s op, of its parts if it is fused, over other operands."""
    with scope(node.scope):
        made = get(node.op)(*src, **node.attrs)
    return made if isinstance(made, tuple) else (made,)


def decomposed(all_items: Sequence[StepItem]) -> dict[str, Tensor]:
    """The results of all items in one graph of unfused ops in one memory, quantised as they are."""
    return _Decomposition(all_items).results()


class _Decomposition:
    def __init__(self, all_items: Sequence[StepItem]) -> None:
        self.items = all_items
        self.new: dict[Tensor, Tensor] = {}
        self.made: dict[Tensor, tuple[Tensor, ...]] = {}  # by fused node
        self.old: dict[Tensor, tuple[Tensor, ...]] = {}  # the same results in the old graph

    def results(self) -> dict[str, Tensor]:
        for item in self.items:
            if get(item.step.node.op).fusion:
                self.old[item.step.node] = item.results
        for node in toposort(item.step.node for item in self.items):
            self.new[node] = self._moved(node)
        return {
            name: node
            for item in self.items
            for name, node in zip(item.names, self._of(item.step.node))
        }

    def _of(self, node: Tensor) -> tuple[Tensor, ...]:
        return self.made.get(node, (self.new[node],))

    def _moved(self, node: Tensor) -> Tensor:
        src = tuple(s and self.new[s] for s in node.src)
        if node.is_leaf:
            return node
        if node.is_view:
            found = self._result(node)
            return fusion.rebuild(node, src) if found is None else found
        op = get(node.op)
        if op.role == TRANSFER:
            (source,) = src
            assert source is not None
            return source if source.meta.contiguous else role(LAYOUT)(source)
        if not op.fusion:
            return fusion.rebuild(node, src)
        made = self.made[node] = _rebuilt(node, src)
        return next((m for m, r in zip(made, self.old[node]) if r is node), made[0])

    def _result(self, view: Tensor) -> Tensor | None:
        """What the view is, if it is one of several results of a fused node."""
        owner = view.sources[-1]
        if owner not in self.made:
            return None
        for old, made in zip(self.old[owner], self.made[owner]):
            if old.is_view and old.sources[0] is view.sources[0] and old.attrs == view.attrs:
                return made
        return None


def run_cumulative(
    executor: Executor,
    outputs: Mapping[str, Tensor],
    run: StepInputs,
    bounds: Mapping[str, tuple[int, int]] | None = None,
) -> Values:
    """Values of some nodes of a graph, each from what this executor itself computed before."""
    return executor.run(executor.compile(outputs, bounds), run.feeds, run.env)
