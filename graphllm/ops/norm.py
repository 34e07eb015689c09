"""Normalisation ops."""

from __future__ import annotations

import numpy as np

from . import Arg, Cost, Sample, grid, op, require, same


def _infer(x, w, *, eps):
    require(w.shape == x.shape[-1:], f"weight {w.shape} does not fit rows of {x.shape[-1]}")
    return same(x)


def _sample(rows, inner, layout):
    return Sample(
        (Arg(("T", *inner), layout=layout), Arg(inner[-1:], leaf="weight")),
        {"eps": 1e-6},
        {"T": rows},
    )


@op(
    "rms_norm",
    infer=_infer,
    cost=lambda out, x, w, env, **_: Cost(4 * x.size, x.nbytes + w.nbytes + out.nbytes),
    tol={"f32": 1e-5},
    samples=grid(
        _sample,
        rows=(0, 1, 7),
        inner=((1,), (63,), (64,), (640,), (4, 256)),
        layout=("contiguous", "strided"),
    ),
)
def rms_norm(x, w, *, eps):
    """Root-mean-square norm over the last axis. x [T, ..., D], w [D] -> [T, ..., D].

    Zhang & Sennrich 2019, eq. 4, with the weight as a plain factor.
    """
    x = x.astype(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + eps) * w
