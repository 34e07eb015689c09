"""Filters of logits before sampling, in llama.cpp's order."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32, I64
from ..graph.op import Arg, Cost, Rng, Sample, Shape, grid, op, require, same
from ..graph.tensor import Env, Meta
from .random_numbers import XTC, uniform
from .sampling import (
    cycle,
    expect_logits,
    expect_per_row,
    kept_ids,
    logits_and_faults,
    seeds,
)

# Columns of the operand `settings` of `filter_logits`.
FILTERS = ("top_n_sigma", "typical_p", "top_p", "min_p", "xtc_probability", "xtc_threshold")


def _infer(
    logits: Meta, settings: Meta, top_k: Meta, seed: Meta, count: Meta, sample_index: Meta
) -> Meta:
    expect_logits(logits)
    expect_per_row(logits, 2, "f32", settings=settings)
    require(settings.inner[0] == len(FILTERS), f"settings {settings.shape} has not 6 columns")
    expect_per_row(logits, 1, "i32", top_k=top_k, count=count, sample_index=sample_index)
    expect_per_row(logits, 1, "i64", seed=seed)
    return same(logits)


def _cost(out: Meta, logits: Meta, *rest: Meta, env: Env) -> Cost:
    return Cost(20 * logits.size, logits.nbytes + out.nbytes + sum(m.nbytes for m in rest))


def _settings(rng: Rng, shape: Shape) -> np.ndarray:
    """Rows with each filter alone, all of them, some of them, and none."""
    off = (0.0, 1.0, 1.0, 0.0, 0.0, 0.1)
    rows = [
        off, (1.0, *off[1:]), (0.0, 0.9, *off[2:]), (0.0, 1.0, 0.7, *off[3:]),
        (0.0, 1.0, 1.0, 0.1, 0.0, 0.1), (0.0, 1.0, 1.0, 0.0, 1.0, 0.02),
        (2.0, 0.95, 0.95, 0.01, 0.5, 0.05), (0.0, 0.2, 1.0, 0.0, 1.0, 0.0),
        (0.0, 0.999, 0.99, 0.001, 1.0, 0.3), (0.5, 1.0, 1.0, 0.0, 1.0, 0.5),
        (0.0, 0.0, 1.0, 1.0, 0.0, 0.1), (0.0, 1.0, 1.0, 0.0, 1.0, 0.0),
    ]  # fmt: skip
    return np.array(rows)[np.arange(shape[0]) % len(rows)]


def _usual(rng: Rng, shape: Shape) -> np.ndarray:
    return np.concatenate([logits_and_faults(rng, shape)[: shape[0] // 2],
                           rng.standard_normal(shape)[shape[0] // 2 :] * 3])  # fmt: skip


def _sample(rows: int, width: int, layout: str) -> Sample:
    n = ("N",)
    args = (
        Arg(("N", width), layout=layout, make=_usual),
        Arg(("N", len(FILTERS)), make=_settings),
        Arg(n, I32, make=cycle(0, 40, 1, 0, 3, 0, 10**6)),
        Arg(n, I64, make=seeds),
        Arg(n, I32, make=cycle(0, 1, 2, 77, 2**31 - 1)),
        Arg(n, I32, make=cycle(0, 0, 1, 3)),
    )
    return Sample(args, {}, {"N": rows})


@op(
    "filter_logits",
    infer=_infer,
    cost=_cost,
    tol={"f32": 0.0},
    samples=grid(
        _sample, rows=(0, 1, 88), width=(1, 5, 63, 1000), layout=("contiguous", "strided"),
    )
    + grid(_sample, rows=(14,), width=(40001,), layout=("contiguous",)),
)  # fmt: skip
def filter_logits(
    logits: np.ndarray, settings: np.ndarray, top_k: np.ndarray, seed: np.ndarray,
    count: np.ndarray, sample_index: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Replace by -inf the logits of ids that must not be sampled. logits [N, V] f32 -> [N, V].

    settings [N, 6] f32 has the columns `FILTERS`; top_k, count, sample_index [N] i32, and seed [N]
    i64, are those of `sample`. Filters apply in this order, each to the ids that the previous one
    kept; probabilities are those of the ids left, at temperature 1:

    - top_n_sigma (0: off) keeps logits of at least max - n * sigma, with the standard deviation
      sigma of all logits but -inf;
    - top_k (0: off) keeps the k largest;
    - typical_p (1: off) keeps the smallest set of ids whose information content is closest to the
      entropy and whose probabilities reach typical_p; distances are compared in float32;
    - top_p (1: off) keeps the smallest set of the largest whose probabilities reach top_p;
    - min_p (0: off) keeps ids of at least min_p times the largest probability;
    - XTC excludes all but the least probable of the ids with a finite logit and a probability of
      at least xtc_threshold, at a share xtc_probability (0: off) of the positions, drawn by seed,
      count and sample_index; a threshold above 0.5 disables it.

    Ties go to the lowest index. A row from which no id can be sampled (see `sample`) is unchanged.

    top_n_sigma: Tang et al. 2024; typical_p: Meister et al. 2022; XTC: p-e-w 2024
    (text-generation-webui #6335); for the others see `sample`. All as in llama.cpp.
    """
    result = np.full_like(logits, -np.inf)
    for n, row in enumerate(logits.astype(np.float64)):
        ids = np.arange(len(row))
        if np.isfinite(row.max()):
            number = uniform(seed[n], count[n], sample_index[n], 1, XTC)[0]
            ids = _kept(row, settings[n].astype(np.float64), int(top_k[n]), number)
        result[n, ids] = logits[n, ids]
    return result


def _kept(row: np.ndarray, settings: np.ndarray, top_k: int, number: float) -> np.ndarray:
    """Return the ids of row [V] float64 that the filters keep, in ascending order."""
    sigmas, typical_p, top_p, min_p, xtc_probability, xtc_threshold = settings
    ids = np.arange(len(row))
    if sigmas > 0:
        sigma = row[row > -np.inf].std()
        ids = ids[row >= row.max() - sigmas * sigma]
    ids = ids[kept_ids(row[ids], top_k, 1.0, 0.0)]
    if typical_p < 1:
        ids = _typical(row, ids, typical_p)
    ids = ids[kept_ids(row[ids], 0, top_p, min_p)]
    if number < xtc_probability and xtc_threshold <= 0.5:
        weights = np.exp(row[ids] - row[ids].max())
        probable = weights >= xtc_threshold * weights.sum()
        top = np.flatnonzero(probable & (row[ids] > -np.inf))
        if len(top):
            last = top[row[ids][top] == row[ids][top].min()][-1]
            ids = ids[~np.isin(ids, ids[top[top != last]])]
    return ids


def _typical(row: np.ndarray, ids: np.ndarray, typical_p: float) -> np.ndarray:
    """Return the ``ids`` that typical_p keeps."""
    gap = row[ids] - row[ids].max()
    weights = np.exp(gap)
    mean = (weights * np.where(weights > 0, gap, 0)).sum() / weights.sum()
    order = np.argsort(np.abs(gap - mean).astype(np.float32), kind="stable")
    reached = np.cumsum(weights[order])
    return np.sort(ids[order[: np.searchsorted(reached, typical_p * reached[-1]) + 1]])
