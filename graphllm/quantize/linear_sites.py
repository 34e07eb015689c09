"""The products of a model's graph with weights before the output matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..graph.rewrite import toposort
from ..graph.tensor import WEIGHT, Tensor

_LINEARS = ("linear", "expert_linear", "head_linear")


@dataclass(frozen=True)
class LinearSite:
    """A product with a weight.

    Attributes:
        weight: canonical name of the weight.
        input: the product's input, and the indices of the experts of its rows, if there are any.
        shape: number of matrices of the weight, and of their columns.
    """

    weight: str
    input: tuple[Tensor, Tensor | None]
    shape: tuple[int, int]


def linear_sites(hidden: Tensor) -> Iterator[LinearSite]:
    """Yield the products with matrices that the hidden states of a model need."""
    for node in toposort([hidden]):
        if node.op not in _LINEARS:
            continue
        x, w, *rest = node.src
        assert x is not None and w is not None and w.base.op == WEIGHT
        ids = rest[0] if node.op == "expert_linear" else None
        rows = w.shape[0] if len(w.shape) == 3 else 1
        shape = int(rows), int(w.shape[-1])  # type: ignore[arg-type]
        yield LinearSite(w.base.name, (x, ids), shape)
