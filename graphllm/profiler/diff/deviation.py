"""How far two results of one op lie apart."""

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

# Where a fused op rounds, the last bit of the number before it decides: one step between two values
# of the format, as a share of the largest, is then no error. Such steps are rare: what is off
# everywhere shows in the mean square.
_BLOCK_ROUNDING, _RARE_NMSE, _RARE_NMSE_PER_TOLERANCE = 0.01, 1e-5, 0.05
_HALF_NMSE = 5e-5  # NMSE of products of halves, at most


@dataclass(frozen=True)
class Deviation:
    """``got`` of one side against ``want`` of the other.

    ``max``: the largest |difference|; ``relative``: the largest share of it in the largest |want|
    of its row (the last axis; where that has one element, of all). ``worst``: where that is, with
    both values.
    """

    max: float
    relative: float
    nmse: float
    cosine: float
    worst: tuple[int, ...]
    got: float
    want: float

    def as_dict(self) -> dict[str, Any]:
        return {k: _finite(v) for k, v in asdict(self).items()}


def _finite(value: Any) -> Any:
    """JSON has no numbers for infinity and NaN: their names."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def as_float64(array: np.ndarray, meta: Meta) -> np.ndarray:
    """A result as float64; blocks [rows, bytes] as the values that they stand for."""
    kind = meta.dtype
    if kind.numpy is not None:
        return array.astype(np.float64)
    if kind.name.startswith("a8_"):
        k = meta.inner[-1]
        found = activations.dequantise_act(array.reshape(-1, kind.row_nbytes(k)), kind, k)
    else:
        found = quantization.dequantise(array, kind)
    return found.reshape(len(array), *meta.inner).astype(np.float64)


def deviation(got: np.ndarray, want: np.ndarray) -> Deviation:
    """Of two float64 arrays of one shape. Equal infinities and two NaN are no difference; one NaN
    is an infinite one."""
    if not got.size:
        return Deviation(0.0, 0.0, 0.0, 1.0, (), 0.0, 0.0)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        apart = np.where(same, 0.0, np.abs(got - want))
        apart[np.isnan(apart)] = np.inf
        size = np.where(np.isfinite(want), np.abs(want), 0.0)
        along = -1 if want.shape[-1:] != (1,) else None  # a single number may be near 0 by itself
        largest = np.broadcast_to(size.max(axis=along, keepdims=True), apart.shape)
        shares = np.where(same, 0.0, apart / largest)
        at = np.unravel_index(int(np.argmax(shares)), shares.shape)
        power, noise = float(np.sum(size**2)), float(np.sum(apart**2))
        nmse = noise / power if power else (np.inf if noise else 0.0)
    place = tuple(int(i) for i in at)
    return Deviation(
        float(apart.max()), float(shares[at]), nmse, _cosine(got, want), place, float(got[at]),
        float(want[at]),
    )  # fmt: skip


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two arrays as vectors, over what is finite in both; 1 for two zeros."""
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    lengths = float(np.sqrt(np.sum(a * a)) * np.sqrt(np.sum(b * b)))
    if lengths:  # sums, since BLAS has threads, which wait for each other on a busy machine
        return float(np.sum(a * b) / lengths)
    return 1.0 if not a.any() and not b.any() else 0.0


@dataclass(frozen=True)
class ErrorBounds:
    """How far off a result may be: the largest share of a row's largest value, and NMSE."""

    relative: float
    nmse: float = np.inf

    def allow(self, found: Deviation) -> bool:
        return found.relative <= self.relative and found.nmse <= self.nmse


def tolerance(step: Step) -> float:
    """The op's, by the first operand whose format has one of its own, else f32's; 0: exact.

    Weights do not count: the node is as a kernel sees it, so nothing is quantised on the way. A
    backend may allow more where an operand is halves.
    """
    node, op = step.node, get(step.node.op)
    kinds = [s.dtype.name for s in node.sources if s.base.op != WEIGHT]
    own = (op.tol[kind] for kind in kinds if kind != "f32" and kind in op.tol)
    return max(next(own, op.tol.get("f32", 0.0)), _half_tolerance(step))


def _half_tolerance(step: Step) -> float:
    """What the backend allows for an operand that is halves."""
    halves = any(s.dtype in (F16, BF16) for s in step.node.sources)
    return step.backend.half_tolerance.get(step.node.op, 0.0) if halves else 0.0


def error_bounds(step: Step, kind: DType) -> ErrorBounds:
    """Of a result of dtype ``kind``."""
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
    """Between two neighbours of a format that results are rounded to, by the largest of a row."""
    halves = {F16.name: 2.0**-10, BF16.name: 2.0**-7}
    return _BLOCK_ROUNDING if kind.quantised else halves.get(kind.name, 0.0)


def shapes(nodes: Sequence[Tensor | None], env: dict[str, int]) -> list[str]:
    """dtype[shape] of each that is there, with the values of the Vars."""
    return [str(node.meta.at(env)) for node in nodes if node is not None]
