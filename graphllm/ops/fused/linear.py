"""Fused ops around linears: gated units, residuals, several linears of one activation."""

from __future__ import annotations

from typing import Any

from ...formats import A8_32, A8_256
from ...formats.activations import A8_ROW
from ...formats.k_quants import Q4_K
from ...formats.legacy import Q5_0, Q8_0
from ...formats.row_format import W8A8
from ...graph.dtype import F16, F32
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Samples, Users, get, grid
from ...graph.tensor import Tensor
from .common import (
    LAYOUTS,
    TOL,
    act_arg,
    matrix_arg,
    propose_gated,
    propose_glu,
    propose_linear_add,
    quantise_to,
    row_arg,
    weight_arg,
)  # fmt: skip

# --------------------------------------------------------------------------------------------- glu


@fused_op(
    "gated",
    anchor="mul",
    propose=propose_gated,
    grouped=True,
    tol=TOL,
    samples=grid(
        lambda rows, format, bias, dtypes: Sample(
            (
                act_arg(256, format[0]), matrix_arg(256, 256, format[1]),
                weight_arg(256) if bias else None,
                act_arg(256, format[0]), matrix_arg(256, 256, format[2]), None,
            ),
            {"act": "silu", "kind": "", "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        format=((F32, F16, F16), (A8_32, Q8_0, Q5_0), (A8_ROW, W8A8, W8A8)),
        bias=(False, True),
        dtypes=((), ("a8_32",), ("a8_256",), ("a8_row",)),
    ),
)  # fmt: skip
def gated(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *up: Tensor | None, act: str, kind: str,
    dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """`glu` of two linears: x, w, bias of gate, then of up. -> [T, N], or quantised to dtypes."""
    linear = get("linear")
    return get("glu")(linear(x, w, bias), linear(*up), act=act, kind=kind, dtypes=dtypes)


@fused_op(
    "glu",
    anchor="mul",
    propose=propose_glu,
    tol=TOL,
    samples=grid(
        lambda rows, inner, layout, act, dtypes: Sample(
            (Arg(("T", *inner), layout=layout),) * 2,
            {"act": act[0], "kind": act[1], "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        inner=((256,), (2816,), (3, 768)),
        layout=LAYOUTS,
        act=(("silu", ""), ("gelu", "tanh"), ("gelu", "erf")),
        dtypes=((), ("a8_32",), ("a8_256",), ("a8_row",)),
    )
    + grid(
        lambda dtype: Sample(
            (act_arg(256, F32),) * 2, {"act": "silu", "kind": "", "dtypes": (dtype,)}, {"T": 7}
        ),
        dtype=("f8_row", "f8_128"),
    ),
)
def glu(gate: Tensor, up: Tensor, *, act: str, kind: str, dtypes: tuple[str, ...]) -> Any:
    """act(gate) * up, quantised to each of ``dtypes`` if any. [T, ..., D] each. Shazeer 2020.

    ``kind``: attribute of gelu, or empty.
    """
    activated = get(act)(gate, **({"kind": kind} if kind else {}))
    return quantise_to(get("mul")(activated, up), dtypes)


# ----------------------------------------------------------------------------------------- linears


@fused_op(
    "linear_add",
    anchor="add",
    propose=propose_linear_add,
    tol=TOL,
    samples=grid(
        lambda rows, format, bias, layout: Sample(
            (
                act_arg(256, format[0]), matrix_arg(45, 256, format[1]), row_arg(45, layout),
                weight_arg(45) if bias else None,
            ),
            {},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        format=((F32, F16), (A8_32, Q8_0), (A8_256, Q4_K), (A8_ROW, W8A8)),
        bias=(False, True),
        layout=LAYOUTS,
    ),
)  # fmt: skip
def linear_add(x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None = None) -> Any:
    """r + x w^T + bias: a linear with residual. x [T, K], w [N, K], r [T, N] -> [T, N]."""
    return get("add")(r, get("linear")(x, w, bias))


def _propose_linears(node: Tensor, users: Users) -> Proposal | None:
    """Propose all linears of one activation, quantised or not."""
    x = node.src[0]
    assert x is not None
    source = x.src[0] if x.op == "quantise_act" else x
    assert source is not None
    readers = [source, *(u for u in users(source) if u.op == "quantise_act")]
    found = [u for r in readers for u in users(r) if u.op == "linear" and u.src[0] is r]
    return (tuple(s for n in found for s in n.src), {}) if len(found) > 1 else None


_MIXED = ((A8_32, Q8_0), (A8_256, Q4_K), (A8_32, Q5_0))


@fused_op(
    "linears",
    anchor="linear",
    propose=_propose_linears,
    grouped=True,
    tol=TOL,
    samples=Samples(lambda: [
        *grid(
            lambda rows, format, bias: Sample(
                (
                    act_arg(256, format[0]), matrix_arg(45, 256, format[1]),
                    weight_arg(45) if bias else None,
                    act_arg(256, format[0]), matrix_arg(16, 256, format[1]), None,
                ),
                {},
                {"T": rows},
            ),
            rows=(0, 1, 7),
            format=((F32, F16), (A8_32, Q8_0), (A8_ROW, W8A8)),
            bias=(False, True),
        ),
        *grid(
            lambda rows: Sample(
                tuple(
                    arg for x, w in _MIXED
                    for arg in (act_arg(512, x), matrix_arg(33, 512, w), None)
                ),
                {},
                {"T": rows},
            ),
            rows=(0, 1, 7),
        ),
    ]),
)  # fmt: skip
def linears(x: Tensor, w: Tensor, bias: Tensor | None = None, *more: Tensor | None) -> Any:
    """Several linears: x, w, bias of each in order. [T, K], [N, K], [N] -> [T, N] each."""
    operands = (x, w, bias, *more)
    return tuple(get("linear")(*operands[i : i + 3]) for i in range(0, len(operands), 3))
