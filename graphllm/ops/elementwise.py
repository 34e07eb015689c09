"""Elementwise ops: sums, products, activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..graph.op import (
    Arg,
    Cost,
    Rng,
    Sample,
    Samples,
    Shape,
    expect,
    grid,
    op,
    out,
    require,
    same,
)  # fmt: skip
from ..graph.tensor import Env, Meta

_INNER = ((1,), (63,), (64,), (640,), (3, 32))
_ROWS = (0, 1, 7)


def _unary(x: Meta, **_: Any) -> Meta:
    expect("x", x, None, "f32")
    return same(x)


def _binary(a: Meta, b: Meta) -> Meta:
    expect("a", a, None, "f32")
    return _add_infer(a, b)


def _add_infer(a: Meta, b: Meta) -> Meta:
    expect("a", a, None, "f32", "f16")
    expect("b", b, None, "f32")
    fits = b.shape in (a.shape, a.shape[-1:], (1,), ())
    require(fits, f"b {b.shape} is not a {a.shape}, one row of it, or one element")
    return out(a.shape)


def _cost(flops: int) -> Callable[..., Cost]:
    """Return a cost rule: ``flops`` per element, operands read and the result written once."""

    def cost(out: Meta, *operands: Meta, env: Env, **_: Any) -> Cost:
        return Cost(flops * out.size, out.nbytes + sum(m.nbytes for m in operands))

    return cost


def _pair(rows: int, inner: Shape, layout: str, row: bool) -> Sample:
    a = Arg(("T", *inner), layout=layout)
    b = Arg(inner[-1:], leaf="weight") if row else Arg(("T", *inner), layout=layout)
    return Sample((a, b), {}, {"T": rows})


def _with_one(rows: int, inner: Shape, layout: str, shape: Shape) -> Sample:
    return Sample((Arg(("T", *inner), layout=layout), Arg(shape, leaf="weight")), {}, {"T": rows})


_PAIRS = Samples(
    lambda: [
        *grid(_pair, rows=_ROWS, inner=_INNER, layout=("contiguous", "strided"), row=(False, True)),
        Sample((Arg(("T", 5, 8), layout="permuted"), Arg(("T", 5, 8))), {}, {"T": 3}),
        Sample((Arg(("T", 5, 8)), Arg(("T", 5, 8), layout="expanded")), {}, {"T": 3}),
        Sample((Arg(("T", 1)), Arg(("T", 1), layout="strided")), {}, {"T": 1}),
        *grid(
            _with_one, rows=_ROWS, inner=_INNER, layout=("contiguous", "strided"), shape=((), (1,))
        ),
    ]
)


def _wide(rng: Rng, shape: Shape) -> np.ndarray:
    """Return values that reach into both tails of activations, and zeros."""
    x = (rng.standard_normal(shape) * 6).astype(np.float32)
    if x.size > 8:
        x.flat[:8] = (0.0, -0.0, 100.0, -100.0, 1e-30, -1e-30, 20.0, -20.0)
    return x


def _samples(**attrs: Sequence[Any]) -> Samples:
    """Return samples for each value of one attribute, which is omitted for an op without."""
    names, values = list(attrs), list(attrs.values()) or [(None,)]
    return Samples(
        lambda: [
            Sample(
                (Arg(("T", *inner), layout=layout, make=_wide),),
                {names[0]: value} if names else {},
                {"T": rows},
            )
            for value in values[0]
            for inner in _INNER
            for layout in ("contiguous", "strided")
            for rows in _ROWS
        ]
    )


@op("add", infer=_add_infer, cost=_cost(1), tol={}, samples=_PAIRS)
def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise sum. a [T, ..., D], b as a, [D] (one row), [1] or [] -> [T, ..., D].

    ``a`` is f16 where a backend lowers a residual; the sum is f32.
    """
    return np.add(a, b, dtype=np.float32)


@op("mul", infer=_binary, cost=_cost(1), tol={}, samples=_PAIRS)
def mul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise product. a [T, ..., D], b as a, [D] (one row), [1] or [] -> [T, ..., D]."""
    return a * b


@op(
    "scale",
    infer=_unary,
    cost=_cost(1),
    tol={},
    samples=_samples(factor=(0.125, 25.298221281347036)),
)
def scale(x: np.ndarray, *, factor: float) -> np.ndarray:
    """Multiply by a constant, which is rounded to float32 first. x [T, ...] -> [T, ...]."""
    return x * np.float32(factor)


@op("silu", infer=_unary, cost=_cost(4), tol={"f32": 1e-6}, samples=_samples())
def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)). x [T, ...] -> [T, ...]. Elfwing et al. 2017, eq. 4 (beta = 1: Swish)."""
    with np.errstate(over="ignore"):  # exp(-x) is inf below -88, and x / inf is 0 as required
        return x / (1 + np.exp(-x))


@op("relu", infer=_unary, cost=_cost(1), tol={}, samples=_samples())
def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0); NaN stays NaN. x [T, ...] -> [T, ...]. Nair and Hinton 2010."""
    return np.where(x < 0, np.float32(0), x)


@op("sigmoid", infer=_unary, cost=_cost(3), tol={"f32": 1e-6}, samples=_samples())
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)). x [T, ...] -> [T, ...]."""
    with np.errstate(over="ignore"):  # exp(-x) is inf below -88, and 1 / inf is 0 as required
        return 1 / (1 + np.exp(-x))


def _clamped_infer(gate: Meta, up: Meta, *, alpha: float, limit: float) -> Meta:
    require(gate.shape == up.shape, f"up {up.shape} differs from the shape of gate {gate.shape}")
    require(limit > 0, f"limit is {limit}, not above zero")
    return _binary(gate, up)


def _clamped_sample(rows: int, inner: Shape, layout: str) -> Sample:
    args = (Arg(("T", *inner), layout=layout, make=_wide),) * 2
    return Sample(args, {"alpha": 1.702, "limit": 7.0}, {"T": rows})


@op(
    "clamped_glu",
    infer=_clamped_infer,
    cost=_cost(8),
    tol={"f32": 1e-6},
    samples=grid(_clamped_sample, rows=_ROWS, inner=_INNER, layout=("contiguous", "strided")),
)
def clamped_glu(gate: np.ndarray, up: np.ndarray, *, alpha: float, limit: float) -> np.ndarray:
    """g * sigmoid(alpha * g) * (u + 1) with g = min(gate, limit), u = clip(up, -limit, limit).

    gate, up [T, ..., D] -> [T, ..., D]. OpenAI 2025 (gpt-oss), from its published code.
    """
    limit = np.float32(limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(np.float32(-alpha) * gate)) * (up + 1)


_ERF_STEPS = 256  # knots per unit
_ERF_END = 6  # erf is 1 to double precision from here on
_ERF_KNOTS = np.arange(_ERF_END * _ERF_STEPS + 2) / _ERF_STEPS
_ERF = np.array([math.erf(v) for v in _ERF_KNOTS])
_ERF_SLOPE = 2 / math.sqrt(math.pi) * np.exp(-_ERF_KNOTS * _ERF_KNOTS) / _ERF_STEPS


def _erf(x: np.ndarray) -> np.ndarray:
    """erf of float64 x by cubic Hermite interpolation of math.erf; absolute error below 1e-11.

    NumPy has no erf, and calling math.erf for every element takes as long as the linear before.
    """
    at = np.minimum(np.abs(x), _ERF_END) * _ERF_STEPS
    i = np.nan_to_num(at).astype(np.int64)
    t = at - i
    low, high, rise, fall = _ERF[i], _ERF[i + 1], _ERF_SLOPE[i], _ERF_SLOPE[i + 1]
    step = high - low
    value = low + t * (rise + t * (3 * step - 2 * rise - fall + t * (rise + fall - 2 * step)))
    return np.copysign(value, x)


def _gelu_infer(x: Meta, *, kind: str) -> Meta:
    require(kind in ("tanh", "erf"), f"kind is {kind!r}, not 'tanh' or 'erf'")
    return _unary(x)


@op(
    "gelu",
    infer=_gelu_infer,
    cost=_cost(9),
    tol={"f32": 2e-6},
    samples=_samples(kind=("tanh", "erf")),
)
def gelu(x: np.ndarray, *, kind: str = "tanh") -> np.ndarray:
    """Gaussian error linear unit. x [T, ...] -> [T, ...]. Hendrycks & Gimpel 2016, section 2.

    erf: x/2 (1 + erf(x / sqrt 2)). tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
    """
    wide = x.astype(np.float64)  # 1 + tanh cancels in the lower tail
    if kind == "erf":
        gate = _erf(wide * math.sqrt(0.5))
    else:
        gate = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide))
    return (0.5 * wide * (1 + gate)).astype(np.float32)


def _softcap_infer(x: Meta, *, cap: float) -> Meta:
    require(cap > 0, f"cap is {cap}, not above zero")
    return _unary(x)


@op(
    "softcap",
    infer=_softcap_infer,
    cost=_cost(4),
    tol={"f32": 1e-6},
    samples=_samples(cap=(30.0, 0.5)),
)
def softcap(x: np.ndarray, *, cap: float) -> np.ndarray:
    """cap * tanh(x / cap): the identity near zero, within +-cap. x [T, ...] -> [T, ...].

    Gemma Team 2024 (Gemma 2), section 2.
    """
    cap = np.float32(cap)
    return cap * np.tanh(x / cap)
