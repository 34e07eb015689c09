"""Non-finite values: locate the first op of a model that computes NaN or infinity."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..compiler.placement import Tap
from ..errors import NumericError, OutOfMemory
from ..graph.rewrite import root, toposort
from ..graph.tensor import STATE, Tensor, Var
from ..model.batch import Limits, source_length
from ..runtime.executor import Executor
from .evaluation import Evaluation

MAX_STEP_BYTES = 64 << 20  # upper bound of the values that one checked step returns
_FLOATS = ("f32", "f16", "bf16")


class Engine(Protocol):
    """What a rerun needs of `graphllm.engine.engine.Engine`, whose module imports this one."""

    executor: Executor
    outputs: dict[str, Tensor]
    limits: Limits

    def evaluation(self, tokens: Sequence[int]) -> AbstractContextManager[Evaluation]: ...

    def clear_cache(self) -> None: ...


@dataclass(frozen=True)
class NonFiniteValue:
    """The first non-finite value of a run.

    Attributes:
        op: the op that computed it.
        scope: the module of the model that the op belongs to.
        backend: the backend that ran the op.
        position: position of the token; None if the value does not belong to one token.
        value: NaN or an infinity.
    """

    op: str
    scope: str
    backend: str
    position: int | None
    value: float

    def __str__(self) -> str:
        where = "" if self.position is None else f" at position {self.position}"
        value = str(self.value).replace("nan", "NaN")
        return f"{self.scope} ({self.op} on {self.backend}) gives {value}{where}"


def non_finite_error(engine: Engine, tokens: Sequence[int]) -> NumericError:
    """Return the error for ``tokens`` whose last logits have NaN or +inf, or only -inf.

    The tokens are computed again with every op's result checked. The KV cache is cleared, since it
    may hold NaN.
    """
    text = f"the logits of position {len(tokens) - 1} are not finite"
    try:
        fault = find_non_finite(engine, tokens)
        if fault is None:
            why = "rerunning the ops unfused gives finite values only"
        else:
            why = f"the first op with a non-finite result: {fault}"
    except OutOfMemory as error:
        why = f"the op cannot be located: {error}"
    finally:
        engine.clear_cache()
    return NumericError(f"{text}; {why}")


def find_non_finite(engine: Engine, tokens: Sequence[int]) -> NonFiniteValue | None:
    """Return the first non-finite op result on the way from ``tokens`` to the last logits, if any.

    The search goes from coarse to fine, since a step returns at most `MAX_STEP_BYTES` of values:
    each run checks evenly spaced nodes and finds the first non-finite one among them; the next run
    checks nodes between that one and those known to be finite.
    """
    target, finite = engine.outputs["logits"], list[Tensor]()
    found: NonFiniteValue | None = None
    while True:
        order = toposort([target], stop=finite)
        nodes = [node for node in order if _checkable(node)]
        rows = min(len(tokens), engine.limits.tokens)
        chosen = _spread(nodes, rows)
        index, found = _run(engine, tokens, chosen, rows)
        if found is None or len(chosen) == len(nodes):
            return found
        target, finite = chosen[index], finite + chosen[:index]


def _checkable(node: Tensor) -> bool:
    """Whether the node is a floating-point op result, and not state that outlives the step."""
    own = not node.is_leaf and not node.is_view and node.dtype.name in _FLOATS
    return own and root(node).op != STATE


def _spread(nodes: list[Tensor], rows: int) -> list[Tensor]:
    """Return evenly spaced ``nodes``, the last one included, within `MAX_STEP_BYTES`.

    These are at least two, so that every run narrows the search.
    """
    nbytes = sum(node.meta.at(dict.fromkeys(_vars(node), rows)).nbytes for node in nodes)
    step = min(-(-nbytes // MAX_STEP_BYTES), max(1, len(nodes) // 2))
    return nodes[::-1][::step][::-1]


def _vars(node: Tensor) -> list[str]:
    return [node.meta.rows.name] if isinstance(node.meta.rows, Var) else []


def _run(
    engine: Engine, tokens: Sequence[int], nodes: list[Tensor], rows: int
) -> tuple[int, NonFiniteValue | None]:
    """Compute ``tokens`` with an empty cache, ``rows`` per step, and check ``nodes`` in each step.

    Returns the index of the first non-finite node and its value, or (-1, None).
    """
    taps = [Tap(str(index), node) for index, node in enumerate(nodes)]
    bounds = {"T": (1, rows), "S": (1, 1), "Q": (2, 2), "N": (1, 1)}
    plan = engine.executor.tap(taps, bounds)
    with engine.evaluation(tokens) as evaluation:
        source = source_length(tokens)
        if source:
            evaluation.encode(tokens[:source])
        for at in range(source, len(tokens), rows):
            piece = tokens[at : at + rows]
            last = np.array([len(piece) - 1])
            values = evaluation.append(plan, piece, last, plan.outputs.keys())
            for index, node in enumerate(nodes):
                value = values[str(index)]
                bad = np.argwhere(~np.isfinite(value))
                if not len(bad):
                    continue
                own = root(plan.outputs[str(index)])
                ran = (step.backend.name for step in plan.steps if step.node is own)
                per_token = node.meta.rows.name == "T" if isinstance(node.meta.rows, Var) else False
                position = at + int(bad[0][0]) if per_token else None
                first = float(value[tuple(bad[0])])
                backend = next(ran, engine.executor.backends[0].name)
                return index, NonFiniteValue(node.op, node.scope, backend, position, first)
    return -1, None
