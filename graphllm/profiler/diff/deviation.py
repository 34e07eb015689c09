"""Deviation between two results of an op, and its tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...compiler.plan import Step
from ...formats import activations, quantization
from ...graph.dtype import BF16, F16, DType
from ...graph.tensor import WEIGHT, Meta, Tensor
from ...ops import get

# If a fused op rounds its result, the last bit before rounding can move the result by one step of
# the format. One such step, as a share of the largest value, is not an error. These steps are rare,
# so a bound on NMSE detects results that are off everywhere.
_BLOCK_ROUNDING, _RARE_NMSE, _RARE_NMSE_PER_TOLERANCE = 0.01, 1e-5, 0.05
_HALF_NMSE = 5e-5  # bound on NMSE if operands are half precision


@dataclass(frozen=True)
class Deviation:
    """Deviation of ``got`` (one side) from ``want`` (the other side).

    Attributes:
        max: largest absolute difference.
        relative: largest absolute difference as a share of the largest |want| of its row. A row is
            the last axis, or the whole array if that has one element.
        nmse: mean square of the difference over the mean square of ``want``.
        cosine: cosine similarity.
        worst: index of the largest ``relative``.
        got: value of ``got`` there.
        want: value of ``want`` there.
    """

    max: float
    relative: float
    nmse: float
    cosine: float
    worst: tuple[int, ...]
    got: float
    want: float

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {k: _finite(v) for k, v in asdict(self).items()}


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by their names."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def as_float64(array: np.ndarray, meta: Meta) -> np.ndarray:
    """Convert a result to float64; quantized blocks [rows, bytes] are dequantized."""
    kind = meta.dtype
    if kind.numpy is not None:
        return array.astype(np.float64)
    if kind in activations.ACTIVATIONS:
        k = meta.inner[-1]
        found = activations.dequantise_act(array.reshape(-1, kind.row_nbytes(k)), kind, k)
    else:
        found = quantization.dequantise(array, kind)
    return found.reshape(len(array), *meta.inner).astype(np.float64)


def deviation(got: np.ndarray, want: np.ndarray) -> Deviation:
    """Return the deviation of two float64 arrays of the same shape.

    Equal infinities and two NaN do not differ; a single NaN is an infinite difference.
    """
    if not got.size:
        return Deviation(0.0, 0.0, 0.0, 1.0, (), 0.0, 0.0)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        difference = np.where(same, 0.0, np.abs(got - want))
        difference[np.isnan(difference)] = np.inf
        size = np.where(np.isfinite(want), np.abs(want), 0.0)
        along = -1 if want.shape[-1:] != (1,) else None  # a single value may be near 0
        largest = np.broadcast_to(size.max(axis=along, keepdims=True), difference.shape)
        shares = np.where(same, 0.0, difference / largest)
        at = np.unravel_index(int(np.argmax(shares)), shares.shape)
        power, noise = float(np.sum(size**2)), float(np.sum(difference**2))
        nmse = noise / power if power else (np.inf if noise else 0.0)
    place = tuple(int(i) for i in at)
    return Deviation(
        float(difference.max()), float(shares[at]), nmse, _cosine(got, want), place, float(got[at]),
        float(want[at]),
    )  # fmt: skip


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine similarity over elements finite in both arrays; 1 for two zeros."""
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    lengths = float(np.sqrt(np.sum(a * a)) * np.sqrt(np.sum(b * b)))
    if lengths:  # not BLAS: its threads wait for each other on a busy machine
        return float(np.sum(a * b) / lengths)
    return 1.0 if not a.any() and not b.any() else 0.0


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds on the relative deviation and on NMSE."""

    relative: float
    nmse: float = np.inf

    def allow(self, found: Deviation) -> bool:
        """Whether ``found`` is within the bounds."""
        return found.relative <= self.relative and found.nmse <= self.nmse


def tolerance(step: Step) -> float:
    """Return the tolerance of the step's op; 0 means exact.

    It is that of the first operand format with a tolerance of its own, else that of f32. Weights do
    not count, since the second side uses the same ones. A backend may declare a larger tolerance
    for half-precision operands.
    """
    node, op = step.node, get(step.node.op)
    kinds = [s.dtype.name for s in node.sources if s.base.op != WEIGHT]
    own = (op.tol[kind] for kind in kinds if kind != "f32" and kind in op.tol)
    return max(next(own, op.tol.get("f32", 0.0)), _half_tolerance(step))


def _half_tolerance(step: Step) -> float:
    """Return the backend's tolerance for half-precision operands; 0 if there are none."""
    halves = any(s.dtype in (F16, BF16) for s in step.node.sources)
    return step.backend.half_tolerance.get(step.node.op, 0.0) if halves else 0.0


def error_bounds(step: Step, kind: DType) -> ErrorBounds:
    """Return the bounds for a result of dtype ``kind``."""
    tol, loose = tolerance(step), _half_tolerance(step)
    between = _rounding_step(kind) if get(step.node.op).fusion else 0.0
    if loose:
        return ErrorBounds(tol + between, _HALF_NMSE)
    return (
        ErrorBounds(tol + between, _RARE_NMSE + _RARE_NMSE_PER_TOLERANCE * tol)
        if between
        else ErrorBounds(tol)
    )


def _rounding_step(kind: DType) -> float:
    """Return one rounding step of a result format, as a share of the largest value of a row."""
    halves = {F16.name: 2.0**-10, BF16.name: 2.0**-7}
    return _BLOCK_ROUNDING if kind.quantised else halves.get(kind.name, 0.0)


def shapes(nodes: Sequence[Tensor | None], env: dict[str, int]) -> list[str]:
    """Return dtype[shape] of each node that is not None, at the given values of the Vars."""
    return [str(node.meta.at(env)) for node in nodes if node is not None]
