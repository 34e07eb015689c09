"""A step that leaves the kernels: a Python function of one value, in the middle of a plan."""

from __future__ import annotations

import numpy as np

from ..graph.op import Arg, Cost, Sample, grid, op, require, same


def _infer(x, *, call):
    require(x.dtype.numpy is not None, f"x is {x.dtype}; a function is given plain dtypes only")
    return same(x)


def _sample(rows, inner, layout):
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
def host_call(x, *, call):
    """What a Python function makes of an array: ``call(x)``. x [T, ...] -> the same shape, dtype.

    Only the reference has it, so that a plan is split there: what comes before is done, and is in
    the host's memory. ``x`` is where the value lies: ``call`` must not write to it or keep it.
    """
    return call(x)
