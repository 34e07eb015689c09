"""Fused ops in the place of their parts.

A fused op's declaration (`graphllm.ops.Fusion`) proposes operands and attributes at a node. Here
the parts are built from them and looked up in the graph: the op takes their place if the graph has
just these, nobody else reads what stays inside, and the site's backend has a kernel. So a rule
cannot change what a graph means, and a backend without the kernel keeps the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import ops
from ..errors import GraphError
from ..graph.fused_op import results
from ..graph.op import OpDef
from ..graph.rewrite import Interner, show, toposort
from ..graph.tensor import Meta, Tensor, substitute

ALL = "all"  # every rule, where rules are switched off by name


class KernelSelector(Protocol):
    """What the pass asks of whoever knows backends and kernels."""

    def select_fused(self, node: Tensor, parts: Sequence[Tensor]) -> bool:
        """Whether the backend of all ``parts`` has a kernel for the fused ``node``; if so it will
        run there."""

    def can_read(self, user: Tensor, index: int, meta: Meta) -> bool:
        """Whether the kernel of ``user`` can read operand ``index`` as ``meta`` lies in memory."""

    def replace_nodes(self, moved: Mapping[Tensor, Tensor]) -> None:
        """Replace each old node by its new one; an old node that has none is gone."""


def rules() -> dict[str, OpDef]:
    """All fused ops by name, in the order in which they are applied: that of declaration."""
    return {name: op for name, op in ops.registry().items() if op.fusion}


def check_names(names: Iterable[str]) -> None:
    """GraphError for the name of a rule that does not exist."""
    for name in names:
        if name != ALL and name not in rules():
            raise GraphError(f"no fusion rule {name!r}; known: {ALL}, {', '.join(rules())}")


def fuse(
    outputs: Mapping[str, Tensor], without: Iterable[str], selector: KernelSelector
) -> dict[str, Tensor]:
    """``outputs`` after every rule that is not named in ``without``."""
    off = set(without)
    current = dict(outputs)
    for name, op in rules().items():
        if not off & {name, ALL}:
            before, current = current, _Pass(current, selector).run(op)
            if current is not before:
                show(f"{name} fused", current)
    return current


@dataclass(frozen=True)
class _Match:
    node: Tensor  # the fused op over the old graph's operands
    parts: list[Tensor]  # nodes of the old graph, views included
    ends: list[Tensor]  # those that are results


class _Pass:
    """One rule applied wherever it fits."""

    def __init__(self, outputs: dict[str, Tensor], selector: KernelSelector) -> None:
        self.outputs, self.selector = outputs, selector
        self.order = toposort(outputs.values())
        self.place = {n: i for i, n in enumerate(self.order)}
        self.known = Interner(self.order)
        self.kept = set(outputs.values())
        self.owner: dict[Tensor, _Match] = {}  # by part
        self._users: dict[Tensor, list[Tensor]] = {}
        for node in self.order:
            for source in node.sources:
                self._users.setdefault(source, []).append(node)

    def users(self, node: Tensor) -> list[Tensor]:
        return self._users.get(node, [])

    def run(self, op: OpDef) -> dict[str, Tensor]:
        """The outputs with ``op`` in place of its parts."""
        assert op.fusion is not None
        for node in self.order:
            if node.op == op.fusion.anchor and node not in self.owner:
                proposal = op.fusion.propose(node, self.users)
                match = proposal and self._match(op, *proposal)
                if match:
                    self.owner |= dict.fromkeys(match.parts, match)
        return self._replaced() if self.owner else self.outputs

    # -- finding
    def _match(
        self, op: OpDef, src: tuple[Tensor | None, ...], attrs: dict[str, object]
    ) -> _Match | None:
        """The parts in the graph, if they are there and nothing stands against it."""
        found = self._look_up(op, src, attrs)
        if found is None:
            return None
        parts, ends = found
        own, inner = set(parts), set(parts) - set(ends)
        if own & self.owner.keys() or inner & self.kept:
            return None
        if any(u not in own for p in parts if p in inner for u in self.users(p)):
            return None
        if self._depends(src, own):
            return None
        node = op.node(*src, **attrs)
        node.scopes = tuple(dict.fromkeys(s for p in parts for s in p.scopes))
        node.origin = parts[-1].origin
        if not all(self._readable(e, new, own) for e, new in zip(ends, results(node))):
            return None
        real = [p for p in parts if not p.is_view]
        return _Match(node, parts, ends) if self.selector.select_fused(node, real) else None

    def _look_up(
        self, op: OpDef, src: tuple[Tensor | None, ...], attrs: dict[str, object]
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        """The graph's nodes that are what the op is made of: all of them, and the results."""
        assert op.fusion is not None
        try:
            built = op.fusion.build(*src, **attrs)
        except GraphError:  # these operands do not even fit together
            return None
        made = built if isinstance(built, tuple) else (built,)
        found = {s: s for s in src if s is not None}
        given = set(found)
        for node in toposort(made, given):
            known = self.known.find(node, [s and found[s] for s in node.src])
            if known is None:
                return None
            found[node] = known
        parts = dict.fromkeys(n for old, n in found.items() if old not in given)
        return list(parts), [found[r] for r in made]

    def _depends(self, src: Sequence[Tensor | None], own: set[Tensor]) -> bool:
        """Whether an operand needs one of the nodes ``own``: fused, they would need each other."""
        first = min(self.place[part] for part in own)
        stack, seen = [s for s in src if s is not None], set()
        while stack:
            node = stack.pop()
            if node in own:
                return True
            if node not in seen and self._last(node) > first:
                seen.add(node)
                stack.extend(self._sources(node))
        return False

    def _last(self, node: Tensor) -> int:
        """The place of a node in the order, or of the last one that it will be fused with."""
        match = self.owner.get(node)
        return max(self.place[p] for p in match.parts) if match else self.place[node]

    def _sources(self, node: Tensor) -> tuple[Tensor, ...]:
        match = self.owner.get(node)
        return match.node.sources if match else node.sources

    def _readable(self, old: Tensor, new: Tensor, own: set[Tensor]) -> bool:
        """Whether all who read ``old`` can read ``new``, whose rows may lie further apart."""
        for user in self.users(old):
            if user in own:
                continue
            if user.is_view and user.src[0] is old:
                moved = _rebased(user, old, (new, *user.src[1:]))
                if moved is None or not self._readable(user, moved, own):
                    return False
            elif not user.is_view:
                places = (i for i, s in enumerate(user.src) if s is old)
                if not all(self.selector.can_read(user, i, new.meta) for i in places):
                    return False
        return True

    # -- replacing
    def _replaced(self) -> dict[str, Tensor]:
        new: dict[Tensor, Tensor] = {}
        joined: dict[Tensor, Tensor] = {}  # fused nodes, by the node of their match
        for node in toposort(self.outputs.values(), (), self._sources):
            match = self.owner.get(node)
            if match is None:
                new[node] = rebuild(node, tuple(s and new[s] for s in node.src))
            elif match.node not in joined:
                fused = substitute(match.node, tuple(s and new[s] for s in match.node.src))
                joined[match.node] = fused
                new |= dict(zip(match.ends, results(fused)))
        self.selector.replace_nodes(
            {old: n for old, n in new.items() if old not in self.owner} | joined
        )
        return {name: new[node] for name, node in self.outputs.items()}


def rebuild(node: Tensor, src: tuple[Tensor | None, ...]) -> Tensor:
    """``node`` over its sources' successors."""
    if not node.is_view or src == node.src:
        return substitute(node, src)
    old = node.src[0]
    assert old is not None
    moved = _rebased(node, old, src)
    assert moved is not None, "looked at when the match was made"
    return moved


def _rebased(view: Tensor, old: Tensor, src: tuple[Tensor | None, ...]) -> Tensor | None:
    """``view`` over a source that is as ``old``, but for the distance of its rows; None where the
    view is not made of rows."""
    new = src[0]
    assert new is not None
    attrs = view.attrs
    if new.meta.strides != old.meta.strides:
        strides = view.attrs["strides"]
        if not _by_rows(view.meta, old.meta):
            return None
        attrs = {**attrs, "strides": (new.meta.strides[0], *strides[1:])}
    meta = Meta(view.shape, view.dtype, attrs["strides"], new.meta.offset + view.attrs["offset"])
    return Tensor(view.op, src, attrs, meta, view.scopes, view.origin)


def _by_rows(view: Meta, old: Meta) -> bool:
    """Whether row i of the view lies in row i of the old source."""
    return view.ndim > 0 and (view.rows, view.strides[0]) == (old.rows, old.strides[0])
