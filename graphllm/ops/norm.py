"""Norms and softmax."""

from __future__ import annotations

import numpy as np

from ..graph.op import Arg, Cost, Rng, Sample, Shape, expect, grid, op, out, require, same
from ..graph.tensor import Meta


def _infer(x: Meta, w: Meta, *, eps: float) -> Meta:
    _expect_rows(x)
    require(w.shape == x.shape[-1:], f"weight {w.shape} does not fit rows of {x.shape[-1]}")
    return same(x)


def _sample(rows: int, inner: Shape, layout: str) -> Sample:
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
def rms_norm(x: np.ndarray, w: np.ndarray, *, eps: float) -> np.ndarray:
    """Root-mean-square norm over the last axis. x [T, ..., D], w [D] -> [T, ..., D].

    Zhang & Sennrich 2019, eq. 4; the weight is a plain factor.
    """
    x = x.astype(np.float32)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + eps) * w


def _expect_rows(x: Meta) -> None:
    """Raise GraphError if there is no axis before the normalized one."""
    require(x.ndim > 1, "x has one axis; the last one is normalized, and rows come first")


def _layer_infer(x: Meta, w: Meta, b: Meta, *, eps: float) -> Meta:
    _expect_rows(x)
    for name, operand in (("weight", w), ("bias", b)):
        if operand is not None:
            fits = operand.shape == x.shape[-1:]
            require(fits, f"{name} {operand.shape} does not fit rows of {x.shape[-1]}")
    expect("x", x, None, "f32", "f16")
    return out(x.shape)


def _layer_sample(rows: int, inner: Shape, layout: str, bias: bool) -> Sample:
    x, leaf = Arg(("T", *inner), layout=layout), Arg(inner[-1:], leaf="weight")
    return Sample((x, leaf, leaf if bias else None), {"eps": 1e-5}, {"T": rows})


@op(
    "layer_norm",
    infer=_layer_infer,
    cost=lambda out, x, w, b, env, **_: Cost(
        7 * x.size, x.nbytes + out.nbytes + sum(m.nbytes for m in (w, b) if m is not None)
    ),
    tol={"f32": 2e-5},
    samples=grid(
        _layer_sample,
        rows=(0, 1, 7),
        inner=((2,), (63,), (640,), (4, 256)),
        layout=("contiguous", "strided"),
        bias=(False, True),
    ),
)
def layer_norm(
    x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, *, eps: float,
) -> np.ndarray:  # fmt: skip
    """Layer norm over the last axis. x [T, ..., D], w [D], b [D] or None -> f32 [T, ..., D].

    (x - mean) / sqrt(variance + eps) * w + b with the population variance. Ba, Kiros & Hinton 2016.
    """
    x = x.astype(np.float32)
    x = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32) + eps) * w
    return y if b is None else y + b


def _softmax_infer(x: Meta) -> Meta:
    expect("x", x, None, "f32")
    _expect_rows(x)
    require(x.shape[-1] != 0, "softmax of a row without columns is undefined")
    return same(x)


def _logits(rng: Rng, shape: Shape) -> np.ndarray:
    """Return ordinary rows, and one far from zero with a masked column."""
    x = (rng.standard_normal(shape) * 4).astype(np.float32)
    if len(x) > 1:
        x[1] += 200
        x[1].flat[0] = -np.inf
    return x


@op(
    "softmax",
    infer=_softmax_infer,
    cost=lambda out, x, env, **_: Cost(5 * x.size, x.nbytes + out.nbytes),
    tol={"f32": 1e-6},
    samples=grid(
        lambda rows, inner, layout: Sample(
            (Arg(("T", *inner), layout=layout, make=_logits),), {}, {"T": rows}
        ),
        rows=(0, 1, 7),
        inner=((2,), (63,), (640,), (4, 33)),
        layout=("contiguous", "strided"),
    ),
)
def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, with the row maximum subtracted first. [T, ..., D]."""
    x = x.astype(np.float32)
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True, dtype=np.float32)
