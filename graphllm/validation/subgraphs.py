"""Subgraphs of a model between the values that an oracle has: embedding, layers, logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.encoder_engine import EncoderEngine
from ..engine.engine import Engine
from ..graph.dtype import F32
from ..graph.rewrite import toposort
from ..graph.tensor import Tensor, Var
from ..model.batch import ENCODED
from ..profiler.diff.deviation import Deviation, deviation
from .oracle_record import OracleRecord

EMBEDDING = "embedding"  # name of the first subgraph


@dataclass(frozen=True)
class Subgraph:
    """The nodes between two values that the oracle has.

    Attributes:
        name: name of the value at its end.
        before: name of the value at its beginning, or empty.
        result: node of the value at its end.
        want: the oracle's value.
        nodes: sources first.
    """

    name: str
    before: str
    result: Tensor
    want: np.ndarray
    nodes: tuple[Tensor, ...]


def split_graph(
    engine: Engine | EncoderEngine, layers: Sequence[str], record: OracleRecord
) -> list[Subgraph]:
    """Split the graph of a model at the values of ``record``, in execution order.

    A layer that the oracle did not record is merged with the next.

    Args:
        engine: the engine of the model.
        layers: paths of its layers.
        record: values of the oracle.
    """
    encoded = [node for name, node in engine.outputs.items() if name.startswith(ENCODED)]
    name = "hidden" if isinstance(engine, EncoderEngine) else "logits"
    last = engine.outputs[name]
    order = toposort([*encoded, last])
    cuts: list[tuple[str, Tensor, np.ndarray]] = []
    first = module_input(order, layers[0])
    if first is not None and layers[0] in record.read:
        cuts.append((EMBEDDING, first, record.read[layers[0]]))
    for path in layers:
        if path in engine.scope_values and path in record.returned:
            cuts.append((path, engine.scope_values[path], record.returned[path]))
    cuts.append((name, last, record.logits))
    found, seen, before = [], set[Tensor](), ""
    for name, node, want in cuts:
        needed = toposort([node])
        own = tuple(n for n in needed if n not in seen)
        found.append(Subgraph(name, before, node, want, own))
        seen.update(needed)
        before = name
    return found


def is_within(scope: str, path: str) -> bool:
    """Whether ``scope`` is ``path`` or inside it."""
    return scope == path or scope.startswith(f"{path}.")


def module_input(nodes: Iterable[Tensor], path: str) -> Tensor | None:
    """Return the input of a module: the first comparable value from outside it, or None."""
    for node in nodes:
        if is_within(node.scope, path):
            for source in node.sources:
                if comparable(source) and not is_within(source.scope, path):
                    return source
    return None


def comparable(node: Tensor) -> bool:
    """Whether ``node`` is a computed float32 value with one row per token."""
    rows = node.meta.rows
    return not node.is_leaf and node.dtype == F32 and isinstance(rows, Var) and rows.name in "TN"


class Substitution:
    """Records a value of a run, chunk by chunk, and replaces it by the oracle's."""

    def __init__(self, want: np.ndarray) -> None:
        self.want, self.got = want, list[np.ndarray]()

    def __call__(self, value: np.ndarray) -> np.ndarray:
        at = sum(map(len, self.got))
        self.got.append(value)
        rows = self.want.reshape(len(self.want), *value.shape[1:])
        return rows[at : at + len(value)].astype(np.float32)

    @property
    def value(self) -> np.ndarray:
        """The recorded value of the whole run."""
        return np.concatenate(self.got)


def nearest_deviation(got: np.ndarray, wanted: Iterable[np.ndarray]) -> Deviation | None:
    """Return the deviation of ``got`` [T, ...] from the nearest of several arrays.

    The arrays are [T, ...] or, by heads, [H, T, D]. None if no array has as many elements.
    """
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
    """Format scalar attributes in a line."""
    parts = [
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in attrs.items()
        if isinstance(value, (int, float, str)) and value != ""
    ]
    return ", ".join(parts)
