"""Search for the scales of a block with the least weighted squared error.

`graphllm quantize` encodes with these scales; quantisation on load uses those of `scale_fitting`,
which cost a tenth of the time. For each of several candidate steps, the values of a run (a block or
sub-block with a scale of its own) are rounded to levels, and the scale and minimum with the least
squared error for these levels are solved for. The best candidate wins. Source of the candidates and
weights: ggml, `ggml-quants.c` (`make_qx_quants`, `make_qkx2_quants`, `make_qkx3_quants`,
`make_qp_quants`, `quantize_row_iq4_nl_impl`).

All arithmetic is float32, each operation rounding once, and sums run over the elements in order, so
that the kernel of the CPU backend has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .scale_fitting import F32, BlockScales, inverse, largest, nearest

Array = np.ndarray


# The first two have the scales of weights that were quantised before, all or all but one of their
# levels used. They start from the least value, the others from the best minimum so far.
SHIFTS = (0.0, -1.0, *(round(0.1 * i, 1) for i in range(-9, 11) if i))
FIXED = 2
# A candidate must be better by more than the rounding of its score: if elements have few values,
# many scales leave no error, and the first one is kept.
MARGIN = 1 + 2.0**-21
_SMALL_SHIFTS = tuple(shift for shift in SHIFTS if abs(shift) < 0.5)


@dataclass(frozen=True)
class ScaleSearch:
    """What a format's search tries.

    Attributes:
        run: elements with a scale of their own.
        low, high: range of the levels that a scale multiplies; ``low`` is 0 with ``minimum``.
        top: largest integer of a scale; 0 if runs have a float16 scale.
        minimum: whether runs have a minimum too: x = scale * level - minimum.
        signed: whether integer scales are signed: -top..top - 1.
        values: table that levels are indices of; empty if levels are the integers low..high.
        shifts: candidates: the extreme value of a run becomes its level plus a shift.
        weighting: weight of an element without importance: "square" (x * x), "absolute" (|x|) or
            "mean" (|x| plus the run's root mean square).
        variance: with importance i, an element weighs i * sqrt(variance * mean(x * x) + x * x), the
            mean over the block. 0: it weighs i.
    """

    run: int
    low: int
    high: int
    top: int = 0
    minimum: bool = False
    signed: bool = False
    values: tuple[int, ...] = ()
    shifts: tuple[float, ...] = SHIFTS
    weighting: str = "square"
    variance: float = 2.0


def element_weights(x: Array, importance: Array | None, search: ScaleSearch) -> Array:
    """Weights of the squared errors, in the shape of ``x``.

    Args:
        x: float32 [run, n, runs of a block].
        importance: the same shape, or None.
        search: the format's search.
    """
    squares = x * x
    if importance is None:
        if search.weighting == "square":
            return squares
        if search.weighting == "absolute":
            return np.abs(x)
        return np.abs(x) + np.sqrt(_sum(squares) / F32(search.run))
    if not search.variance:
        return importance
    total = _sum(np.moveaxis(_sum(squares), -1, 0))[:, None]  # of each block
    factor = F32(search.variance / (x.shape[0] * x.shape[2]))
    return importance * np.sqrt(total * factor + squares)


def _sum(terms: Array) -> Array:
    """Sum over axis 0, in order."""
    total = np.zeros(terms.shape[1:], F32)
    for term in terms:
        total = total + term
    return total


def search_scales(
    x: Array, importance: Array | None, search: ScaleSearch
) -> tuple[Array, Array, Array]:
    """Return the best scale, minimum and total weight of each run.

    Args:
        x: float32 [n, runs of a block, run], finite.
        importance: weights of the elements, finite and not negative, or None. The same shape.
        search: the format's search.

    Returns:
        float32 [n, runs of a block] each. x ~= scale * level + minimum; the minimum is never
        positive, and 0 for formats without one.
    """
    x = np.ascontiguousarray(np.moveaxis(x, -1, 0))
    if importance is not None:
        importance = np.moveaxis(importance, -1, 0)
    with np.errstate(all="ignore"):
        weights = element_weights(x, importance, search)
        find = _search_span if search.minimum else _search_symmetric
        return *find(x, weights, search), _sum(weights)


def _search_span(x: Array, weights: Array, search: ScaleSearch) -> tuple[Array, Array]:
    most, highest = F32(search.high), x.max(axis=0)
    minimum = np.minimum(x.min(axis=0), F32(0))
    scale, best = (highest - minimum) / most, np.full_like(highest, -np.inf)
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    least = minimum
    for index, shift in enumerate(search.shifts):
        origin = least if index < FIXED else minimum
        factor = F32(search.high + shift) / (highest - origin)
        sum_l, sum_l2, sum_xl = np.zeros((3, *highest.shape), F32)
        for value, weight in zip(x, weights):
            level = np.rint(np.clip((value - origin) * factor, F32(0), most))
            term = weight * level
            sum_l, sum_l2, sum_xl = sum_l + term, sum_l2 + term * level, sum_xl + term * value
        det = sum_w * sum_l2 - sum_l * sum_l
        low = (sum_l2 * sum_x - sum_l * sum_xl) / det
        step = (sum_w * sum_xl - sum_x * sum_l) / det
        positive = low > 0
        step = np.where(positive, sum_xl / sum_l2, step)
        low = np.where(positive, F32(0), low)
        # The squared error is a constant minus this, for the solved scale and minimum.
        score = step * sum_xl + low * sum_x
        better = (det > 0) & (score > best * F32(MARGIN))
        scale, minimum = np.where(better, step, scale), np.where(better, low, minimum)
        best = np.where(better, score, best)
    return scale, minimum


def _search_symmetric(x: Array, weights: Array, search: ScaleSearch) -> tuple[Array, Array]:
    extreme = largest(np.moveaxis(x, 0, -1))[..., 0]
    first = F32(search.values[0] if search.values else search.low)
    scale, best = extreme / first, np.zeros_like(extreme)
    for shift in search.shifts:
        factor = (first + F32(shift)) / extreme
        sum_l2, sum_xl = np.zeros((2, *extreme.shape), F32)
        for value, weight in zip(x, weights):
            level = _level(value * factor, search)
            term = weight * level
            sum_l2, sum_xl = sum_l2 + term * level, sum_xl + term * value
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * F32(MARGIN) * sum_l2)
        step = sum_xl / sum_l2
        scale = np.where(better, step, scale)
        best = np.where(better, step * sum_xl, best)
    return scale, np.zeros_like(scale)


def _level(x: Array, search: ScaleSearch) -> Array:
    if search.values:
        return np.array(search.values, F32)[nearest(x, search.values)]
    return np.rint(np.clip(x, F32(search.low), F32(search.high)))


def round_scales(
    scale: Array, minimum: Array, weights: Array, search: ScaleSearch, weighted: bool
) -> BlockScales:
    """Return the scales that `search_scales` found as a format stores them.

    Args:
        scale, minimum, weights: what `search_scales` returns.
        search: the format's search.
        weighted: whether there is importance.
    """
    if not search.top:
        return BlockScales(scale.astype("<f2"), dmin=minimum.astype("<f2"))
    with np.errstate(all="ignore"):
        chosen = weights if weighted else None
        low, high = (-search.top, search.top - 1) if search.signed else (0, search.top)
        d, whole = _round_to_integers(scale, low, high, chosen)
        if not search.minimum:
            return BlockScales(d, whole)
        return BlockScales(d, whole, *_round_to_integers(-minimum, low, high, chosen))


def _round_to_integers(
    values: Array, low: int, high: int, weights: Array | None
) -> tuple[Array, Array]:
    """Return a float16 unit [n, 1] and integers low..high [n, s] with unit * integers ~= values."""
    extreme = largest(values)
    first = F32(low or high)
    unit = (extreme / first).astype("<f2")
    if weights is not None:
        best, found = np.zeros_like(extreme), extreme / first
        for shift in _SMALL_SHIFTS:
            level = np.clip(np.rint(values * ((first + F32(shift)) / extreme)), low, high)
            term = weights * level
            sum_xl = (term * values).sum(axis=-1, keepdims=True)
            sum_l2 = (term * level).sum(axis=-1, keepdims=True)
            better = (sum_l2 > 0) & (sum_xl * sum_xl > best * F32(MARGIN) * sum_l2)
            found = np.where(better, sum_xl / sum_l2, found)
            best = np.where(better, sum_xl / sum_l2 * sum_xl, best)
        unit = found.astype("<f2")
    whole = np.clip(np.rint(values * inverse(unit.astype(F32))), low, high)
    return unit, whole.astype(np.int8 if low else np.uint8)
