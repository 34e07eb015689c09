"""Call of a Python function in the middle of a plan."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..graph.op import Arg, Cost, Sample, Shape, grid, op, require, same
from ..graph.tensor import Meta


def _infer(x: Meta, *, call: Callable[[np.ndarray], np.ndarray]) -> Meta:
    require(x.dtype.numpy is not None, f"x is {x.dtype}; a Python function takes plain dtypes only")
    return same(x)


def _sample(rows: int, inner: Shape, layout: str) -> Sample:
    return Sample((Arg(("T", *inner), layout=layout),), {"call": np.negative}, {"T": rows})


@op(
    "host_call",
    infer=_infer,
    cost=lambda out, x, env, **_: Cost(0, x.nbytes + out.nbytes),
    tol={},
    role="call",
    samples=grid(
        _sample,
        rows=(0, 1, 5),
        inner=((1,), (67,), (3, 20)),
        layout=("contiguous", "strided", "permuted"),
    ),
)
def host_call(x: np.ndarray, *, call: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply a Python function to an array: ``call(x)``. x [T, ...] -> same shape and dtype.

    Only the reference backend runs it, so the plan is split: earlier steps have finished, and the
    value is in the host's memory. ``x`` is the buffer itself; ``call`` must not modify or keep it.
    """
    return call(x)
