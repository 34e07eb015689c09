"""Ops that do the work of several, in the order in which they are tried: see `graphllm.ops.Fusion`.

Those around attention are in `fused_attention`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...formats import A8_32, A8_256, MXFP4, Q4_K, Q5_0, Q8_0
from ...graph.dtype import F16, F32, I32
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Users, get, grid
from ...graph.tensor import Tensor

_LAYOUTS = ("contiguous", "strided")
_TOL = {"f32": 2e-5}


def is_op(node: Tensor | None, op: str) -> bool:
    """Whether there is a node and it is of that op."""
    return node is not None and node.op == op


def _quantised(node: Tensor, users: Users) -> tuple[str, ...]:
    """The dtypes to which all users of ``node`` quantise it; none if one of them reads it as is."""
    kinds = [u.attrs["dtype"] for u in users(node) if u.op == "quantise_act"]
    return tuple(kinds) if len(kinds) == len(users(node)) else ()


def _finished(y: Tensor, dtypes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """``y``, or what it is quantised to."""
    return tuple(get("quantise_act")(y, dtype=d) for d in dtypes) or (y,)


def _rows(width: int, layout: str = "contiguous") -> Arg:
    return Arg(("T", width), layout=layout)


def _weight(width: int) -> Arg:
    return Arg((width,), leaf="weight")


# ------------------------------------------------------------------------------------------- norms


def _propose_norm_add_norm(node: Tensor, users: Users) -> Proposal | None:
    total, w2 = node.src
    if not is_op(total, "add") or len(total.shape) != 2:  # type: ignore[union-attr]
        return None
    x, inner = total.src  # type: ignore[union-attr]
    if not is_op(inner, "rms_norm"):
        return None
    h, w = inner.src  # type: ignore[union-attr]
    eps, eps2 = inner.attrs["eps"], node.attrs["eps"]  # type: ignore[union-attr]
    return (h, w, x, w2), {"eps": eps, "eps2": eps2, "dtypes": _quantised(node, users)}


@fused_op(
    "norm_add_norm",
    anchor="rms_norm",
    propose=_propose_norm_add_norm,
    tol=_TOL,
    samples=grid(
        lambda rows, width, layout, dtypes: Sample(
            (_rows(width, layout), _weight(width), _rows(width, layout), _weight(width)),
            {"eps": 1e-6, "eps2": 1e-5, "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=_LAYOUTS,
        dtypes=((), ("a8_32",), ("a8_256",), ("a8_32", "a8_256")),
    ),
)
def norm_add_norm(h, w, x, w2, *, eps, eps2, dtypes):
    """x + norm(h), and the norm of that, as it is or quantised to each of ``dtypes``: the end of
    one half of a layer with sandwich norms, and the beginning of the next. All [T, D]."""
    x = get("add")(x, get("rms_norm")(h, w, eps=eps))
    return (x, *_finished(get("rms_norm")(x, w2, eps=eps2), dtypes))


def _propose_norm_add(node: Tensor, users: Users) -> Proposal | None:
    x, inner = node.src
    if not is_op(inner, "rms_norm") or len(node.shape) != 2:
        return None
    return (*inner.src, x), {"eps": inner.attrs["eps"]}  # type: ignore[union-attr]


@fused_op(
    "norm_add",
    anchor="add",
    propose=_propose_norm_add,
    tol=_TOL,
    samples=grid(
        lambda rows, width, layout: Sample(
            (_rows(width, layout), _weight(width), _rows(width, layout)), {"eps": 1e-6}, {"T": rows}
        ),
        rows=(0, 1, 7),
        width=(1, 63, 640),
        layout=_LAYOUTS,
    ),
)
def norm_add(h, w, x, *, eps):
    """x + norm(h). h, x [T, D], w [D] -> [T, D]."""
    return get("add")(x, get("rms_norm")(h, w, eps=eps))


def _propose_norm_quantise(node: Tensor, users: Users) -> Proposal | None:
    dtypes = _quantised(node, users)
    if not dtypes or len(node.shape) != 2:
        return None
    return node.src, {"eps": node.attrs["eps"], "dtypes": dtypes}


@fused_op(
    "norm_quantise",
    anchor="rms_norm",
    propose=_propose_norm_quantise,
    tol=_TOL,
    samples=grid(
        lambda rows, width, layout, dtypes: Sample(
            (_rows(width, layout), _weight(width)), {"eps": 1e-6, "dtypes": dtypes}, {"T": rows}
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=_LAYOUTS,
        dtypes=(("a8_32",), ("a8_256",), ("a8_256", "a8_32")),
    ),
)
def norm_quantise(x, w, *, eps, dtypes):
    """The norm of x, quantised to each of ``dtypes``. x [T, D], w [D] -> [T, D] each."""
    return _finished(get("rms_norm")(x, w, eps=eps), dtypes)


# --------------------------------------------------------------------------------------------- glu


def _unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) / np.sqrt(shape[-1])


def _matrix(n: int, k: int, kind: Any) -> Arg:
    return Arg((n, k), kind, leaf="weight", make=_unit)


def _act(k: int, kind: Any) -> Arg:
    return Arg(("T", k), kind)


_ACTIVATIONS = ("silu", "gelu")


def _propose_glu(node: Tensor, users: Users) -> Proposal | None:
    act, up = node.src
    if act is None or act.op not in _ACTIVATIONS or len(node.shape) < 2:
        return None
    attrs = {"act": act.op, "kind": act.attrs.get("kind", ""), "dtypes": _quantised(node, users)}
    return (act.src[0], up), attrs


def _propose_gated(node: Tensor, users: Users) -> Proposal | None:
    found = _propose_glu(node, users)
    if found is None:
        return None
    (gate, up), attrs = found
    if not (is_op(gate, "linear") and is_op(up, "linear")):
        return None
    return (*gate.src, *up.src), attrs  # type: ignore[union-attr]


@fused_op(
    "gated",
    anchor="mul",
    propose=_propose_gated,
    grouped=True,
    tol=_TOL,
    samples=grid(
        lambda rows, format, bias, dtypes: Sample(
            (
                _act(256, format[0]), _matrix(256, 256, format[1]), _weight(256) if bias else None,
                _act(256, format[0]), _matrix(256, 256, format[2]), None,
            ),
            {"act": "silu", "kind": "", "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        format=((F32, F16, F16), (A8_32, Q8_0, Q5_0)),
        bias=(False, True),
        dtypes=((), ("a8_32",), ("a8_256",)),
    ),
)  # fmt: skip
def gated(x, w, bias=None, *up, act, kind, dtypes):
    """`glu` of two linears: x, w, bias of the gate, then of the other. -> [T, N], or its forms."""
    linear = get("linear")
    return get("glu")(linear(x, w, bias), linear(*up), act=act, kind=kind, dtypes=dtypes)


def _expert_pair(gate: Tensor | None, up: Tensor | None) -> tuple[Tensor | None, ...] | None:
    """The operands of two products of the same rows with their experts, as one op takes them."""
    if not (is_op(gate, "expert_linear") and is_op(up, "expert_linear")):
        return None
    x, w, ids, bias = gate.src  # type: ignore[union-attr]
    _, w2, _, bias2 = up.src  # type: ignore[union-attr]
    return x, w, w2, ids, bias, bias2


def _propose_expert_gated(node: Tensor, users: Users) -> Proposal | None:
    found = _propose_glu(node, users)
    operands = _expert_pair(*found[0]) if found else None
    return (operands, found[1]) if operands and found else None


def _propose_expert_clamped(node: Tensor, users: Users) -> Proposal | None:
    operands = _expert_pair(*node.src)
    attrs = {**node.attrs, "dtypes": _quantised(node, users)}
    return (operands, attrs) if operands else None


def _expert_sample(rows, format, bias, dtypes, **attrs):
    weights = (Arg((5, 256, 256), kind, leaf="weight", make=_unit) for kind in format[1:])
    ids = Arg(("T", 2), I32, make=lambda rng, shape: rng.integers(0, 5, shape))
    biases = (Arg((5, 256), leaf="weight") if b else None for b in bias)
    args = (_act(256, format[0]), *weights, ids, *biases)
    return Sample(args, {**attrs, "dtypes": dtypes}, {"T": rows})


@fused_op(
    "expert_gated",
    anchor="mul",
    propose=_propose_expert_gated,
    tol=_TOL,
    samples=grid(
        _expert_sample,
        rows=(0, 1, 7),
        format=((F32, F16, F16), (A8_32, Q8_0, Q8_0), (A8_256, Q4_K, Q4_K), (A8_32, Q8_0, Q5_0)),
        bias=((False, False), (True, True), (False, True)),
        dtypes=((), ("a8_32",), ("a8_256",)),
        act=("silu",),
        kind=("",),
    ),
)
def expert_gated(x, w, w2, ids, bias=None, bias2=None, *, act, kind, dtypes):
    """`glu` of two expert_linears of x [T, K], with w and w2 [E, N, K], ids [T, k], biases [E, N].
    -> [T, k, N], or its forms."""
    linear = get("expert_linear")
    gate, up = linear(x, w, ids, bias), linear(x, w2, ids, bias2)
    return get("glu")(gate, up, act=act, kind=kind, dtypes=dtypes)


@fused_op(
    "expert_clamped",
    anchor="clamped_glu",
    propose=_propose_expert_clamped,
    tol=_TOL,
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
def expert_clamped(x, w, w2, ids, bias=None, bias2=None, *, alpha, limit, dtypes):
    """`clamped_glu` of two expert_linears, operands and result as of `expert_gated`."""
    linear = get("expert_linear")
    gate, up = linear(x, w, ids, bias), linear(x, w2, ids, bias2)
    return _finished(get("clamped_glu")(gate, up, alpha=alpha, limit=limit), dtypes)


@fused_op(
    "glu",
    anchor="mul",
    propose=_propose_glu,
    tol=_TOL,
    samples=grid(
        lambda rows, inner, layout, act, dtypes: Sample(
            (Arg(("T", *inner), layout=layout),) * 2,
            {"act": act[0], "kind": act[1], "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        inner=((256,), (2816,), (3, 768)),
        layout=_LAYOUTS,
        act=(("silu", ""), ("gelu", "tanh"), ("gelu", "erf")),
        dtypes=((), ("a8_32",), ("a8_256",)),
    ),
)
def glu(gate, up, *, act, kind, dtypes):
    """act(gate) * up, as it is or quantised to each of ``dtypes``. [T, ..., D] each. Shazeer 2020.

    ``kind``: gelu's, or empty.
    """
    activated = get(act)(gate, **({"kind": kind} if kind else {}))
    return _finished(get("mul")(activated, up), dtypes)


# ----------------------------------------------------------------------------------------- linears


def _propose_linear_add(node: Tensor, users: Users) -> Proposal | None:
    x, made = node.src
    if not is_op(made, "linear") or node.src[0].shape != made.shape:  # type: ignore[union-attr]
        return None
    a, w, bias = made.src  # type: ignore[union-attr]
    return (a, w, x, bias), {}


@fused_op(
    "linear_add",
    anchor="add",
    propose=_propose_linear_add,
    tol=_TOL,
    samples=grid(
        lambda rows, format, bias, layout: Sample(
            (
                _act(256, format[0]), _matrix(45, 256, format[1]), _rows(45, layout),
                _weight(45) if bias else None,
            ),
            {},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        format=((F32, F16), (A8_32, Q8_0), (A8_256, Q4_K)),
        bias=(False, True),
        layout=_LAYOUTS,
    ),
)  # fmt: skip
def linear_add(x, w, r, bias=None):
    """r + x w^T + bias: a linear and the residual. x [T, K], w [N, K], r [T, N] -> [T, N]."""
    return get("add")(r, get("linear")(x, w, bias))


def _propose_linears(node: Tensor, users: Users) -> Proposal | None:
    """All linears of one activation, quantised or not."""
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
    tol=_TOL,
    samples=[
        *grid(
            lambda rows, format, bias: Sample(
                (
                    _act(256, format[0]), _matrix(45, 256, format[1]),
                    _weight(45) if bias else None,
                    _act(256, format[0]), _matrix(16, 256, format[1]), None,
                ),
                {},
                {"T": rows},
            ),
            rows=(0, 1, 7),
            format=((F32, F16), (A8_32, Q8_0)),
            bias=(False, True),
        ),
        *grid(
            lambda rows: Sample(
                tuple(a for x, w in _MIXED for a in (_act(512, x), _matrix(33, 512, w), None)),
                {},
                {"T": rows},
            ),
            rows=(0, 1, 7),
        ),
    ],
)  # fmt: skip
def linears(x, w, bias=None, *more):
    """Several linears: x, w, bias of the first, then of the others. [T, K], [N, K], [N] -> [T, N]
    each."""
    operands = (x, w, bias, *more)
    return tuple(get("linear")(*operands[i : i + 3]) for i in range(0, len(operands), 3))
