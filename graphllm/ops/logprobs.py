"""The most likely token ids, and log-probabilities of ids."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Rng, Sample, Shape, expect, grid, op, out, require
from ..graph.tensor import Env, Meta
from .sampling import expect_logits, expect_per_row, logits_and_faults

MAX_TOP_IDS = 256


def _top_ids_infer(logits: Meta, *, n: int) -> Meta:
    expect("logits", logits, 2, "f32")
    require(0 < n <= min(MAX_TOP_IDS, logits.inner[0]), f"n is {n} of {logits.inner[0]} columns")
    return out((logits.shape[0], n), I32)


def _top_ids_sample(rows: int, shape: tuple[int, int], layout: str) -> Sample:
    width, n = shape
    args = (Arg(("N", width), layout=layout, make=logits_and_faults),)
    return Sample(args, {"n": n}, {"N": rows})


@op(
    "top_ids",
    infer=_top_ids_infer,
    cost=lambda out, logits, *, env, n: Cost(2 * logits.size, logits.nbytes + out.nbytes),
    tol={},
    samples=grid(
        _top_ids_sample, rows=(0, 1, 23), shape=((1, 1), (5, 3), (63, 63), (1000, 20), (3000, 256)),
        layout=("contiguous", "strided"),
    )
    + grid(_top_ids_sample, rows=(3,), shape=((40001, 5),), layout=("contiguous",)),
)  # fmt: skip
def top_ids(logits: np.ndarray, *, n: int) -> np.ndarray:
    """Return the ids of the ``n`` largest logits, largest first. logits [N, V] f32 -> i32 [N, n].

    Ties go to the lowest id; NaN sorts before all numbers. n is at most 256.
    """
    number = ~np.isnan(logits)
    order = np.lexsort((np.where(number, -logits, 0), number), axis=-1)
    return order[:, :n].astype(np.int32)


def _infer(logits: Meta, ids: Meta, biased: Meta | None = None) -> Meta:
    expect_logits(logits)
    expect_per_row(logits, 2, "i32", ids=ids)
    if biased is not None:
        expect("biased", biased, 2, "f32")
        require(biased.shape == logits.shape, f"biased {biased.shape} for logits {logits.shape}")
    return out((logits.shape[0], *ids.inner))


def _cost(out: Meta, logits: Meta, ids: Meta, biased: Meta | None = None, *, env: Env) -> Cost:
    listed = ids.nbytes * (2 if biased is not None else 1)  # a float of `biased` for each id
    return Cost(8 * logits.size, logits.nbytes + listed + out.nbytes)


def _sample(rows: int, width: int, listed: int, layout: str, biased: bool) -> Sample:
    def ids(rng: Rng, shape: Shape) -> np.ndarray:
        found = rng.integers(-1, width + 1, shape)
        found[-1:, -1:] = width - 1  # where a kernel may read past the end
        return found

    args = (
        Arg(("N", width), layout=layout, make=logits_and_faults),
        Arg(("N", listed), I32, make=ids),
        Arg(("N", width), layout=layout, make=logits_and_faults) if biased else None,
    )
    return Sample(args, {}, {"N": rows})


@op(
    "logprobs",
    infer=_infer,
    cost=_cost,
    tol={"f32": 1e-5},
    samples=grid(
        _sample, rows=(0, 1, 23), width=(1, 5, 63, 1000), listed=(1, 21),
        layout=("contiguous", "strided"), biased=(False, True),
    )
    + grid(
        _sample, rows=(2,), width=(40001,), listed=(21,), layout=("contiguous",), biased=(False,)
    ),
)  # fmt: skip
def logprobs(logits: np.ndarray, ids: np.ndarray, biased: np.ndarray | None = None) -> np.ndarray:
    """Return the log-probabilities of ids. logits [N, V] f32, ids [N, A] i32 -> f32 [N, A].

    (logit - max) - log(sum of exp(logit - max)), over all logits of the row, without temperature
    and penalties. NaN for an id outside 0..V-1 (such as the -1 of `sample`), and for all ids of a
    row with NaN or +inf or with only -inf; -inf for a logit of -inf. The sum is over columns in an
    order that does not depend on the other rows. `top_ids` has the most likely ids.

    With biased [N, V] f32, logits after biases, the first logit is that of biased, and maximum and
    sum are those of logits: biases are added to log-probabilities that are not normalised again.
    """
    result = np.full(ids.shape, np.nan, np.float32)
    listed = logits if biased is None else biased
    for n, row in enumerate(logits.astype(np.float64)):
        top = row.max()
        if np.isfinite(top):
            known = (ids[n] >= 0) & (ids[n] < len(row))
            total = np.log(np.exp(row - top).sum())
            result[n, known] = listed[n, ids[n][known]].astype(np.float64) - top - total
    return result
