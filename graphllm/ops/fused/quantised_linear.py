"""Fused ops of linears whose results are quantised, to f16 or bf16 where kernels exist."""

from __future__ import annotations

from typing import Any

from ...graph.dtype import F16
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Users, get, grid
from ...graph.tensor import Tensor
from ..linear import COMMON_32
from .common import (
    ACTIVATIONS,
    LAYOUTS,
    TOL,
    act_arg,
    is_op,
    matrix_arg,
    propose_linear_add,
    weight_arg,
)

_UNITS = (*ACTIVATIONS, "relu")
_MOST = 3  # linears of one step: queries, keys and values


def _propose_linears_quantise(node: Tensor, users: Users) -> Proposal | None:
    """Propose all linears of one activation whose results are quantised to the same dtype."""
    assert node.src[0] is not None
    made, dtype = node.src[0].base, node.attrs["dtype"]
    if made.op != "linear" or made.src[0] is None:
        return None
    ends = []
    for linear in users(made.src[0]):
        views = [linear, *(u for u in users(linear) if u.is_view)]
        ends += [u for v in views for u in users(v)
                 if linear.op == "linear" and linear.src[0] is made.src[0]
                 and (u.op, u.attrs.get("dtype")) == ("quantise_act", dtype)]  # fmt: skip
    ends = [*dict.fromkeys(ends)]
    heads = tuple(end.shape[1] if len(end.shape) == 3 else 0 for end in ends)
    operands = tuple(s for end in ends for s in end.sources[0].base.src)
    return (operands, {"heads": heads, "dtype": dtype}) if 1 < len(ends) <= _MOST else None


@fused_op(
    "linears_quantise",
    anchor="quantise_act",
    propose=_propose_linears_quantise,
    grouped=True,
    tol=TOL,
    samples=grid(
        lambda rows, bias, heads: Sample(
            tuple(
                arg for _ in heads for arg in (
                    act_arg(256, F16), matrix_arg(48, 256, F16), weight_arg(48) if bias else None,
                )
            ),
            {"heads": heads, "dtype": "f16"},
            {"T": rows},
        ),
        rows=(0, 1, 7, 300),
        bias=(False, True),
        heads=((3, 3, 1), (0, 0)),
    ),
)  # fmt: skip
def linears_quantise(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *more: Tensor | None,
    heads: tuple[int, ...], dtype: str,
) -> Any:  # fmt: skip
    """Several linears, quantised: x, w, bias of each in order. -> [T, N], or with heads.

    ``heads``: number of heads of each result [T, heads, N / heads]; 0 for [T, N].
    """
    operands, linear = (x, w, bias, *more), get("linear")
    made = [linear(*operands[i : i + 3]) for i in range(0, len(operands), 3)]
    split = (each.heads(count) if count else each for each, count in zip(made, heads))
    return tuple(get("quantise_act")(each, dtype=dtype) for each in split)


def _propose_linear_add_quantise(node: Tensor, users: Users) -> Proposal | None:
    found = propose_linear_add(node.sources[0], users) if is_op(node.src[0], "add") else None
    return (found[0], {"dtype": node.attrs["dtype"]}) if found else None


@fused_op(
    "linear_add_quantise",
    anchor="quantise_act",
    propose=_propose_linear_add_quantise,
    tol=TOL,
    samples=grid(
        lambda rows, bias, layout: Sample(
            (
                act_arg(256, F16), matrix_arg(48, 256, F16), Arg(("T", 48), F16, layout),
                weight_arg(48) if bias else None,
            ),
            {"dtype": "f16"},
            {"T": rows},
        ),
        rows=(0, 1, 7, 300),
        bias=(False, True),
        layout=LAYOUTS,
    ),
)  # fmt: skip
def linear_add_quantise(
    x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None, *, dtype: str
) -> Any:
    """r + x w^T + bias, quantised. x [T, K], w [N, K], r f16 [T, N] -> [T, N]."""
    return get("quantise_act")(get("add")(r, get("linear")(x, w, bias)), dtype=dtype)


def _propose_linear_quantise(node: Tensor, users: Users) -> Proposal | None:
    assert node.src[0] is not None
    made, act, kind = node.src[0].base, "", ""
    if made.op in _UNITS:
        assert made.src[0] is not None
        act, kind, made = made.op, made.attrs.get("kind", ""), made.src[0].base
    if made.op != "linear":
        return None
    heads = node.shape[1] if len(node.shape) == 3 else 0
    return made.src, {"act": act, "kind": kind, "heads": heads, "dtype": node.attrs["dtype"]}


@fused_op(
    "linear_quantise",
    anchor="quantise_act",
    propose=_propose_linear_quantise,
    tol=TOL,
    samples=[
        *grid(
            lambda rows, bias, act, heads: Sample(
                (act_arg(256, F16), matrix_arg(48, 256, F16), weight_arg(48) if bias else None),
                {"act": act[0], "kind": act[1], "heads": heads, "dtype": "f16"},
                {"T": rows},
            ),
            rows=(0, 1, 7, 300),
            bias=(False, True),
            act=(("", ""), ("relu", ""), ("silu", ""), ("gelu", "tanh"), ("gelu", "erf")),
            heads=(0, 3),
        ),
        Sample(
            (act_arg(256, F16), matrix_arg(45, 256, COMMON_32[0]), weight_arg(45)),
            {"act": "gelu", "kind": "erf", "heads": 0, "dtype": "f16"},
            {"T": 300},
        ),
    ],
)
def linear_quantise(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, act: str, kind: str, heads: int, dtype: str
) -> Any:
    """act(x w^T + bias), quantised. x [T, K], w [N, K], bias [N] -> [T, N], or with heads.

    ``act``: an activation, or empty; ``kind``: attribute of gelu, or empty. ``heads``: number of
    heads of a result [T, heads, N / heads]; 0 for [T, N].
    """
    made = get("linear")(x, w, bias)
    if act:
        made = get(act)(made, **({"kind": kind} if kind else {}))
    return get("quantise_act")(made.heads(heads) if heads else made, dtype=dtype)
