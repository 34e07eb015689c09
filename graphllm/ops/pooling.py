"""Pooling of packed sequences: one row for the rows of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Rng, Sample, Shape, expect, grid, op, out, require
from ..graph.tensor import Meta


def _weighted_mean(x: np.ndarray) -> np.ndarray:
    weights = np.arange(1, len(x) + 1, dtype=np.float32)[:, None]
    return (x * weights).sum(axis=0) / weights.sum()


# sentence-transformers' names, in the order in which it concatenates several; x is [tokens, dim].
POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(axis=0),
    "mean": lambda x: x.mean(axis=0),
    "mean_sqrt_len_tokens": lambda x: x.sum(axis=0) / np.float32(len(x) ** 0.5),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x: x[-1],
}


def _infer(x: Meta, q_start: Meta, *, kind: str) -> Meta:
    expect("x", x, 2, "f32")
    expect("q_start", q_start, 1, "i32")
    require(kind in POOLINGS, f"kind is {kind!r}, not {' or '.join(POOLINGS)}")
    return out((q_start.rows, x.inner[0]))


def _sample(lengths: tuple[int, ...], width: int, kind: str, layout: str) -> Sample:
    def q_start(rng: Rng, shape: Shape) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)])

    args = (Arg(("T", width), layout=layout), Arg(("Q",), I32, make=q_start))
    return Sample(args, {"kind": kind}, {"T": sum(lengths), "Q": len(lengths) + 1})


@op(
    "pool",
    infer=_infer,
    cost=lambda out, x, q_start, *, env, kind: Cost(x.size, x.nbytes + q_start.nbytes + out.nbytes),
    tol={"f32": 1e-5},
    samples=grid(
        _sample,
        lengths=((), (1,), (3, 0, 1), (1, 200, 20)),
        width=(1, 60, 300),
        kind=tuple(POOLINGS),
        layout=("contiguous", "strided"),
    ),
)
def pool(x: np.ndarray, q_start: np.ndarray, *, kind: str) -> np.ndarray:
    """Pool the rows of each sequence. x [T, D] f32, q_start [S + 1] i32 -> [S + 1, D] f32.

    Sequence s has the rows q_start[s] to q_start[s + 1] - 1. Results of sequences without rows are
    zeros, and so is the last row.

    ``kind``: a name of `POOLINGS`. Reimers & Gurevych 2019; weightedmean: Muennighoff 2022.
    """
    result = np.zeros((len(q_start), x.shape[1]), np.float32)
    for s, (first, end) in enumerate(pairwise(q_start.tolist())):
        if first < end:
            result[s] = POOLINGS[kind](x[first:end])
    return result
