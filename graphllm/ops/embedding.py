"""Rows of a table, by token id."""

from __future__ import annotations

import numpy as np

from ..dtype import BF16, DTYPES, F16, F32, I32, Q4_K, Q5_0, Q6_K, Q8_0
from ..quant import Blocks
from . import Arg, Cost, Sample, expect, grid, op, out

WEIGHT_FORMATS = tuple(
    name
    for name, kind in DTYPES.items()
    if name in ("f32", "f16", "bf16") or (kind.quantised and not name.startswith("a8_"))
)


def _infer(ids, w):
    expect("ids", ids, 1, "i32")
    expect("w", w, 2, *WEIGHT_FORMATS)
    return out((ids.shape[0], w.shape[1]))


def _cost(out, ids, w, *, env):
    rows = ids.size  # only these rows of the table are touched
    return Cost(out.size, rows * w.dtype.row_nbytes(w.shape[1]) + ids.nbytes + out.nbytes)


def _sample(rows, shape, kind):
    def tokens(rng, count):
        ids = rng.integers(0, shape[0], count)
        ids[-1:] = shape[0] - 1  # the last row is where a kernel reads past the end
        return ids

    return Sample((Arg(("T",), I32, make=tokens), Arg(shape, kind, leaf="weight")), {}, {"T": rows})


@op(
    "embedding",
    infer=_infer,
    cost=_cost,
    tol={"f32": 0.0},
    samples=[
        *grid(_sample, rows=(0, 1, 9), shape=((1, 1), (13, 63), (50, 640)), kind=(F32, F16, BF16)),
        *grid(_sample, rows=(0, 1, 9), shape=((1, 32), (13, 96), (50, 640)), kind=(Q8_0, Q5_0)),
        *grid(_sample, rows=(0, 1, 9), shape=((1, 256), (37, 768)), kind=(Q4_K, Q6_K)),
    ],
)
def embedding(ids, w):
    """Rows of the table as float32. ids [T] i32 below V, w [V, D] any weight format -> [T, D].

    The rows are read where they lie, so the table need not be in memory; a block format is
    dequantised exactly as `graphllm.quant` says.
    """
    rows = w[ids]
    return rows.dequantise() if isinstance(rows, Blocks) else rows.astype(np.float32)
