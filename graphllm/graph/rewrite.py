"""Passes over a lazy graph: order, merge, verify, rewrite, print."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from ..debug import debug
from ..errors import GraphError
from .op import get
from .tensor import LEAVES, STATE, Tensor, Var, substitute


def toposort(
    outputs: Iterable[Tensor],
    stop: Collection[Tensor] = (),
    sources: Callable[[Tensor], Sequence[Tensor]] = attrgetter("sources"),
) -> list[Tensor]:
    """Every node that ``outputs`` need, sources before users, in a deterministic order.

    ``stop``: nodes that are left out, with what only they need. ``sources``: what a node
    needs, if not its own sources.
    """
    order: list[Tensor] = []
    seen = set(stop)
    stack = [(node, False) for node in reversed(list(outputs))]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((s, False) for s in reversed(sources(node)) if s not in seen)
    return order


def by_depth(outputs: Iterable[Tensor], first: Callable[[Tensor], bool]) -> list[Tensor]:
    """As `toposort`, ordered by distance from the leaves: what is independent stands together.

    A device then need not wait between, say, the linears that read one activation. ``first``: what
    comes before the others at its distance.
    """
    order = toposort(outputs)
    depth: dict[Tensor, int] = {}
    for node in order:
        below = max((depth[s] for s in node.sources), default=0)
        depth[node] = below if node.is_leaf or node.is_view else below + 1
    return sorted(order, key=lambda node: (depth[node], not first(node)))


class Interner:
    """Keeps one node of each kind (equal op, attributes, sources), with the scopes of all."""

    def __init__(self, nodes: Iterable[Tensor] = ()) -> None:
        self._nodes: dict[tuple, Tensor] = {}
        for node in nodes:
            self(node)

    def find(self, node: Tensor, src: Sequence[Tensor | None]) -> Tensor | None:
        """The kept node that is as ``node`` would be over other sources."""
        return self._nodes.get(_identity(node, src))

    def __call__(self, node: Tensor) -> Tensor:
        known = self._nodes.setdefault(_identity(node, node.src), node)
        if known is not node:
            known.scopes = tuple(dict.fromkeys(known.scopes + node.scopes))
        return known


def _identity(node: Tensor, src: Sequence[Tensor | None]) -> tuple:
    return node.op, tuple(src), tuple(sorted(node.attrs.items()))


def rewrite(
    outputs: Mapping[str, Tensor], rule: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """``outputs`` with ``rule`` applied to every node once, sources first.

    Also returns the new node of each old one.
    """
    new: dict[Tensor, Tensor] = {}
    for node in toposort(outputs.values()):
        src = tuple(None if s is None else new[s] for s in node.src)
        new[node] = rule(substitute(node, src))
    return {name: new[node] for name, node in outputs.items()}, new


def merge(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Equal nodes shared."""
    return rewrite(outputs, Interner())[0]


def narrow(
    outputs: Mapping[str, Tensor], bounds: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[Tensor, Tensor]]:
    """The graph with tighter ranges for its Vars."""

    def rule(node: Tensor) -> Tensor:
        rows = node.meta.rows
        if not isinstance(rows, Var) or rows.name not in bounds:
            return node
        var = Var(rows.name, *bounds[rows.name])
        meta = type(node.meta)(
            (var, *node.meta.inner), node.dtype, node.meta.strides, node.meta.offset
        )
        attrs = {**node.attrs, "shape": meta.shape} if node.is_view else node.attrs
        return Tensor(node.op, node.src, attrs, meta, node.scopes, node.origin)

    return rewrite(outputs, rule)


# ---------------------------------------------------------------------------------------- verify


def root(node: Tensor) -> Tensor:
    """The node that owns the buffer: views look at their base, a writer's result at its state."""
    node = node.base
    while node.op not in LEAVES:
        target = get(node.op).alias(node)
        if target is None:
            return node
        node = target.base
    return node


def verify(outputs: Mapping[str, Tensor]) -> None:
    """GraphError when shapes contradict the ops' rules, leaves disagree, or state is misordered."""
    order = toposort(outputs.values())
    leaves: dict[str, Tensor] = {}
    for node in order:
        if node.is_leaf:
            first = leaves.setdefault(node.name, node)
            if (first.op, first.meta) != (node.op, node.meta):
                raise GraphError(f"two leaves {node.name!r}: {first.meta} and {node.meta}")
        elif not node.is_view:
            _verify_shape(node)
    _verify_state(order)


def _verify_shape(node: Tensor) -> None:
    metas = (s.meta if s is not None else None for s in node.src)
    wanted = get(node.op).infer(*metas, **node.attrs)
    if wanted != node.meta:
        raise GraphError(f"{node.scope}: {node.op} is {node.meta}, its rule says {wanted}")


def _verify_state(order: Sequence[Tensor]) -> None:
    """A version of a state is written once, and whoever reads it runs before the write."""
    users: dict[Tensor, list[Tensor]] = {}
    for node in order:
        for source in node.sources:
            users.setdefault(source, []).append(node)
    for node in order:
        if node.is_leaf or node.is_view:
            continue
        for index in get(node.op).written(node):
            target = node.src[index]
            if target is None or target.is_view or root(target).op != STATE:
                raise GraphError(f"{node.scope}: {node.op} writes something that is not a state")
            others = [u for u in _readers(target, users) if u is not node]
            ancestors = set(toposort([node])) if others else set()
            for other in others:
                if other not in ancestors:
                    raise GraphError(
                        f"{other.scope}: {other.op} reads {root(target).name!r}, which "
                        f"{node.op} overwrites; it must read the written value or come before"
                    )


def _readers(target: Tensor, users: Mapping[Tensor, list[Tensor]]) -> list[Tensor]:
    found = []
    for user in users.get(target, []):
        found.extend(_readers(user, users) if user.is_view else [user])
    return found


# ------------------------------------------------------------------------------------------ print


def dump(outputs: Mapping[str, Tensor]) -> str:
    """The graph as text, a line a node."""
    order = toposort(outputs.values())
    label = {n: f"%{i}" for i, n in enumerate(order)}
    lines = []
    for node in order:
        src = ", ".join("-" if s is None else label[s] for s in node.src)
        attrs = "".join(f" {k}={v}" for k, v in node.attrs.items())
        lines.append(f"{label[node]} = {node.op}({src}){attrs} : {node.meta}  # {node.scope}")
    lines += [f"{name} -> {label[node]}" for name, node in outputs.items()]
    return "\n".join(lines)


def show(stage: str, outputs: Mapping[str, Tensor]) -> None:
    """Print the graph as it is at this stage, on the third rung of GRAPHLLM_DEBUG."""
    debug(3, lambda: f"graph, {stage}:\n{dump(outputs)}")


def dot(outputs: Mapping[str, Tensor]) -> str:
    """The graph in Graphviz' language."""
    order = toposort(outputs.values())
    label = {n: f"n{i}" for i, n in enumerate(order)}
    lines = ["digraph graphllm {", "  node [shape=box, fontname=monospace];"]
    for node in order:
        text = f"{node.name if node.is_leaf else node.op}\\n{node.meta}\\n{node.scope}"
        lines.append(f'  {label[node]} [label="{text}"];')
        lines += [f"  {label[s]} -> {label[node]};" for s in node.sources]
    lines += [f'  "{name}" [shape=oval]; {label[n]} -> "{name}";' for name, n in outputs.items()]
    return "\n".join([*lines, "}"])
