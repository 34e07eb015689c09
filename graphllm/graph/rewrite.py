"""Passes over a lazy graph: topological order, merging, verification, rewriting, printing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ..debug import debug, listing
from ..errors import GraphError
from .op import get
from .tensor import LEAVES, STATE, Dim, Meta, Tensor, Var, substitute


def toposort(outputs: Iterable[Tensor], stop: Collection[Tensor] = ()) -> list[Tensor]:
    """Return every node that ``outputs`` need, sources before users, in a deterministic order.

    Args:
        outputs: nodes to start from.
        stop: nodes to leave out, with every node that only they need.
    """
    order: list[Tensor] = []
    seen = set(stop)
    path: list[tuple[Any, Iterator[Tensor]]] = [(None, iter(outputs))]  # a node, its sources left
    while path:
        node, rest = path[-1]
        for source in rest:
            if source not in seen:
                seen.add(source)
                path.append((source, filter(None, source.src)))
                break
        else:
            order.append(node)
            path.pop()
    return order[:-1]


def by_depth(outputs: Iterable[Tensor], first: Callable[[Tensor], bool]) -> list[Tensor]:
    """Return the nodes of `toposort` ordered by depth, so that independent nodes are adjacent.

    A device then need not wait between, for example, the linears of one activation. Nodes for which
    ``first`` is true precede the others of their depth.
    """
    order = toposort(outputs)
    depth: dict[Tensor, int] = {}
    for node in order:
        below = max((depth[s] for s in node.sources), default=0)
        depth[node] = below if node.is_leaf or node.is_view else below + 1
    return sorted(order, key=lambda node: (depth[node], not first(node)))


class Interner:
    """Keeps one of several equal nodes (same op, attributes and sources), with all their scopes."""

    def __init__(self) -> None:
        self._nodes: dict[tuple, Tensor] = {}

    def __call__(self, node: Tensor) -> Tensor:
        identity = node.op, node.src, tuple(sorted(node.attrs.items()))
        known = self._nodes.setdefault(identity, node)
        if known is not node:
            known.scopes = tuple(dict.fromkeys(known.scopes + node.scopes))
        return known


def rewrite(
    outputs: Mapping[str, Tensor], rule: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Apply ``rule`` to every node once, sources first.

    Returns the new outputs, and the new node of each old node.
    """
    new: dict[Tensor, Tensor] = {}
    for node in toposort(outputs.values()):
        src = tuple(None if s is None else new[s] for s in node.src)
        new[node] = rule(substitute(node, src))
    return {name: new[node] for name, node in outputs.items()}, new


def merge(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge equal nodes (common-subexpression elimination)."""
    return rewrite(outputs, Interner())[0]


def narrow(
    outputs: Mapping[str, Tensor], bounds: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """Copy the graph with tighter ranges for its Vars; returns as `rewrite`.

    Only leaves that stay as they are remain the same nodes.
    """

    def rule(node: Tensor) -> Tensor:
        meta, attrs, rows = node.meta, node.attrs, node.meta.rows
        if isinstance(rows, Var) and rows.name in bounds:
            shape: tuple[Dim, ...] = (Var(rows.name, *bounds[rows.name]), *meta.inner)
            meta = Meta(shape, meta.dtype, meta.strides, meta.offset)
            attrs = {**attrs, "shape": shape} if node.is_view else attrs
        elif node.is_leaf:
            return node
        return Tensor(node.op, node.src, attrs, meta, node.scopes, node.origin)

    return rewrite(outputs, rule)


# ---------------------------------------------------------------------------------------- verify


def root(node: Tensor) -> Tensor:
    """Return the owner of the buffer of ``node``: the base of a view, the state of a writer."""
    node = node.base
    while node.op not in LEAVES:
        target = get(node.op).alias(node)
        if target is None:
            return node
        node = target.base
    return node


def verify(outputs: Mapping[str, Tensor]) -> None:
    """Check a graph as `verify_shapes` and `verify_states`."""
    verify_shapes(outputs)
    verify_states(outputs)


def verify_shapes(outputs: Mapping[str, Tensor]) -> None:
    """Raise GraphError if a shape contradicts its op's rule, or two leaves of one name differ."""
    leaves: dict[str, Tensor] = {}
    for node in toposort(outputs.values()):
        if node.is_leaf:
            first = leaves.setdefault(node.name, node)
            if (first.op, first.meta) != (node.op, node.meta):
                raise GraphError(f"two leaves {node.name!r}: {first.meta} and {node.meta}")
        elif not node.is_view:
            metas = (s and s.meta for s in node.src)
            wanted = get(node.op).infer(*metas, **node.attrs)
            if wanted != node.meta:
                rule = f"its shape rule gives {wanted}"
                raise GraphError(f"{node.scope}: {node.op} is {node.meta}, but {rule}")


def verify_states(outputs: Mapping[str, Tensor]) -> None:
    """Raise GraphError if a version of a state is written twice, or may be read after a write."""
    order = toposort(outputs.values())
    overwritten: set[Tensor] = set()
    users: dict[Tensor, list[Tensor]] = {}
    for node in order:
        for source in node.sources:
            users.setdefault(source, []).append(node)
    for node in order:
        written = () if node.is_leaf or node.is_view else get(node.op).written(node)
        readers: dict[Tensor, Tensor] = {}  # other nodes that read a target, and the target
        for target in (node.src[index] for index in written):
            if target is None or target.is_view or root(target).op != STATE:
                raise GraphError(f"{node.scope}: {node.op} writes something that is not a state")
            overwritten.add(target)
            read = [s for i, s in enumerate(node.src) if s and i not in written]
            if any(root(s) is root(target) for s in read):
                raise GraphError(f"{node.scope}: {node.op} reads the state that it writes")
            readers |= {u: target for u in _readers(target, users) if u is not node}
        ancestors = set(toposort([node])) if readers else set()
        for other, target in readers.items():
            if other not in ancestors:
                raise GraphError(
                    f"{other.scope}: {other.op} reads {root(target).name!r}, which "
                    f"{node.op} overwrites; it must read the written value or come before"
                )

    for name, node in outputs.items():
        while node.is_view and len(node.sources) == 1:  # else it is the version of a fused op
            (node,) = node.sources
        if node in overwritten:
            raise GraphError(f"output {name!r} is a state that is overwritten before the run ends")


def _readers(target: Tensor, users: Mapping[Tensor, list[Tensor]]) -> list[Tensor]:
    found = []
    for user in users.get(target, []):
        found.extend(_readers(user, users) if user.is_view else [user])
    return found


# ------------------------------------------------------------------------------------------ print


def show(stage: str, outputs: Mapping[str, Tensor]) -> None:
    """Print the graph after a compiler stage, at level 3 of GRAPHLLM_DEBUG."""
    debug(3, lambda: f"graph, {stage}:\n{listing(toposort(outputs.values()), outputs)}")
