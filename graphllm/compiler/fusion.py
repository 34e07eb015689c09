"""Fusion: replaces groups of nodes by fused ops.

The declaration of a fused op (`graphllm.ops.Fusion`) proposes operands and attributes at a node.
This pass builds the op's decomposition, once for all proposals with equal Metas and attributes, and
looks its nodes up in the graph, from the proposed operands on. The fused op replaces them if the
graph contains exactly these nodes, no other node reads an inner one, and the backend of the nodes
has a kernel. So a rule cannot change the meaning of a graph, and a backend without the kernel runs
the unfused ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from .. import ops
from ..errors import GraphError
from ..graph.fused_op import decomposition, results
from ..graph.op import OpDef
from ..graph.rewrite import show, toposort
from ..graph.tensor import Meta, Tensor, substitute

ALL = "all"  # in place of names: every rule


class KernelSelector(Protocol):
    """Backend and kernel selection, as the fusion pass needs it."""

    def select_fused(self, node: Tensor, parts: Sequence[Tensor]) -> bool:
        """Assign the fused ``node`` to the backend of ``parts`` if that has a kernel for it.

        Returns False if the parts are on several backends, or there is no kernel.
        """

    def can_read(self, user: Tensor, index: int, meta: Meta) -> bool:
        """Return whether the kernel of ``user`` can read operand ``index`` with layout ``meta``."""


def rules() -> dict[str, OpDef]:
    """Return all fused ops by name, in the order of declaration, which is that of application."""
    return {name: op for name, op in ops.registry().items() if op.fusion}


def check_names(names: Iterable[str]) -> None:
    """Raise GraphError if a name is not a rule."""
    for name in names:
        if name != ALL and name not in rules():
            raise GraphError(f"no fusion rule {name!r}; known: {ALL}, {', '.join(rules())}")


def fuse(
    outputs: Mapping[str, Tensor], without: Iterable[str], selector: KernelSelector
) -> dict[str, Tensor]:
    """Apply every rule that is not named in ``without``.

    Args:
        outputs: outputs of a lowered graph by name. Its nodes are changed, except for the leaves.
        without: names of rules to leave out, or `ALL`.
        selector: selects kernels.

    Returns:
        The new outputs.
    """
    off, fuser = set(without), _Fuser(outputs, selector)
    for name, op in rules().items():
        if not off & {name, ALL} and fuser.run(op):
            show(f"{name} fused", fuser.outputs)
    return fuser.outputs


class _Fuser:
    """Applies rules one after another, each wherever it matches.

    Nodes are replaced in place, so that a rule costs what its matches cost, and not a copy of the
    graph.
    """

    def __init__(self, outputs: Mapping[str, Tensor], selector: KernelSelector) -> None:
        self.outputs, self.selector = dict(outputs), selector
        self._of_op: dict[str, list[Tensor]] = {}  # also nodes that are no longer in the graph
        self._users: dict[Tensor, list[Tensor]] = {}
        self._position: dict[Tensor, int] = {}  # at least that of the sources
        for position, node in enumerate(toposort(outputs.values())):
            self._add(node, position)

    def _add(self, node: Tensor, position: int) -> None:
        self._position[node] = position
        self._of_op.setdefault(node.op, []).append(node)
        for source in node.sources:
            self._users.setdefault(source, []).append(node)

    def users(self, node: Tensor) -> list[Tensor]:
        return self._users.get(node, [])

    def run(self, op: OpDef) -> bool:
        """Put ``op`` in place of its decomposition. Returns whether there was one."""
        assert op.fusion is not None
        found = False
        for node in [*self._of_op.get(op.fusion.anchor, ())]:
            if node in self._position:  # else an earlier match has replaced it
                proposal = op.fusion.propose(node, self.users)
                if proposal and self._apply(op, *proposal):
                    found = True
        return found

    # -- matching
    def _apply(self, op: OpDef, src: tuple[Tensor | None, ...], attrs: dict[str, object]) -> bool:
        """Apply a proposal. Returns False if it cannot be applied."""
        found = self._look_up(op, src, attrs)
        if found is None:
            return False
        parts, ends = found
        own, inner = set(parts), set(parts) - set(ends)
        if not inner.isdisjoint(self.outputs.values()):
            return False
        if any(u not in own for p in inner for u in self.users(p)):
            return False
        if self._depends(src, own):
            return False
        node = op.node(*src, **attrs)
        node.scopes = tuple(dict.fromkeys(s for p in parts for s in p.scopes))
        node.origin = parts[-1].origin
        new = dict(zip(ends, results(node)))
        if not all(self._readable(old, made, own) for old, made in new.items()):
            return False
        if not self.selector.select_fused(node, [p for p in parts if not p.is_view]):
            return False
        self._replace(own, node, new)
        return True

    def _look_up(
        self, op: OpDef, src: tuple[Tensor | None, ...], attrs: dict[str, object]
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        """Find the op's decomposition in the graph; return all its nodes, and the results."""
        try:
            own = decomposition(op.name, src, attrs)
        except GraphError:  # the proposed operands do not fit together
            return None
        found = {leaf: s for leaf, s in zip(own.leaves, src) if leaf and s}
        for node in own.parts:
            over = tuple(s and found[s] for s in node.src)
            near = (u for s in over[:1] if s for u in self.users(s))  # users of the first operand
            same = (u for u in near if (u.op, u.src, u.attrs) == (node.op, over, node.attrs))
            known = next(same, None)
            if known is None:
                return None
            found[node] = known
        parts = dict.fromkeys(found[node] for node in own.parts)
        return list(parts), [found[r] for r in own.results]

    def _depends(self, src: Sequence[Tensor | None], own: set[Tensor]) -> bool:
        """Return whether an operand depends on a node of ``own``, so that fusing makes a cycle."""
        first = min(self._position[part] for part in own)
        stack, seen = [*src], set()
        while stack:
            node = stack.pop()
            if node in own:
                return True
            if node is not None and node not in seen and self._position[node] >= first:
                seen.add(node)
                stack.extend(node.src)
        return False

    def _readable(self, old: Tensor, new: Tensor, own: set[Tensor]) -> bool:
        """Return whether all users of ``old`` can read ``new``, whose row stride may differ."""
        if new.meta == old.meta:
            return True
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
    def _replace(self, parts: set[Tensor], node: Tensor, new: Mapping[Tensor, Tensor]) -> None:
        """Put the fused ``node`` in place of ``parts``, and its results in place of theirs."""
        last = max(self._position[each] for each in (*parts, *node.sources))
        for part in parts:
            del self._position[part]
        for made in dict.fromkeys((node, *new.values())):
            self._add(made, last)
        for source in node.sources:
            readers = (node if user in parts else user for user in self._users[source])
            self._users[source] = [*dict.fromkeys(readers)]
        for old, made in new.items():
            self._move_users(old, made)
        stack = [*new.values()]
        while stack:
            for user in self.users(stack.pop()):
                if self._position[user] < last:
                    self._position[user] = last
                    stack.append(user)

    def _move_users(self, old: Tensor, new: Tensor) -> None:
        """Let the users of ``old`` read ``new``."""
        self.outputs |= {name: new for name, node in self.outputs.items() if node is old}
        for user in self._users.pop(old, []):
            if user in self._position:
                src = tuple(new if s is old else s for s in user.src)
                if user.is_view and src[0] is new and new.meta != old.meta:
                    moved = rebuild(user, src)
                    self._add(moved, self._position.pop(user))
                    self._move_users(user, moved)
                else:
                    user.src = src
                    self._users.setdefault(new, []).append(user)


def rebuild(node: Tensor, src: tuple[Tensor | None, ...]) -> Tensor:
    """Return ``node`` over new sources, with the strides of a view adapted."""
    if not node.is_view or src == node.src:
        return substitute(node, src)
    old = node.src[0]
    assert old is not None
    moved = _rebased(node, old, src)
    assert moved is not None, "checked when the match was made"
    return moved


def _rebased(view: Tensor, old: Tensor, src: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return ``view`` over a source that differs from ``old`` only in the row stride.

    None if rows of the view are not within rows of the source.
    """
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
    """Return whether row i of the view is within row i of the old source."""
    return view.ndim > 0 and (view.rows, view.strides[0]) == (old.rows, old.strides[0])
