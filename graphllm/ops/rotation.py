"""Rotation of activations, which spreads outliers before they are quantised."""

from __future__ import annotations

import numpy as np

from ..graph.op import Arg, Cost, Sample, Shape, expect, grid, op, require, same
from ..graph.tensor import Meta

BLOCK = 16  # elements that are rotated together; the scale 1 / sqrt(16) is exact


def _infer(x: Meta) -> Meta:
    expect("x", x, None, "f32")
    require(x.ndim > 1, f"x has {x.ndim} axes, not 2 or more")
    require(x.inner[-1] % BLOCK == 0, f"rows of {x.inner[-1]} are not whole blocks of {BLOCK}")
    return same(x)


def _sample(rows: int, inner: Shape, layout: str) -> Sample:
    return Sample((Arg(("T", *inner), layout=layout),), {}, {"T": rows})


def rotate_blocks(x: np.ndarray) -> np.ndarray:
    """Return x, float32 [..., K], rotated as `hadamard` says.

    The order of additions is that of the fast Walsh-Hadamard transform.
    """
    shape = x.shape
    for distance in (1, 2, 4, 8):
        low, high = np.moveaxis(x.reshape(-1, 2, distance), 1, 0)
        x = np.stack((low + high, low - high), axis=1)
    return x.reshape(shape) * np.float32(0.25)


@op(
    "hadamard",
    infer=_infer,
    cost=lambda out, x, *, env: Cost(5 * x.size, x.nbytes + out.nbytes),
    tol={},
    samples=grid(
        _sample,
        rows=(0, 1, 7),
        inner=((16,), (96,), (640,), (3, 32)),
        layout=("contiguous", "strided"),
    ),
)
def hadamard(x: np.ndarray) -> np.ndarray:
    """Rotate blocks of 16 elements by the normalised Hadamard matrix. x [T, ..., K] f32, K a
    multiple of 16 -> [T, ..., K].

    A linear whose weight is rotated as well has the same results, but an outlier is spread over its
    block, so that both are quantised more exactly (Ashkboos et al. 2024, QuaRot).
    """
    return rotate_blocks(x)
