"""Fused ops around linears: gated units, residuals, several linears of one activation."""

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
from .common import (
    LAYOUTS,
    TOL,
    act_arg,
    is_op,
    matrix_arg,
    propose_gated,
    propose_glu,
    propose_linear_add,
    quantise_to,
    quantised_dtypes,
    row_arg,
    unit_rows,
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
