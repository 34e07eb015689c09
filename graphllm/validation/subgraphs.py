"""A model's graph cut where an oracle has values: before the layers, after each, at the logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..api import LLM
from ..graph.dtype import F32
from ..graph.rewrite import toposort
from ..graph.tensor import Tensor, Var
from ..profiler.diff.deviation import Deviation, deviation
from .oracle_record import OracleRecord

EMBEDDING, LOGITS = "embedding", "logits"  # names of the first and the last cut


@dataclass(frozen=True)
class Subgraph:
    """The nodes between two cuts, sources first. ``name``: of the cut that it ends with, ``result``
    its node, ``want`` what the oracle has for it; ``before``: the cut that it begins with."""

    name: str
    before: str
    result: Tensor
    want: np.ndarray
    nodes: tuple[Tensor, ...]


def split_graph(llm: LLM, layers: Sequence[str], record: OracleRecord) -> list[Subgraph]:
    """In the order of a run; a layer of which the oracle has nothing is one with the next."""
    outputs = {name: llm.engine.outputs[name] for name in llm.engine.logits_outputs}
    order = toposort(outputs.values())
    cuts: list[tuple[str, Tensor, np.ndarray]] = []
    first = module_input(order, layers[0])
    if first is not None and layers[0] in record.read:
        cuts.append((EMBEDDING, first, record.read[layers[0]]))
    for path in layers:
        if path in llm.engine.scope_values and path in record.returned:
            cuts.append((path, llm.engine.scope_values[path], record.returned[path]))
    cuts.append((LOGITS, outputs["logits"], record.logits))
    found, seen, before = [], set[Tensor](), ""
    for name, node, want in cuts:
        needed = toposort([node])
        own = tuple(n for n in needed if n not in seen)
        found.append(Subgraph(name, before, node, want, own))
        seen.update(needed)
        before = name
    return found


def is_within(scope: str, path: str) -> bool:
    """Whether ``scope`` is ``path`` or in it."""
    return scope == path or scope.startswith(f"{path}.")


def module_input(nodes: Iterable[Tensor], path: str) -> Tensor | None:
    """The value that a module reads: the first that comes from outside of it."""
    for node in nodes:
        if is_within(node.scope, path):
            for source in node.sources:
                if comparable(source) and not is_within(source.scope, path):
                    return source
    return None


def comparable(node: Tensor) -> bool:
    """Whether it is numbers for each token, that somebody has computed."""
    rows = node.meta.rows
    return not node.is_leaf and node.dtype == F32 and isinstance(rows, Var) and rows.name in "TN"


class Substitution:
    """Takes a value of a run, piece by piece, and puts the oracle's in its place."""

    def __init__(self, want: np.ndarray) -> None:
        self.want, self.got = want, list[np.ndarray]()

    def __call__(self, value: np.ndarray) -> np.ndarray:
        at = sum(map(len, self.got))
        self.got.append(value)
        rows = self.want.reshape(len(self.want), *value.shape[1:])
        return rows[at : at + len(value)].astype(np.float32)

    @property
    def value(self) -> np.ndarray:
        return np.concatenate(self.got)


def nearest_deviation(got: np.ndarray, wanted: Iterable[np.ndarray]) -> Deviation | None:
    """How far ``got`` [T, ...] is from the nearest of some arrays, each [T, ...] or, by heads, [H,
    T, D]; None if none has as many numbers."""
    value = got.astype(np.float64)
    found = [deviation(value, each) for want in wanted for each in _arranged(want, value.shape)]
    return min(found, key=lambda d: d.nmse, default=None)


def _arranged(want: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    if want.size != np.prod(shape):
        return []
    forms = [want.reshape(shape)]
    if want.ndim == 3 and want.shape[1] == shape[0]:
        forms.append(want.swapaxes(0, 1).reshape(shape))
    return forms


def format_attributes(attrs: Mapping[str, object]) -> str:
    """Attributes in a line."""
    parts = [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in attrs.items()
        if isinstance(value, (int, float, str)) and value != ""
    ]
    return ", ".join(parts)
