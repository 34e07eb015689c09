"""Fused ops for routing and combining experts; those around products are in `linear`."""

from __future__ import annotations

from typing import Any

from ...formats import A8_32, A8_256
from ...graph.dtype import F32, I32, DType
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Samples, Users, get, grid
from ...graph.tensor import Tensor
from ..linear import COMMON_32, COMMON_256, RARE_32, RARE_256, TOL, pairs
from .common import is_op, unit_rows

_SCORES = ("softmax", "sigmoid")  # over all experts; otherwise softmax over the chosen ones


def _propose_route(node: Tensor, users: Users) -> Proposal | None:
    scores, ids = node.src
    assert scores is not None and ids is not None
    if not is_op(ids, "top_k") or ids.src[0] is not scores:
        return None
    score, eps, factor = scores.op if scores.op in _SCORES else "chosen", None, 1.0
    last = node
    for name in ("softmax" if score == "chosen" else "sum_norm", "scale"):
        (user, *others) = users(last) or (last,)
        if others or user.op != name:
            continue
        last = user
        eps, factor = user.attrs.get("eps", eps), user.attrs.get("factor", factor)
    attrs = {**ids.attrs, "score": score, "eps": eps, "factor": factor}
    return (scores if score == "chosen" else scores.src[0], ids.src[1]), attrs


_CHOICES: tuple[tuple[int, dict[str, Any]], ...] = (
    (8, {"k": 2, "groups": 1, "top_groups": 1, "top_per_group": 1}),
    (61, {"k": 61, "groups": 1, "top_groups": 1, "top_per_group": 1}),
    (61, {"k": 6, "groups": 1, "top_groups": 1, "top_per_group": 1}),
    (128, {"k": 8, "groups": 1, "top_groups": 1, "top_per_group": 1}),
    (200, {"k": 32, "groups": 1, "top_groups": 1, "top_per_group": 1}),
    (40, {"k": 6, "groups": 8, "top_groups": 3, "top_per_group": 1}),
    (256, {"k": 8, "groups": 8, "top_groups": 4, "top_per_group": 2}),
)


@fused_op(
    "route",
    anchor="pick",
    propose=_propose_route,
    tol={"f32": 2e-5},
    samples=grid(
        lambda rows, choice, bias, score, eps, factor, layout: Sample(
            (
                Arg(("T", choice[0]), layout=layout),
                Arg((choice[0],), leaf="weight") if bias else None,
            ),
            {**choice[1], "score": score, "eps": eps, "factor": factor},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        choice=_CHOICES,
        bias=(False, True),
        score=(*_SCORES, "chosen"),
        eps=(None, 1e-20),
        factor=(1.0, 2.5),
        layout=("contiguous", "strided"),
    ),
)
def route(
    x: Tensor, bias: Tensor | None = None, *, score: str, k: int, groups: int, top_groups: int,
    top_per_group: int, eps: float | None, factor: float,
) -> Any:  # fmt: skip
    """Select the experts of each token and their weights from the router's logits.

    x [T, E], bias [E] and the selection as in `top_k` -> ids [T, k] i32, weights [T, k].

    ``score``: "softmax" or "sigmoid" of x selects and weights; "chosen": x selects, and the softmax
    over the chosen entries weights. ``eps``: of `sum_norm`, None omits it. ``factor``: of `scale`.
    """
    scores = x if score == "chosen" else get(score)(x)
    ids = get("top_k")(
        scores, bias, k=k, groups=groups, top_groups=top_groups, top_per_group=top_per_group
    )
    weights = get("pick")(scores, ids)
    if score == "chosen":
        weights = get("softmax")(weights)
    elif eps is not None:
        weights = get("sum_norm")(weights, eps=eps)
    return ids, weights if factor == 1.0 else get("scale")(weights, factor=factor)


def _propose_combine_add(node: Tensor, users: Users) -> Proposal | None:
    r, made = node.src
    if not is_op(made, "combine") or node.src[0].shape != made.shape:  # type: ignore[union-attr]
        return None
    return (*made.src, r), {}  # type: ignore[union-attr]


def _propose_expert_linear_add(node: Tensor, users: Users) -> Proposal | None:
    found = _propose_combine_add(node, users)
    if found is None:
        return None
    (y, weights, r), _ = found
    if not is_op(y, "expert_linear"):
        return None
    x, w, ids, bias = y.src  # type: ignore[union-attr]
    return (x, w, ids, weights, r, bias), {}


def _expert_sample(
    shape: tuple[int, int, int], kind: DType, x: DType, k: int, bias: bool
) -> Sample:
    experts, width, depth = shape
    args = (
        Arg((1, k, depth), x), Arg(shape, kind, leaf="weight", make=unit_rows),
        Arg((1, k), I32, make=lambda rng, shape: rng.integers(0, experts, shape)),
        Arg((1, k), make=lambda rng, shape: rng.random(shape) / shape[1]),
        Arg((1, width)), Arg((experts, width), leaf="weight") if bias else None,
    )  # fmt: skip
    return Sample(args, {})


@fused_op(
    "expert_linear_add",
    anchor="add",
    propose=_propose_expert_linear_add,
    tol=TOL,
    samples=Samples(lambda: [
        *grid(_expert_sample, shape=((5, 67, 256), (9, 256, 768)), kind=COMMON_32, x=(F32, A8_32),
              k=(2, 4, 7, 8), bias=(False, True)),
        *grid(_expert_sample, shape=((5, 67, 256), (9, 256, 768)), kind=COMMON_256,
              x=(F32, A8_256), k=(2, 8), bias=(False, True)),
        *(sample for x, kind in pairs(*RARE_32, *RARE_256) for sample in grid(
            _expert_sample, shape=((6, 33, 768),), kind=(kind,), x=(x,), k=(4,), bias=(True,))),
    ]),
)  # fmt: skip
def expert_linear_add(
    x: Tensor, w: Tensor, ids: Tensor, weights: Tensor, r: Tensor, bias: Tensor | None = None
) -> Any:
    """r + weighted sum of the experts' linears; see `expert_linear` and `combine`.

    x [T, k, K], w [E, N, K], ids [T, k], weights [T, k], r [T, N], bias [E, N] -> [T, N].
    """
    y = get("expert_linear")(x, w, ids, bias)
    return get("add")(r, get("combine")(y, weights))


@fused_op(
    "combine_add",
    anchor="add",
    propose=_propose_combine_add,
    tol={"f32": 1e-6},
    samples=grid(
        lambda rows, k, width, layout: Sample(
            (
                Arg(("T", k, width), layout=layout),
                Arg(("T", k), make=lambda rng, shape: rng.random(shape) / shape[1]),
                Arg(("T", width), layout=layout),
            ),
            {},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        k=(1, 2, 8),
        width=(1, 63, 640),
        layout=("contiguous", "strided"),
    ),
)
def combine_add(y: Tensor, weights: Tensor, r: Tensor) -> Any:
    """r + weighted sum of expert outputs. y [T, k, N], weights [T, k], r [T, N] -> [T, N]."""
    return get("add")(r, get("combine")(y, weights))
