"""Fused ops around norms."""

from __future__ import annotations

from typing import Any

from ...graph.dtype import DTYPES, F16, F32
from ...graph.fused_op import fused_op
from ...graph.op import Arg, Proposal, Sample, Users, get, grid
from ...graph.tensor import Tensor
from .common import (
    LAYOUTS,
    TOL,
    is_op,
    quantise_to,
    quantised_dtypes,
    row_arg,
    unit_rows,
    weight_arg,
)


def _propose_norm_add_norm(node: Tensor, users: Users) -> Proposal | None:
    total, w2 = node.src
    if not is_op(total, "add") or len(total.shape) != 2:  # type: ignore[union-attr]
        return None
    x, inner = total.src  # type: ignore[union-attr]
    if not is_op(inner, "rms_norm"):
        return None
    h, w = inner.src  # type: ignore[union-attr]
    eps, eps2 = inner.attrs["eps"], node.attrs["eps"]  # type: ignore[union-attr]
    return (h, w, x, w2), {"eps": eps, "eps2": eps2, "dtypes": quantised_dtypes(node, users)}


@fused_op(
    "norm_add_norm",
    anchor="rms_norm",
    propose=_propose_norm_add_norm,
    tol=TOL,
    samples=grid(
        lambda rows, width, layout, dtypes: Sample(
            (row_arg(width, layout), weight_arg(width), row_arg(width, layout), weight_arg(width)),
            {"eps": 1e-6, "eps2": 1e-5, "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=LAYOUTS,
        dtypes=((), ("a8_32",), ("a8_256",), ("a8_32", "a8_256"), ("a8_row",)),
    ),
)
def norm_add_norm(
    h: Tensor, w: Tensor, x: Tensor, w2: Tensor, *, eps: float, eps2: float,
    dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """x + norm(h), and the norm of the sum, quantised to each of ``dtypes`` if any. All [T, D].

    It ends one half of a layer with sandwich norms and starts the next half.
    """
    x = get("add")(x, get("rms_norm")(h, w, eps=eps))
    return (x, *quantise_to(get("rms_norm")(x, w2, eps=eps2), dtypes))


def _propose_norm_add(node: Tensor, users: Users) -> Proposal | None:
    x, inner = node.src
    if not is_op(inner, "rms_norm") or len(node.shape) != 2:
        return None
    return (*inner.src, x), {"eps": inner.attrs["eps"]}  # type: ignore[union-attr]


@fused_op(
    "norm_add",
    anchor="add",
    propose=_propose_norm_add,
    tol=TOL,
    samples=grid(
        lambda rows, width, layout: Sample(
            (row_arg(width, layout), weight_arg(width), row_arg(width, layout)),
            {"eps": 1e-6},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(1, 63, 640),
        layout=LAYOUTS,
    ),
)
def norm_add(h: Tensor, w: Tensor, x: Tensor, *, eps: float) -> Any:
    """x + norm(h). h, x [T, D], w [D] -> [T, D]."""
    return get("add")(x, get("rms_norm")(h, w, eps=eps))


def _propose_norm_router(node: Tensor, users: Users) -> Proposal | None:
    norm, w, bias = node.src
    if not is_op(norm, "rms_norm"):
        return None
    others = [u for u in users(norm) if u is not node]  # type: ignore[arg-type]
    if any(u.op == "linear" for u in others):  # linears of one activation are fused with each other
        return None
    dtypes = tuple(u.attrs["dtype"] for u in others if u.op == "quantise_act")
    if len(dtypes) < len(others):
        dtypes = ("f32", *dtypes)
    attrs = {"eps": norm.attrs["eps"], "dtypes": dtypes}  # type: ignore[union-attr]
    return ((*norm.src, w, bias), attrs) if dtypes else None  # type: ignore[union-attr]


@fused_op(
    "norm_router",
    anchor="linear",
    propose=_propose_norm_router,
    tol={"f32": 2e-5},
    samples=grid(
        lambda shape, kind, bias, layout, dtypes: Sample(
            (
                Arg((1, shape[1]), layout=layout), weight_arg(shape[1]),
                Arg(shape, DTYPES[kind], leaf="weight", make=unit_rows),
                weight_arg(shape[0]) if bias else None,
            ),
            {"eps": 1e-6, "dtypes": dtypes},
        ),
        shape=((3, 256), (130, 2304)),
        kind=("f32", "f16", "bf16"),
        bias=(False, True),
        layout=("contiguous", "strided"),
        dtypes=(("f32",), ("a8_256",), ("f32", "a8_32")),
    ),
)  # fmt: skip
def norm_router(
    h: Tensor, g: Tensor, w: Tensor, bias: Tensor | None = None, *, eps: float,
    dtypes: tuple[str, ...],
) -> Any:  # fmt: skip
    """The norm before a mixture in each of ``dtypes``, f32 or quantised, and the router's logits.

    h [T, D], g [D], w [E, D], bias [E] -> [T, D] each, [T, E].
    """
    norm = get("rms_norm")(h, g, eps=eps)
    return (*quantise_to(norm, dtypes), get("linear")(norm, w, bias))


def _propose_norm_quantise(node: Tensor, users: Users) -> Proposal | None:
    dtypes = tuple(u.attrs["dtype"] for u in users(node) if u.op == "quantise_act")
    if not dtypes or len(node.shape) != 2:
        return None
    if len(dtypes) < len(users(node)):  # the router of a mixture reads the norm itself
        dtypes = ("f32", *dtypes)
    return node.src, {"eps": node.attrs["eps"], "dtypes": dtypes}


@fused_op(
    "norm_quantise",
    anchor="rms_norm",
    propose=_propose_norm_quantise,
    tol=TOL,
    samples=grid(
        lambda rows, width, layout, dtypes: Sample(
            (row_arg(width, layout), weight_arg(width)),
            {"eps": 1e-6, "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=LAYOUTS,
        dtypes=(
            ("a8_32",), ("a8_256",), ("a8_256", "a8_32"), ("f32", "a8_256"), ("a8_row",),
            ("f8_row",), ("f8_128",), ("f32", "a8_row"),
        ),
    ),
)  # fmt: skip
def norm_quantise(x: Tensor, w: Tensor, *, eps: float, dtypes: tuple[str, ...]) -> Any:
    """The norm of x in each of ``dtypes``, f32 or quantised. x [T, D], w [D] -> [T, D] each."""
    return quantise_to(get("rms_norm")(x, w, eps=eps), dtypes)


@fused_op(
    "layer_norm_quantise",
    anchor="layer_norm",
    propose=_propose_norm_quantise,
    tol=TOL,
    samples=grid(
        lambda rows, width, layout, bias, dtypes, kind: Sample(
            (
                Arg(("T", width), kind, layout), weight_arg(width),
                weight_arg(width) if bias else None,
            ),
            {"eps": 1e-6, "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=LAYOUTS,
        bias=(False, True),
        dtypes=(("f16",), ("f32", "f16"), ("a8_32",), ("f32", "a8_256"), ("a8_row",)),
        kind=(F32, F16),
    ),
)  # fmt: skip
def layer_norm_quantise(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float, dtypes: tuple[str, ...]
) -> Any:
    """The layer norm of x in each of ``dtypes``, f32 or quantised. [T, D], [D], [D] -> [T, D]."""
    return quantise_to(get("layer_norm")(x, w, b, eps=eps), dtypes)


# ---------------------------------------------------------------------------------------- rotated


def _propose_layer_norm_hadamard(node: Tensor, users: Users) -> Proposal | None:
    rotated = next((user for user in users(node) if user.op == "hadamard"), None)
    dtypes = quantised_dtypes(rotated, users) if rotated else ()
    if not dtypes or len(node.shape) != 2:
        return None
    if len(users(node)) > 1:  # a residual connection reads the norm itself
        dtypes = ("f32", *dtypes)
    return node.src, {"eps": node.attrs["eps"], "dtypes": dtypes}


@fused_op(
    "layer_norm_hadamard",
    anchor="layer_norm",
    propose=_propose_layer_norm_hadamard,
    tol=TOL,
    samples=grid(
        lambda rows, width, layout, bias, dtypes: Sample(
            (row_arg(width, layout), weight_arg(width), weight_arg(width) if bias else None),
            {"eps": 1e-6, "dtypes": dtypes},
            {"T": rows},
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=LAYOUTS,
        bias=(False, True),
        dtypes=(("a8_32",), ("f32", "a8_32"), ("f32", "a8_256")),
    ),
)
def layer_norm_hadamard(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float, dtypes: tuple[str, ...]
) -> Any:
    """The layer norm of x, f32 or rotated and quantised, in each of ``dtypes``.

    [T, D], [D], [D] -> [T, D] each. f32, the norm itself, is first if it is a result.
    """
    norm = get("layer_norm")(x, w, b, eps=eps)
    own = ("f32",) if "f32" in dtypes else ()
    rotated = quantise_to(get("hadamard")(norm), dtypes[len(own) :])
    return (norm, *rotated) if own else rotated


def _propose_hadamard_quantise(node: Tensor, users: Users) -> Proposal | None:
    (x,) = node.src
    return (x.src, {"dtype": node.attrs["dtype"]}) if is_op(x, "hadamard") else None  # type: ignore[union-attr]


@fused_op(
    "hadamard_quantise",
    anchor="quantise_act",
    propose=_propose_hadamard_quantise,
    tol={},
    samples=grid(
        lambda rows, width, layout, dtype: Sample(
            (row_arg(width, layout),), {"dtype": dtype}, {"T": rows}
        ),
        rows=(0, 1, 7),
        width=(256, 768),
        layout=LAYOUTS,
        dtype=("a8_32", "a8_256"),
    ),
)
def hadamard_quantise(x: Tensor, *, dtype: str) -> Any:
    """x [T, D], rotated and quantised to ``dtype``: [T, D]."""
    return get("quantise_act")(get("hadamard")(x), dtype=dtype)
