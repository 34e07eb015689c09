"""Replay of a plan: run it with its intermediate values fetched, and run its steps unfused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...compiler import fusion
from ...compiler.plan import LAYOUT, TRANSFER, Plan, Step
from ...graph.fused_op import results
from ...graph.rewrite import root, toposort
from ...graph.tensor import INPUT, STATE, Meta, Tensor, scope
from ...ops import get, role
from ...runtime.executor import Executor

GROUP_BYTES = 256 << 20  # of values that are fetched in one run

Values = dict[str, np.ndarray]


@dataclass
class StepInputs:
    """Inputs of one step of a model: feeds, values of the Vars, and states as they are before it.

    ``state``: only what earlier steps have written; other states are zero.
    """

    feeds: Mapping[str, np.ndarray]
    env: Mapping[str, int]
    state: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class StepItem:
    """A step of the first side's plan, and its results: nodes of the plan or views of them."""

    index: int
    step: Step
    results: tuple[Tensor, ...]

    @classmethod
    def of(cls, index: int, step: Step) -> StepItem:
        """Return the item of step ``index`` of a plan."""
        node = step.node
        return cls(index, step, results(node) if get(node.op).fusion else (node,))

    @cached_property
    def read(self) -> dict[int, Tensor]:
        """Operands, by index, that other steps of the plan computed."""
        written = get(self.step.node.op).written(self.step.node)
        return {
            i: s
            for i, s in enumerate(self.step.node.src)
            if s is not None and i not in written and _leaf(s) is None
        }

    @property
    def names(self) -> list[str]:
        """Keys of its results among the values of a run."""
        return [result_name(self.index, j) for j in range(len(self.results))]

    def operand(self, number: int) -> str:
        """Return the key of operand ``number`` among the values of a run."""
        return f"{self.index}.in{number}"

    def nbytes(self, env: Mapping[str, int]) -> int:
        """Return the bytes of its results and of the operands it reads."""
        return sum(n.meta.at(env).nbytes for n in (*self.results, *self.read.values()))


def result_name(step: int, number: int) -> str:
    """Return the key of result ``number`` of a step among the values of a run."""
    return f"{step}.out{number}"


def _leaf(node: Tensor) -> Tensor | None:
    """Return the leaf that ``node`` is or is a view of; None if a step computed it."""
    while node.is_view:
        if len(node.sources) > 1:
            return None
        (node,) = node.sources
    return node if node.is_leaf else None


def step_items(plan: Plan) -> list[StepItem]:
    """Return the plan's steps, without copies between memories."""
    found = [StepItem.of(i, step) for i, step in enumerate(plan.steps)]
    return [item for item in found if get(item.step.node.op).role != TRANSFER]


def group_items(all_items: Sequence[StepItem], env: Mapping[str, int]) -> Iterator[list[StepItem]]:
    """Yield groups of consecutive items with up to `GROUP_BYTES` of values, at least one item."""
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
    """Run the plan; return results and operands of the steps in ``group``.

    Args:
        executor: executor of the first side.
        plan: its plan.
        group: steps whose values are fetched.
        run: inputs of the plan.
    """
    wanted = {name: r for item in group for name, r in zip(item.names, item.results)}
    wanted |= {item.operand(i): s for item in group for i, s in item.read.items()}
    wider = executor.with_outputs(plan, wanted)
    return executor.run(wider, run.feeds, run.env, fetch=wanted.keys())


# ----------------------------------------------------------------------------------- second side


def run_isolated(
    executor: Executor, group: Sequence[StepItem], run: StepInputs, values: Mapping[str, np.ndarray]
) -> Values:
    """Run the steps in ``group`` on another executor, each from the first side's operands.

    States that a step writes are initially as on the first side.

    Args:
        executor: executor of the second side.
        group: the steps.
        run: inputs of the plan.
        values: values of the first side, from `run_instrumented`.
    """
    outputs: dict[str, Tensor] = {}
    for item in group:
        made = _rebuilt(
            item.step.node, [_stand_in(item, i) for i in range(len(item.step.node.src))]
        )
        outputs |= dict(zip(item.names, made))
    read = {item.operand(i): values[item.operand(i)] for item in group for i in item.read}
    own = StepInputs({**run.feeds, **read}, run.env, _states(group, run.state))
    return run_cumulative(executor, outputs, own)


def _states(group: Sequence[StepItem], state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``state`` and those that the steps in ``group`` write, by their names as stand-ins."""
    found = dict(state)
    for item in group:
        for index in get(item.step.node.op).written(item.step.node):
            source = item.step.node.src[index]
            if source is not None and (leaf := root(source)).op == STATE and leaf.name in state:
                found[item.operand(index)] = state[leaf.name]
    return found


def _stand_in(item: StepItem, index: int) -> Tensor | None:
    """Return operand ``index`` as a leaf; values that the first side computed are fed, dense."""
    source = item.step.node.src[index]
    written = index in get(item.step.node.op).written(item.step.node)
    if source is None or not (written or index in item.read):
        return source
    kind = STATE if written else INPUT
    meta = Meta.of(source.shape, source.dtype)
    return Tensor(kind, (), {"name": item.operand(index)}, meta, source.scopes, source.origin)


def _rebuilt(node: Tensor, src: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Apply the op of ``node``, decomposed if it is fused, to other operands."""
    with scope(node.scope):
        made = get(node.op)(*src, **node.attrs)
    return made if isinstance(made, tuple) else (made,)


def decomposed(all_items: Sequence[StepItem]) -> dict[str, Tensor]:
    """Return the results of all items in one unfused graph, with the same quantization."""
    return _Decomposition(all_items).results()


class _Decomposition:
    """Rebuilds a plan's nodes with fused ops decomposed and copies between memories removed."""

    def __init__(self, all_items: Sequence[StepItem]) -> None:
        self.items = all_items
        self.new: dict[Tensor, Tensor] = {}
        self.made: dict[Tensor, tuple[Tensor, ...]] = {}  # by fused node
        self.old: dict[Tensor, tuple[Tensor, ...]] = {}  # the same results in the old graph

    def results(self) -> dict[str, Tensor]:
        """Return the rebuilt results of all items by name."""
        for item in self.items:
            if get(item.step.node.op).fusion:
                self.old[item.step.node] = item.results
        for node in toposort(item.step.node for item in self.items):
            self.new[node] = self._rebuild(node)
        return {
            name: node
            for item in self.items
            for name, node in zip(item.names, self._of(item.step.node))
        }

    def _of(self, node: Tensor) -> tuple[Tensor, ...]:
        return self.made.get(node, (self.new[node],))

    def _rebuild(self, node: Tensor) -> Tensor:
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
        """Return the result of a decomposed fused node that ``view`` stands for, or None."""
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
    """Run a graph on one executor, so that each value depends on its own earlier ones.

    Args:
        executor: the executor.
        outputs: nodes to compute, by name.
        run: inputs of the graph.
        bounds: ranges of the Vars; None for those of the graph.
    """
    plan = executor.compile(outputs, bounds)
    executor.bind(plan)
    for name, value in run.state.items():
        if name in plan.leaves:
            executor.set_state(name, value)
    return executor.run(plan, run.feeds, run.env)
