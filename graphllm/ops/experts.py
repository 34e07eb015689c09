"""Mixture of experts: selection of experts per token, their products, and the weighted sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..formats import A8_32, A8_256
from ..formats.legacy import Q8_0
from ..graph.dtype import BF16, F16, F32, I32, DType
from ..graph.op import (
    MATMUL,
    Arg,
    Cost,
    Maker,
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
)
from ..graph.tensor import Env, Meta
from .embedding import expect_weight
from .linear import (
    ACTIVATION_DTYPES,
    BY_ROW,
    COMMON_32,
    COMMON_256,
    RARE_32,
    RARE_256,
    TOL,
    matmul,
    pairs,
    to_float32,
    unit_variance,
)

_LAYOUTS = ("contiguous", "strided")
_ROWS = (0, 1, 7)

# ----------------------------------------------------------------------------------------- routing


def _top_k_infer(
    x: Meta, bias: Meta | None = None, *, k: int, groups: int, top_groups: int, top_per_group: int,
) -> Meta:  # fmt: skip
    expect("x", x, 2, "f32")
    columns = x.inner[0]
    if bias is not None:
        expect("bias", bias, 1, "f32")
        require(bias.shape == (columns,), f"bias {bias.shape} does not fit {columns} columns")
    require(groups > 0 and columns % groups == 0, f"{columns} columns in {groups} groups")
    require(0 < top_groups <= groups, f"top_groups is {top_groups} of {groups} groups")
    size = columns // groups
    require(
        0 < top_per_group <= size, f"top_per_group is {top_per_group} of {size} columns in a group"
    )
    require(0 < k <= top_groups * size, f"k is {k} of {top_groups * size} columns")
    return out((x.shape[0], k), I32)


def _ties(rng: Rng, shape: Shape) -> np.ndarray:
    """Return rows of few distinct values, of equal values, with infinities and with NaN."""
    x = np.round(rng.standard_normal(shape) * 2) / 2
    x[1::4] = rng.standard_normal(x[1::4].shape)
    x[2::4] = 0.25
    x[3::4, ::3] = -np.inf
    x[4::4, ::2] = np.nan
    x[5::8, -1] = np.inf
    return x.astype(np.float32)


def _top_k_sample(rows: int, choice: tuple[int, dict[str, Any]], bias: bool, layout: str) -> Sample:
    columns, attrs = choice
    args = (
        Arg(("T", columns), layout=layout, make=_ties),
        Arg((columns,), leaf="weight") if bias else None,
    )
    return Sample(args, attrs, {"T": rows})


_CHOICES = (
    (1, {"k": 1}),
    (8, {"k": 2}),
    (61, {"k": 61}),
    (128, {"k": 8}),
    (40, {"k": 6, "groups": 8, "top_groups": 3, "top_per_group": 1}),
    (256, {"k": 8, "groups": 8, "top_groups": 4, "top_per_group": 2}),
    (9, {"k": 3, "groups": 3, "top_groups": 1, "top_per_group": 3}),
)


@op(
    "top_k",
    infer=_top_k_infer,
    cost=lambda out, x, bias=None, *, env, k, groups, top_groups, top_per_group: Cost(
        (2 + k) * x.size, x.nbytes + (bias.nbytes if bias is not None else 0) + out.nbytes
    ),
    tol={},
    samples=grid(_top_k_sample, rows=(0, 1, 9), choice=_CHOICES, bias=(False, True),
                 layout=_LAYOUTS),
)  # fmt: skip
def top_k(
    x: np.ndarray, bias: np.ndarray | None = None, *, k: int, groups: int = 1, top_groups: int = 1,
    top_per_group: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return the columns of the k largest entries of x + bias in each row, largest first.

    x [T, E] f32, bias [E] f32 -> [T, k] i32.

    With ``groups`` > 1 the columns form that many equal groups, and only the best ``top_groups``
    groups are eligible; a group scores the sum of its ``top_per_group`` largest entries. Ties go to
    the lower column or group. NaN sorts before all numbers, as in torch.topk, so that a faulty
    score is chosen and appears in the weights. DeepSeek-AI 2024: section 2.2.2 of DeepSeek V2
    (top_per_group = 1), section 2.1.2 of DeepSeek V3 (top_per_group = 2, and the bias).
    """
    score = x if bias is None else x + bias
    if groups == 1:
        return _largest(score)[:, :k].astype(np.int32)
    size = x.shape[1] // groups
    grouped = score.reshape(len(x), groups, size)
    ranked = np.take_along_axis(grouped, _largest(grouped), axis=-1)
    worth = ranked[..., 0]
    with np.errstate(invalid="ignore"):
        for i in range(1, top_per_group):
            worth = worth + ranked[..., i]
    chosen = np.sort(_largest(worth)[:, :top_groups], axis=-1)
    columns = (chosen[..., None] * size + np.arange(size)).reshape(len(x), top_groups * size)
    first = _largest(np.take_along_axis(score, columns, axis=1))[:, :k]
    return np.take_along_axis(columns, first, axis=1).astype(np.int32)


def _largest(x: np.ndarray) -> np.ndarray:
    """Return indices that sort each row in descending order, NaN first."""
    number = ~np.isnan(x)
    return np.lexsort((np.where(number, -x, 0), number), axis=-1)


def _pick_infer(x: Meta, ids: Meta) -> Meta:
    expect("x", x, 2, "f32")
    _expect_ids(ids, x)
    return out(ids.shape)


def _expect_ids(ids: Meta, x: Meta) -> None:
    """Check that ``ids`` has a row for each row of ``x``."""
    expect("ids", ids, 2, "i32")
    require(ids.shape[0] == x.shape[0], f"ids {ids.shape} does not fit the rows of {x.shape}")


def _below(count: int) -> Maker:
    """Return a maker of ids below ``count`` that always include the last one."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        ids = rng.integers(0, count, shape)
        ids[-1:, -1:] = count - 1  # where a kernel may read past the end
        return ids

    return make


@op(
    "pick",
    infer=_pick_infer,
    cost=lambda out, x, ids, *, env: Cost(0, 2 * out.nbytes + ids.nbytes),
    tol={},
    samples=grid(
        lambda rows, columns, k, layout: Sample(
            (Arg(("T", columns), layout=layout), Arg(("T", k), I32, make=_below(columns))),
            {},
            {"T": rows},
        ),
        rows=_ROWS,
        columns=(1, 61),
        k=(1, 8),
        layout=_LAYOUTS,
    ),
)
def pick(x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Select entries of each row. x [T, E] f32, ids [T, k] i32 below E -> [T, k]."""
    return np.take_along_axis(x, ids, axis=1)


def _sum_norm_infer(x: Meta, *, eps: float) -> Meta:
    expect("x", x, 2, "f32")
    require(eps >= 0, f"eps is {eps}, below zero")
    return same(x)


@op(
    "sum_norm",
    infer=_sum_norm_infer,
    cost=lambda out, x, *, env, eps: Cost(2 * x.size, x.nbytes + out.nbytes),
    tol={"f32": 1e-6},
    samples=grid(
        lambda rows, width, eps, layout: Sample(
            (Arg(("T", width), layout=layout, make=lambda rng, shape: rng.random(shape) + 1e-3),),
            {"eps": eps},
            {"T": rows},
        ),
        rows=_ROWS,
        width=(1, 2, 8, 61),
        eps=(0.0, 1e-2),
        layout=_LAYOUTS,
    ),
)
def sum_norm(x: np.ndarray, *, eps: float = 0.0) -> np.ndarray:
    """Divide each row by its sum plus eps. x [T, D] f32 -> [T, D]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return x / (x.sum(axis=-1, keepdims=True, dtype=np.float32) + np.float32(eps))


# ---------------------------------------------------------------------------------------- products


def _expert_infer(x: Meta, w: Meta, ids: Meta, bias: Meta | None = None) -> Meta:
    expect("x", x, None, "f32", *ACTIVATION_DTYPES)
    require(x.ndim in (2, 3), f"x has {x.ndim} axes, not 2 or 3")
    expect_weight(w, 3)
    _expect_ids(ids, x)
    require(x.ndim == 2 or x.shape[1] == ids.shape[1], f"x {x.shape} does not fit ids {ids.shape}")
    require(x.shape[-1] == w.shape[2], f"w {w.shape} does not fit rows of {x.shape[-1]}")
    if bias is not None:
        expect("bias", bias, 2, "f32")
        require(bias.shape == w.shape[:2], f"bias {bias.shape} does not fit w {w.shape}")
    return out((*ids.shape, w.shape[1]))


def _expert_cost(
    out: Meta, x: Meta, w: Meta, ids: Meta, bias: Meta | None = None, *, env: Env,
) -> Cost:  # fmt: skip
    named = min(env.get("experts", ids.size), ids.size, w.dims[0])
    read = w.nbytes + (bias.nbytes if bias is not None else 0)  # bytes of all experts
    moved = x.nbytes + ids.nbytes + out.nbytes
    return Cost(2 * out.size * w.dims[2], moved + read * named // max(1, w.dims[0]))


def _expert_sample(
    rows: int, shape: Shape, kind: DType, x: DType = F32, each: bool = False, k: int = 2,
    layout: str = "contiguous", bias: bool = False,
) -> Sample:  # fmt: skip
    experts, _, width = shape
    args = (
        Arg(("T", k, width) if each else ("T", width), x, layout),
        Arg(shape, kind, leaf="weight", make=unit_variance),
        Arg(("T", k), I32, make=_below(experts)),
        Arg(shape[:2], leaf="weight") if bias else None,
    )
    return Sample(args, {}, {"T": rows})


_BOTH = (False, True)


@op(
    "expert_linear",
    infer=_expert_infer,
    cost=_expert_cost,
    arithmetic=MATMUL,
    tol=TOL,
    samples=Samples(lambda: [
        *grid(_expert_sample, rows=(0, 1, 5, 33), shape=((1, 1, 1), (3, 17, 63), (8, 32, 100)),
              kind=(F32, F16, BF16), each=_BOTH, bias=_BOTH),
        *grid(_expert_sample, rows=(0, 1, 5, 33), shape=((3, 17, 64), (8, 48, 320)),
              kind=COMMON_32, x=(F32, A8_32), each=_BOTH),
        *grid(_expert_sample, rows=(1, 33), shape=((5, 20, 512),), kind=COMMON_256,
              x=(F32, A8_256), each=_BOTH),
        *(sample for x, kind in pairs(*RARE_32) for sample in grid(
            _expert_sample, rows=(1, 33), shape=((5, 33, 96),), kind=(kind,), x=(x,),
            bias=(True,))),
        *grid(_expert_sample, rows=(1, 33), shape=((3, 33, 512),), kind=RARE_256,
              x=(F32, A8_256)),
        *grid(_expert_sample, rows=(1, 70), shape=((64, 32, 64),), kind=(F16, Q8_0), k=(8,),
              each=_BOTH),
        *grid(_expert_sample, rows=(1, 5), shape=((4, 17, 96),), kind=(F32, F16, Q8_0),
              layout=("strided",), each=_BOTH, bias=(True,)),
        *grid(_expert_sample, rows=(1, 5), shape=((4, 17, 96),), kind=(F32, Q8_0),
              layout=("permuted", "expanded"), each=(True,)),
        *(sample for x, kind in pairs(*BY_ROW) for sample in grid(
            _expert_sample, rows=(1, 33), shape=((5, 33, 128),), kind=(kind,), x=(x,), each=_BOTH,
            bias=(True,))),
    ]),
)  # fmt: skip
def expert_linear(x: Any, w: Any, ids: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Multiply by the matrices of experts: out[t, j] = w[ids[t, j]] x[t, j] + bias[ids[t, j]].

    x [T, K] (one row for all k) or [T, k, K], f32 or a result of `quantise_act`; w [E, N, K] any
    weight format; ids [T, k] i32 below E; bias [E, N] f32 -> f32 [T, k, N]. Only experts in ``ids``
    are read; the cost uses ``env["experts"]``, if set, as the number of distinct ones.

    Shazeer et al. 2017.
    """
    x = to_float32(x)
    result = np.empty((*ids.shape, w.shape[1]), np.float32)
    for expert in np.unique(ids):
        t, j = np.nonzero(ids == expert)
        y = matmul(x[t] if x.ndim == 2 else x[t, j], w[int(expert)])
        result[t, j] = y if bias is None else y + bias[expert]
    return result


def _combine_infer(y: Meta, weights: Meta) -> Meta:
    expect("y", y, 3, "f32")
    expect("weights", weights, 2, "f32")
    require(y.shape[:2] == weights.shape, f"weights {weights.shape} does not fit y {y.shape}")
    return out((y.shape[0], y.shape[2]))


@op(
    "combine",
    infer=_combine_infer,
    cost=lambda out, y, weights, *, env: Cost(
        2 * y.size, y.nbytes + weights.nbytes + out.nbytes
    ),
    tol={"f32": 1e-6},
    samples=grid(
        lambda rows, k, width, layout: Sample(
            (Arg(("T", k, width), layout=layout),
             Arg(("T", k), make=lambda rng, shape: rng.random(shape) / shape[1])),
            {},
            {"T": rows},
        ),
        rows=_ROWS,
        k=(1, 2, 8),
        width=(1, 63, 640),
        layout=(*_LAYOUTS, "permuted"),
    ),
)  # fmt: skip
def combine(y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted sum of expert outputs. y [T, k, N] f32, weights [T, k] f32 -> [T, N]."""
    return np.einsum("tkn,tk->tn", y, weights)
