"""Find the op of a model that is the first to compute NaN or infinity: a checked run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..compiler.placement import Tap
from ..errors import NumericError, OutOfMemory
from ..graph.rewrite import root, toposort
from ..graph.tensor import STATE, Tensor, Var

if TYPE_CHECKING:
    from .engine import Engine

MAX_STEP_BYTES = 64 << 20  # of values that one checked step hands out
_FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class NonFiniteValue:
    """The first value that is not finite: the op that computed it, its backend, the position of the
    token (None: of no single one), and the value."""

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
    """The error for ``tokens`` whose last logits hold NaN or +inf, or nothing but -inf.

    The tokens are computed once more, op by op. The cache is forgotten, since it may hold NaN.
    """
    text = f"the logits of position {len(tokens) - 1} are not finite"
    try:
        fault = find_non_finite(engine, tokens)
        if fault is None:
            why = "a checked run of unfused ops finds only finite values up to the logits"
        else:
            why = f"the first op that is not finite: {fault}"
    except OutOfMemory as error:
        why = f"a checked run needs more memory: {error}"
    finally:
        engine.clear_cache()
    return NumericError(f"{text}; {why}")


def find_non_finite(engine: Engine, tokens: Sequence[int]) -> NonFiniteValue | None:
    """The first op between ``tokens`` and the logits of the last one whose result is not finite;
    None if there is none.

    Ops are searched from coarse to fine, so that values of at most `MAX_STEP_BYTES` are handed out
    by a step: a run over some of the nodes gives the first one that is not finite, and the next run
    looks at what lies between that node and those known to be finite.
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
    """Whether the node is an op's result in floats, and no state that outlives the step."""
    own = not node.is_leaf and not node.is_view and node.dtype.name in _FLOATS
    return own and root(node).op != STATE


def _spread(nodes: list[Tensor], rows: int) -> list[Tensor]:
    """The last of ``nodes`` and as many before it, evenly spaced, as `MAX_STEP_BYTES` allow; two at
    least, so that every run narrows the search."""
    nbytes = sum(node.meta.at(dict.fromkeys(_vars(node), rows)).nbytes for node in nodes)
    step = min(-(-nbytes // MAX_STEP_BYTES), max(1, len(nodes) // 2))
    return nodes[::-1][::step][::-1]


def _vars(node: Tensor) -> list[str]:
    return [node.meta.rows.name] if isinstance(node.meta.rows, Var) else []


def _run(
    engine: Engine, tokens: Sequence[int], nodes: list[Tensor], rows: int
) -> tuple[int, NonFiniteValue | None]:
    """Compute ``tokens`` from an empty cache: index of the first of ``nodes`` that is not finite in
    the first step that has one, and the fault. ``rows``: tokens of a step."""
    taps = [Tap(str(index), node) for index, node in enumerate(nodes)]
    engine.begin(tokens)
    bounds = {"T": (1, rows), "S": (1, 1), "Q": (2, 2), "N": (1, 1)}
    plan = engine.executor.tap(taps, bounds)
    for at in range(0, len(tokens), rows):
        piece = tokens[at : at + rows]
        last = np.array([len(piece) - 1])
        values = engine.append(plan, piece, last, plan.outputs.keys())
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
