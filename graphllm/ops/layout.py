"""Data movement: casts, copies, gathers of rows and columns, concatenation, padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats.quantization import Blocks
from ..graph.dtype import BF16, F16, F32, I8, I16, I32, I64, DType
from ..graph.dtype import dtype as dtype_of
from ..graph.op import Arg, Cost, Rng, Sample, Samples, Shape, expect, grid, op, out, require, same
from ..graph.tensor import Env, Meta

_FLOATS = ("f32", "f16", "bf16")
_LAYOUTS = ("contiguous", "strided", "permuted", "expanded")


def _moved(result: Meta, x: Meta, *_: Meta, env: Env, **__: Any) -> Cost:
    return Cost(0, x.nbytes + result.nbytes)


def _floats(rng: Rng, shape: Shape) -> np.ndarray:
    """Return normally distributed values, and edge cases of rounding to 16 bits."""
    x = rng.standard_normal(shape).astype(np.float32)
    edge = (65504.0, 65519.9, 65520.0, 1e-8, 6e-8, -0.0, 1.0009765625, 1.00390625, 1e38, np.inf)
    count = min(x.size, len(edge))
    x.flat[:count] = edge[:count]
    return x


def _cast_infer(x: Meta, *, dtype: str) -> Meta:
    expect("x", x, None, *_FLOATS)
    kind = dtype_of(dtype)
    require(kind.name in _FLOATS, f"dtype is {kind}, not {' or '.join(_FLOATS)}")
    require(x.ndim <= 4, f"x has {x.ndim} axes, more than 4")
    return out(x.shape, kind)


def _cast_sample(rows: int, inner: Shape, layout: str, source: DType, target: str) -> Sample:
    arg = Arg(("T", *inner), source, layout, make=_floats)
    return Sample((arg,), {"dtype": target}, {"T": rows})


@op(
    "cast",
    infer=_cast_infer,
    cost=_moved,
    tol={},
    samples=grid(
        _cast_sample,
        rows=(0, 1, 5),
        inner=((1,), (67,), (4, 16)),
        layout=_LAYOUTS,
        source=(F32, F16, BF16),
        target=_FLOATS,
    ),
)
def cast(x: np.ndarray, *, dtype: str) -> np.ndarray:
    """Convert to another float dtype, rounding to nearest even. x [T, ...] -> [T, ...].

    ``dtype``: f32, f16 or bf16. Values beyond its range become infinite.
    """
    with np.errstate(over="ignore"):
        return x.astype(dtype_of(dtype).numpy)


def _contiguous_infer(x: Meta) -> Meta:
    require(not x.dtype.quantised, f"x is {x.dtype}; only plain dtypes can be made contiguous")
    require(x.ndim <= 4, f"x has {x.ndim} axes, more than 4")
    return same(x)


def _numbers(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.integers(-100, 100, shape)


def _any_sample(rows: int, inner: Shape, layout: str, kind: DType) -> Sample:
    make = None if kind.name in _FLOATS else _numbers
    return Sample((Arg(("T", *inner), kind, layout, make=make),), {}, {"T": rows})


@op(
    "contiguous",
    infer=_contiguous_infer,
    cost=_moved,
    tol={},
    role="layout",
    samples=grid(
        _any_sample,
        rows=(0, 1, 5),
        inner=((1,), (67,), (5, 16), (3, 4, 7)),
        layout=_LAYOUTS,
        kind=(F32, F16, BF16, I8, I16, I32, I64),
    ),
)
def contiguous(x: np.ndarray) -> np.ndarray:
    """Copy to a contiguous row-major layout. x [T, ...], at most 4 axes."""
    return np.ascontiguousarray(x)


def _copy_infer(x: Meta, *, memory: str) -> Meta:
    return same(x)


def _copy_sample(rows: int, inner: Shape, kind: DType) -> Sample:
    arg = _any_sample(rows, inner, "contiguous", kind).args
    return Sample(arg, {"memory": "host"}, {"T": rows})


@op(
    "copy",
    infer=_copy_infer,
    cost=_moved,
    tol={},
    role="transfer",
    samples=grid(_copy_sample, rows=(0, 1, 5), inner=((1,), (67,), (4, 16)), kind=(F32, F16, I32)),
)
def copy(x: Any, *, memory: str) -> Any:
    """Copy to the memory called ``memory`` (see `Device.memory`), contiguous."""
    if isinstance(x, Blocks):
        return Blocks(x.raw.copy(), x.dtype, x.elements)
    return x.copy()


def _gather_infer(x: Meta, rows: Meta) -> Meta:
    require(x.ndim >= 1 and not x.dtype.quantised, f"x is {x}, not rows of a plain dtype")
    expect("rows", rows, 1, "i32")
    return out((rows.shape[0], *x.inner), x.dtype)


def _gather_sample(count: int, total: int, inner: Shape, layout: str) -> Sample:
    def choose(rng: Rng, shape: Shape) -> np.ndarray:
        return rng.integers(0, total, shape)

    x, rows = Arg(("T", *inner), layout=layout), Arg(("N",), I32, make=choose)
    return Sample((x, rows), {}, {"T": total, "N": count})


@op(
    "gather_rows",
    infer=_gather_infer,
    cost=lambda out, x, rows, env, **_: Cost(0, 2 * out.nbytes + rows.nbytes),
    tol={},
    samples=grid(
        _gather_sample,
        count=(0, 1, 5),
        total=(1, 9),
        inner=((1,), (64,), (67,), (3, 20)),
        layout=("contiguous", "strided"),
    ),
)
def gather_rows(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Select rows in the given order. x [T, ...], rows [N] i32 below T -> [N, ...]."""
    return x[rows]


def _columns_infer(x: Meta, columns: Meta) -> Meta:
    expect("x", x, 2, "f32")
    expect("columns", columns, 1, "i32")
    fits = columns.shape == x.shape[1:]
    require(fits, f"columns {columns.shape} does not order rows of {x.shape[1]}")
    return same(x)


def _columns_sample(rows: int, width: int, layout: str) -> Sample:
    def order(rng: Rng, shape: Shape) -> np.ndarray:
        return rng.permutation(shape[0])

    args = (Arg(("T", width), layout=layout), Arg((width,), I32, leaf="weight", make=order))
    return Sample(args, {}, {"T": rows})


@op(
    "gather_columns",
    infer=_columns_infer,
    cost=lambda out, x, columns, env, **_: Cost(0, 2 * out.nbytes + columns.nbytes),
    tol={},
    samples=grid(
        _columns_sample, rows=(0, 1, 5), width=(1, 67, 320), layout=("contiguous", "strided")
    ),
)
def gather_columns(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Reorder the columns of each row. x [T, K] f32, columns [K] i32 below K -> [T, K].

    Linears whose file has groups of scattered columns (GPTQ with ``desc_act``) multiply the result.
    """
    return x[:, columns]


def _concat_infer(a: Meta, b: Meta) -> Meta:
    expect("a", a, None, "f32")
    expect("b", b, None, "f32")
    require(a.ndim >= 2, "a has one axis; the varying axis cannot be extended")
    fits = a.shape[:-1] == b.shape[:-1]
    require(fits, f"a {a.shape} and b {b.shape} differ before their last axis")
    return out((*a.shape[:-1], a.inner[-1] + b.inner[-1]))


def _concat_sample(rows: int, inner: Shape, widths: tuple[int, int], layout: str) -> Sample:
    args = (Arg(("T", *inner, width), layout=layout) for width in widths)
    return Sample(tuple(args), {}, {"T": rows})


@op(
    "concat",
    infer=_concat_infer,
    cost=lambda out, a, b, env, **_: Cost(0, 2 * out.nbytes),
    tol={},
    samples=Samples(
        lambda: [
            *grid(
                _concat_sample,
                rows=(0, 1, 7),
                inner=((), (3,)),
                widths=((1, 1), (67, 5), (512, 64), (64, 0)),
                layout=("contiguous", "strided"),
            ),
            _concat_sample(5, (2, 3), (7, 9), "contiguous"),
            _concat_sample(5, (4,), (6, 10), "permuted"),
        ]
    ),
)
def concat(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Concatenate along the last axis. a [T, ..., A], b [T, ..., B] -> [T, ..., A + B]."""
    return np.concatenate([a, b], axis=-1)


_PADDED = {
    "lengths": ((), (1,), (3, 0, 5, 1), (7, 0)),
    "inner": ((), (3,), (2, 40)),
    "layout": ("contiguous", "strided"),
}


def _starts(lengths: tuple[int, ...]) -> Arg:
    def make(rng: Rng, shape: Shape) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)])

    return Arg(("Q",), I32, make=make)


def _token_places(q_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's sequence, and its position in the sequence [T]."""
    sequence = np.repeat(np.arange(len(q_start) - 1), np.diff(q_start))
    return sequence, np.arange(len(sequence)) - q_start[sequence]


def _rebuild_infer(x: Meta, q_start: Meta, *, length: int) -> Meta:
    expect("x", x, None, "f32")
    expect("q_start", q_start, 1, "i32")
    require(length > 0, f"length = {length} is not positive")
    return out((q_start.rows, length, *x.inner))


def _rebuild_sample(lengths: tuple[int, ...], inner: Shape, layout: str) -> Sample:
    args = (Arg(("T", *inner), layout=layout if inner else "contiguous"), _starts(lengths))
    return Sample(args, {"length": 7}, {"T": sum(lengths), "Q": len(lengths) + 1})


@op(
    "rebuild_padding",
    infer=_rebuild_infer,
    cost=lambda out, x, q_start, *, env, length: Cost(0, x.nbytes + q_start.nbytes + out.nbytes),
    tol={},
    samples=grid(_rebuild_sample, **_PADDED),
)
def rebuild_padding(x: np.ndarray, q_start: np.ndarray, *, length: int) -> np.ndarray:
    """Pad packed sequences with zeros. x [T, ...] f32, q_start [S + 1] i32 -> [S + 1, length, ...].

    Sequence s has the rows q_start[s] to q_start[s + 1] - 1 of x, at most ``length``. The last
    rectangle is zero, as the last row of `pool` is.
    """
    result = np.zeros((len(q_start), length, *x.shape[1:]), np.float32)
    result[_token_places(q_start)] = x
    return result


def _remove_infer(x: Meta, q_start: Meta, tokens: Meta) -> Meta:
    expect("x", x, None, "f32")
    require(x.ndim >= 2, f"x is {x}, not rows of each sequence")
    expect("q_start", q_start, 1, "i32")
    expect("tokens", tokens, 1, "i32")
    return out((tokens.rows, *x.inner[1:]))


def _remove_sample(lengths: tuple[int, ...], inner: Shape, layout: str) -> Sample:
    padded, tokens = Arg(("Q", 7, *inner), layout=layout), Arg(("T",), I32)
    env = {"T": sum(lengths), "Q": len(lengths) + 1}
    return Sample((padded, _starts(lengths), tokens), {}, env)


@op(
    "remove_padding",
    infer=_remove_infer,
    cost=lambda out, x, q_start, tokens, *, env: Cost(0, 2 * out.nbytes + q_start.nbytes),
    tol={},
    samples=grid(_remove_sample, **_PADDED),
)
def remove_padding(x: np.ndarray, q_start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Pack padded sequences. x [S, length, ...] f32, q_start [S + 1] i32, tokens [T] -> [T, ...].

    Sequence s gets the rows q_start[s] to q_start[s + 1] - 1 of the result. Of ``tokens``, such as
    the ids, only the length is used. x may have more rectangles than there are sequences.
    """
    return x[_token_places(q_start)]
