"""Fused ops of a linear with residual, the RMS norm of its result, and the linears after that.

They have kernels for one token, whose norm needs no launch of its own.
"""

from __future__ import annotations

from typing import Any

from ...formats import A8_32, A8_256
from ...formats.k_quants import Q4_K
from ...formats.legacy import Q4_0, Q5_0, Q8_0
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Users, get, grid
from ...graph.tensor import Tensor
from .common import (
    ACTIVATIONS,
    is_op,
    matrix_arg,
    propose_gated,
    propose_linear_add,
    weight_arg,
)

_GROUP = 5  # operands of a linear: x, w, r, g, bias
_TOL = {"f32": 1e-2}  # where two roundings to int8 differ by a step


def _propose(norm: Tensor, linears: list[Tensor], users: Users) -> Proposal | None:
    """Propose a fused op for ``linears`` of ``norm``, all of one quantised activation."""
    total, g = norm.src
    if not is_op(total, "add"):
        return None
    before = propose_linear_add(total, users)  # type: ignore[arg-type]
    kinds = {x.attrs["dtype"] if x is not norm else "" for x in (n.sources[0] for n in linears)}
    if before is None or len(kinds) != 1 or "" in kinds:
        return None
    (x, w, r, bias), _ = before
    later = (
        s for _, after, more in (n.src for n in linears) for s in (None, after, None, None, more)
    )
    return (x, w, r, g, bias, *later), {"eps": norm.attrs["eps"], "dtype": kinds.pop()}


def _normed(
    x: Tensor, w: Tensor, r: Tensor, g: Tensor, bias: Tensor | None, eps: float, dtype: str
) -> tuple[Tensor, Tensor]:
    """The sum, and its norm in ``dtype``."""
    h = get("add")(r, get("linear")(x, w, bias))
    return h, get("quantise_act")(get("rms_norm")(h, g, eps=eps), dtype=dtype)


def _linears(x: Tensor, operands: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Linears of x, whose weights and biases are in groups of operands."""
    groups = range(0, len(operands), _GROUP)
    return [get("linear")(x, operands[i + 1], operands[i + 4]) for i in groups]


_FORMATS = (  # x, the first weight, weights after the norm
    (A8_32, Q4_0, Q4_0),
    (A8_32, Q8_0, Q5_0),
    (A8_256, Q4_K, Q8_0),
)


def _args(format: tuple[Any, ...], bias: bool, *rows: int) -> tuple[Arg | None, ...]:
    """Operands for a norm of 256 elements, and linears of it with so many rows.

    Of the linears after the norm only the first has a bias.
    """
    (act, kind, after), width = format, 256
    first = (Arg((1, width), act), matrix_arg(width, width, kind), Arg((1, width)),
             weight_arg(width), weight_arg(width) if bias else None)  # fmt: skip
    return first + tuple(
        arg for i, n in enumerate(rows)
        for arg in (None, matrix_arg(n, width, after), None, None,
                    weight_arg(n) if bias and not i else None)
    )  # fmt: skip


def _propose_gated(node: Tensor, users: Users) -> Proposal | None:
    found = propose_gated(node, users)
    if found is None:
        return None
    (x, *_), attrs = found
    act, up = node.src
    norm = x.src[0] if is_op(x, "quantise_act") else None  # type: ignore[union-attr]
    if not is_op(norm, "rms_norm"):
        return None
    linears = [act.src[0], up]  # type: ignore[union-attr]
    own = _propose(norm, linears, users)  # type: ignore[arg-type]
    return own and (own[0], {**own[1], **attrs})


@fused_op(
    "linear_add_norm_gated",
    anchor="mul",
    propose=_propose_gated,
    grouped=True,
    tol=_TOL,
    samples=grid(
        lambda format, bias, dtypes: Sample(
            _args(format, bias, 256, 256),
            {"act": "silu", "kind": "", "dtypes": dtypes, "eps": 1e-5, "dtype": "a8_32"},
        ),
        format=_FORMATS,
        bias=(False, True),
        dtypes=((), ("a8_32",), ("a8_32", "a8_256")),
    ),
)
def linear_add_norm_gated(
    x: Tensor, w: Tensor, r: Tensor, g: Tensor, bias: Tensor | None = None,
    *later: Tensor | None, eps: float, dtype: str, act: str, kind: str, dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """`linear_add`, and the gated unit of its norm with weight g, quantised to ``dtype``.

    x, w, r, g, bias of the first linear; w and bias of gate and up in operands of the same names.
    -> the sum, and the results of `gated`.
    """
    h, norm = _normed(x, w, r, g, bias, eps, dtype)
    gate, up = _linears(norm, later)
    made = get("glu")(gate, up, act=act, kind=kind, dtypes=dtypes)
    return (h, *(made if isinstance(made, tuple) else (made,)))


def _propose_linears(node: Tensor, users: Users) -> Proposal | None:
    """Propose all linears of a norm, which is not that of a gated unit."""
    readers = [u for u in users(node) if u.op == "quantise_act"]
    found = [u for r in readers for u in users(r) if u.op == "linear" and u.src[0] is r]
    gated = any(u.op in ACTIVATIONS for linear in found for u in users(linear))
    return None if gated or not found else _propose(node, found, users)


@fused_op(
    "linear_add_norm_linears",
    anchor="rms_norm",
    propose=_propose_linears,
    grouped=True,
    tol=_TOL,
    samples=grid(
        lambda format, bias, rows: Sample(
            _args(format, bias, *rows), {"eps": 1e-5, "dtype": "a8_32"}
        ),
        format=_FORMATS,
        bias=(False, True),
        rows=((64,), (45, 33, 16, 8)),
    ),
)
def linear_add_norm_linears(
    x: Tensor, w: Tensor, r: Tensor, g: Tensor, bias: Tensor | None = None,
    *later: Tensor | None, eps: float, dtype: str,
) -> Any:  # fmt: skip
    """`linear_add`, and linears of its norm with weight g, quantised to ``dtype``.

    Operands as of `linear_add_norm_gated`. -> the sum, and the result of each linear.
    """
    h, norm = _normed(x, w, r, g, bias, eps, dtype)
    return (h, *_linears(norm, later))
