"""Fused ops for mixtures of experts: gated units, routing, and sums."""

from __future__ import annotations

from typing import Any

from ...formats import A8_32, A8_256
from ...formats.activations import A8_ROW
from ...formats.k_quants import Q4_K
from ...formats.legacy import Q5_0, Q8_0
from ...formats.microscaling import MXFP4
from ...formats.row_format import W8A8
from ...graph.dtype import F16, F32, I32, DType
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Samples, Users, get, grid
from ...graph.tensor import Tensor
from ..linear import COMMON_32, COMMON_256, RARE_32, RARE_256, pairs
from ..linear import TOL as LINEAR_TOL
from .common import TOL, act_arg, is_op, propose_glu, quantise_to, quantised_dtypes, unit_rows

_SCORES = ("softmax", "sigmoid")  # over all experts; otherwise softmax over the chosen ones


def _propose_moe_add(node: Tensor, users: Users) -> Proposal | None:
    found = _propose_expert_linear_add(node, users)
    if found is None:
        return None
    (x, down, ids, _, r, bias3), _ = found
    row = x.src[0] if is_op(x, "quantise_act") else x  # type: ignore[union-attr]
    assert row is not None and ids is not None
    clamped = is_op(row, "clamped_glu")
    if not (clamped or is_op(row, "mul")):
        return None
    unit = (_propose_expert_clamped if clamped else _propose_expert_gated)(row, users)
    pick = next((u for u in users(ids) if u.op == "pick"), None)
    choice = pick and _propose_route(pick, users)
    if unit is None or not choice:
        return None
    (x, w, w2, _, bias, bias2), attrs = unit
    (logits, correction), more = choice
    act = {"act": "clamped", "kind": ""} if clamped else {"alpha": 0.0, "limit": 0.0}
    operands = (x, w, w2, down, logits, r, bias, bias2, bias3, correction)
    return operands, {**act, **attrs, **more}


def _moe_sample(
    format: tuple[DType, ...], choice: tuple[int, int], score: str, bias: bool, eps: float | None,
    clamped: bool = False,
) -> Sample:  # fmt: skip
    (experts, k), depth, inner = choice, 256, 288 if format[2] == Q8_0 and not clamped else 256
    act, kind, down = format

    def matrices(rows: int, columns: int, kind: DType) -> Arg:
        return Arg((experts, rows, columns), kind, leaf="weight", make=unit_rows)

    biases = (Arg((experts, n), leaf="weight") if bias else None for n in (inner, inner, depth))
    correction = Arg((experts,), leaf="weight") if bias and score == "sigmoid" else None
    args = (
        Arg((1, depth), act), matrices(inner, depth, kind), matrices(inner, depth, kind),
        matrices(depth, inner, down), Arg((1, experts)), Arg((1, depth)), *biases, correction,
    )  # fmt: skip
    unit = ("clamped", 1.702, 0.5) if clamped else ("silu", 0.0, 0.0)
    return Sample(args, {
        **dict(zip(("act", "alpha", "limit"), unit)), "kind": "",
        "dtypes": ("a8_32",) if clamped else (), "score": score, "k": k, "groups": 1,
        "top_groups": 1, "top_per_group": 1, "eps": eps, "factor": 1.5 if bias else 1.0,
    })  # fmt: skip


@fused_op(
    "moe_add",
    anchor="add",
    propose=_propose_moe_add,
    tol={"f32": 0.1},  # of the sum of up to eight experts, whose gated units are rounded to int8
    samples=Samples(lambda: [
        *grid(_moe_sample, format=((A8_256, Q4_K, Q4_K), (A8_256, Q4_K, Q8_0), (A8_32, Q8_0, Q8_0)),
              choice=((6, 2),), score=(*_SCORES, "chosen"), bias=(False, True), eps=(None, 1e-20)),
        *grid(_moe_sample, format=((A8_32, Q8_0, Q8_0),), choice=((34, 8),),
              score=(*_SCORES, "chosen"), bias=(False, True), eps=(None,)),
        *grid(_moe_sample, format=((A8_32, MXFP4, MXFP4), (A8_32, Q8_0, Q8_0)), choice=((4, 4),),
              score=("chosen",), bias=(False, True), eps=(None,), clamped=(True,)),
    ]),
)  # fmt: skip
def moe_add(
    x: Tensor, w: Tensor, w2: Tensor, w3: Tensor, logits: Tensor, r: Tensor,
    bias: Tensor | None = None, bias2: Tensor | None = None, bias3: Tensor | None = None,
    correction: Tensor | None = None, *, act: str, kind: str, alpha: float, limit: float,
    dtypes: tuple[str, ...], score: str, k: int, groups: int, top_groups: int, top_per_group: int,
    eps: float | None, factor: float,
) -> Any:  # fmt: skip
    """r + the output of a mixture of experts, whose router has computed the logits.

    x [T, K], w and w2 [E, N, K], w3 [E, K, N], logits [T, E], r [T, K], biases [E, N], [E, N] and
    [E, K], correction [E] -> [T, K]. ``act``, ``kind``: of `expert_gated`; "clamped":
    `expert_clamped` with ``alpha`` and ``limit``. ``dtypes``: the dtype of the gated units before
    w3, none for float32. The other attributes are those of `route`, whose bias is ``correction``.
    """
    ids, weights = get("route")(
        logits, correction, score=score, k=k, groups=groups, top_groups=top_groups,
        top_per_group=top_per_group, eps=eps, factor=factor,
    )  # fmt: skip
    if act == "clamped":
        own = {"alpha": alpha, "limit": limit, "dtypes": dtypes}
        row = get("expert_clamped")(x, w, w2, ids, bias, bias2, **own)
    else:
        row = get("expert_gated")(x, w, w2, ids, bias, bias2, act=act, kind=kind, dtypes=dtypes)
    (row,) = row if isinstance(row, tuple) else (row,)
    return get("expert_linear_add")(row, w3, ids, weights, r, bias3)


def _expert_pair(gate: Tensor | None, up: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """Return the operands of a fused op for two expert_linears of the same rows; else None."""
    if not (is_op(gate, "expert_linear") and is_op(up, "expert_linear")):
        return None
    x, w, ids, bias = gate.src  # type: ignore[union-attr]
    _, w2, _, bias2 = up.src  # type: ignore[union-attr]
    return x, w, w2, ids, bias, bias2


def _propose_expert_gated(node: Tensor, users: Users) -> Proposal | None:
    found = propose_glu(node, users)
    operands = _expert_pair(*found[0]) if found else None
    return (operands, found[1]) if operands and found else None


def _propose_expert_clamped(node: Tensor, users: Users) -> Proposal | None:
    operands = _expert_pair(*node.src)
    attrs = {**node.attrs, "dtypes": quantised_dtypes(node, users)}
    return (operands, attrs) if operands else None


def _expert_sample(
    rows: int, format: tuple[DType, ...], bias: tuple[bool, bool], dtypes: tuple[str, ...],
    **attrs: Any,
) -> Sample:  # fmt: skip
    weights = (Arg((5, 256, 256), kind, leaf="weight", make=unit_rows) for kind in format[1:])
    ids = Arg(("T", 2), I32, make=lambda rng, shape: rng.integers(0, 5, shape))
    biases = (Arg((5, 256), leaf="weight") if b else None for b in bias)
    args = (act_arg(256, format[0]), *weights, ids, *biases)
    return Sample(args, {**attrs, "dtypes": dtypes}, {"T": rows})


@fused_op(
    "expert_gated",
    anchor="mul",
    propose=_propose_expert_gated,
    tol=TOL,
    samples=grid(
        _expert_sample,
        rows=(0, 1, 7),
        format=((F32, F16, F16), (A8_32, Q8_0, Q8_0), (A8_256, Q4_K, Q4_K), (A8_32, Q8_0, Q5_0),
                (A8_ROW, W8A8, W8A8)),
        bias=((False, False), (True, True), (False, True)),
        dtypes=((), ("a8_32",), ("a8_256",), ("a8_row",)),
        act=("silu",),
        kind=("",),
    ),
)  # fmt: skip
def expert_gated(
    x: Tensor, w: Tensor, w2: Tensor, ids: Tensor, bias: Tensor | None = None,
    bias2: Tensor | None = None, *, act: str, kind: str, dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """`glu` of two expert_linears of x [T, K], with w and w2 [E, N, K], ids [T, k], biases [E, N].

    -> [T, k, N], or quantised to dtypes.
    """
    linear = get("expert_linear")
    gate, up = linear(x, w, ids, bias), linear(x, w2, ids, bias2)
    return get("glu")(gate, up, act=act, kind=kind, dtypes=dtypes)


@fused_op(
    "expert_clamped",
    anchor="clamped_glu",
    propose=_propose_expert_clamped,
    tol=TOL,
    samples=grid(
        _expert_sample,
        rows=(0, 1, 7),
        format=((F32, F16, F16), (A8_32, MXFP4, MXFP4)),
        bias=((False, False), (True, True)),
        dtypes=((), ("a8_32",)),
        alpha=(1.702,),
        limit=(0.5,),
    ),
)
def expert_clamped(
    x: Tensor, w: Tensor, w2: Tensor, ids: Tensor, bias: Tensor | None = None,
    bias2: Tensor | None = None, *, alpha: float, limit: float, dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """`clamped_glu` of two expert_linears; operands and result as for `expert_gated`."""
    linear = get("expert_linear")
    gate, up = linear(x, w, ids, bias), linear(x, w2, ids, bias2)
    return quantise_to(get("clamped_glu")(gate, up, alpha=alpha, limit=limit), dtypes)


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


def _summed_sample(
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
    tol=LINEAR_TOL,
    samples=Samples(lambda: [
        *grid(_summed_sample, shape=((5, 67, 256), (9, 256, 768)), kind=COMMON_32, x=(F32, A8_32),
              k=(2, 4, 7, 8), bias=(False, True)),
        *grid(_summed_sample, shape=((5, 67, 256), (9, 256, 768)), kind=COMMON_256,
              x=(F32, A8_256), k=(2, 8), bias=(False, True)),
        *(sample for x, kind in pairs(*RARE_32, *RARE_256) for sample in grid(
            _summed_sample, shape=((6, 33, 768),), kind=(kind,), x=(x,), k=(4,), bias=(True,))),
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
