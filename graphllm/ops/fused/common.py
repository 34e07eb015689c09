"""What the families of fused ops share: matching of nodes, and operands of samples."""

from __future__ import annotations

from typing import Any

from ...graph.op import Arg, Proposal, Rng, Users, get
from ...graph.tensor import Tensor

ACTIVATIONS = ("silu", "gelu")  # of gated units
LAYOUTS = ("contiguous", "strided")
TOL = {"f32": 2e-5}


def is_op(node: Tensor | None, op: str) -> bool:
    """Return whether ``node`` is a node of that op."""
    return node is not None and node.op == op


def quantised_dtypes(node: Tensor, users: Users) -> tuple[str, ...]:
    """Return the dtypes to which users quantise ``node``; empty if one reads it unquantised."""
    kinds = [u.attrs["dtype"] for u in users(node) if u.op == "quantise_act"]
    return tuple(kinds) if len(kinds) == len(users(node)) else ()


def quantise_to(y: Tensor, dtypes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Return ``y`` in each of ``dtypes``, of which f32 is ``y`` itself; ``y`` if there are none."""
    quantise = get("quantise_act")
    return tuple(y if d == "f32" else quantise(y, dtype=d) for d in dtypes) or (y,)


def row_arg(width: int, layout: str = "contiguous") -> Arg:
    return Arg(("T", width), layout=layout)


def unit_rows(rng: Rng, shape: tuple[int, ...]) -> Any:
    """Return weights that keep the size of their products' results near one."""
    return rng.standard_normal(shape) / shape[-1] ** 0.5


def weight_arg(width: int) -> Arg:
    return Arg((width,), leaf="weight")


def matrix_arg(n: int, k: int, kind: Any) -> Arg:
    return Arg((n, k), kind, leaf="weight", make=unit_rows)


def act_arg(k: int, kind: Any) -> Arg:
    return Arg(("T", k), kind)


# ------------------------------------------------------------------------------------- proposals


def propose_linear_add(node: Tensor, users: Users) -> Proposal | None:
    x, made = node.src
    if not is_op(made, "linear") or node.src[0].shape != made.shape:  # type: ignore[union-attr]
        return None
    a, w, bias = made.src  # type: ignore[union-attr]
    return (a, w, x, bias), {}


def propose_glu(node: Tensor, users: Users) -> Proposal | None:
    act, up = node.src
    if act is None or act.op not in ACTIVATIONS or len(node.shape) < 2:
        return None
    attrs = {
        "act": act.op,
        "kind": act.attrs.get("kind", ""),
        "dtypes": quantised_dtypes(node, users),
    }
    return (act.src[0], up), attrs


def propose_gated(node: Tensor, users: Users) -> Proposal | None:
    found = propose_glu(node, users)
    if found is None:
        return None
    (gate, up), attrs = found
    if not (is_op(gate, "linear") and is_op(up, "linear")):
        return None
    return (*gate.src, *up.src), attrs  # type: ignore[union-attr]
