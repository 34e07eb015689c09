"""Placement: chooses a backend for every node, once at load, from kernel support and pins."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..backends import Backend, Kernel, Options
from ..errors import GraphError, PlacementError
from ..graph import rewrite
from ..graph.op import get, role
from ..graph.tensor import STATE, Tensor, replica
from .fusion import rebuild

CALL = "call"  # the role of the op that calls a Python function


@dataclass(frozen=True)
class Choice:
    """The backend of one node, and why each earlier backend in the order cannot run it."""

    backend: Backend
    misses: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.misses)


@dataclass(frozen=True)
class Pin:
    """Nodes whose scope matches ``pattern`` run on ``backend``; ``why`` is the reason to report."""

    pattern: str
    backend: str
    why: str = ""

    def matches(self, node: Tensor) -> bool:
        """Return whether one of the node's scopes matches."""
        return any(matches(scope, self.pattern) for scope in node.scopes)

    def __str__(self) -> str:
        return self.why or f"pinned by {self.pattern}={self.backend}"


def matches(scope: str, pattern: str) -> bool:
    """Return whether a scope matches; ``layers.3.*`` matches ``layers.3`` and all scopes in it."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (scope, f"{scope}."))


def pins_from(places: Mapping[str, str]) -> tuple[Pin, ...]:
    """Return pins from a mapping of scope patterns to names of backends."""
    return tuple(Pin(pattern, backend) for pattern, backend in places.items())


def check_pins(pins: Iterable[Pin], nodes: Sequence[Tensor], backends: Sequence[Backend]) -> None:
    """Raise PlacementError if a pin names an unusable backend or matches no node."""
    usable = [backend.name for backend in backends]
    for pin in pins:
        setting = f"{pin.pattern}={pin.backend}"
        if pin.backend not in usable:
            raise PlacementError(f"{setting}: no such usable backend; usable: {', '.join(usable)}")
        if not any(pin.matches(node) for node in nodes):
            raise PlacementError(f"{setting}: no node of the model matches {pin.pattern!r}")


@dataclass(frozen=True)
class Tap:
    """The value of ``node``, output under ``name``.

    ``call`` (array -> array), if set, replaces the value: in this tap, in later taps of the same
    node, and for all users of the node.
    """

    name: str
    node: Tensor
    call: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Placement:
    """A graph with a backend for every node.

    Attributes:
        outputs: outputs of the graph by name.
        choices: the backend of every node that is no leaf and no view.
        backends: all backends, in order.
        options: execution options.
        memory_of: memory of a backend; backends with the same memory need no copies.
        written: name of a state that an op writes -> its memory, which is that of the writer.
    """

    outputs: dict[str, Tensor]
    choices: dict[Tensor, Choice]
    backends: Sequence[Backend]
    options: Options
    memory_of: Callable[[Backend], str]
    written: Mapping[str, str]

    def part(self, names: Iterable[str]) -> Placement:
        """Return the placement of some of the outputs. GraphError as `rewrite.verify_states`."""
        outputs = {name: self.outputs[name] for name in names}
        rewrite.verify_states(outputs)
        return replace(self, outputs=outputs)

    def tapped(self, taps: Sequence[Tap], moved: Mapping[Tensor, Tensor]) -> Placement:
        """Return a placement whose outputs are inner values of the placed graph.

        Every node keeps its backend.

        Args:
            taps: the values.
            moved: node of the graph -> its placed node, see `place`.

        Raises:
            GraphError: a value cannot be replaced, or as `rewrite.verify`.
        """
        mine: dict[Tensor, list[Tap]] = {}
        for tap in taps:
            mine.setdefault(tap.node, []).append(tap)
        intern, new = rewrite.Interner(), dict[Tensor, Tensor]()
        choices, outputs = dict[Tensor, Choice](), dict[str, Tensor]()
        for node in rewrite.toposort(tap.node for tap in taps):
            placed = moved[node]
            over = tuple(s and new[s] for s in node.src)
            value = intern(placed if node.is_leaf else rebuild(node, over))
            if placed in self.choices:
                choices[value] = self.choices[placed]
            for tap in mine.get(node, ()):
                if tap.call is not None:
                    value = _replaced(value, tap)
                    choices[value] = Choice(self.backends[-1])  # on purpose, so without misses
                outputs[tap.name] = value
            new[node] = value
        rewrite.verify(outputs)
        return replace(self, outputs=outputs, choices=choices)


def _replaced(value: Tensor, tap: Tap) -> Tensor:
    """Return a node that applies the tap's call to ``value``, contiguous."""
    if not value.meta.inner_contiguous:  # views of it could not be rebuilt
        raise GraphError(f"{tap.name}: rows that are not contiguous cannot be replaced")
    node = role(CALL)(value, call=tap.call)
    node.scopes, node.origin = (tap.name,), value.origin
    return node


def choose(
    node: Tensor, backends: Sequence[Backend], options: Options, pins: Sequence[Pin] = ()
) -> Choice:
    """Choose the first backend that can run ``node``, or the backend of the first matching pin.

    Args:
        node: the node.
        backends: candidates in order.
        options: execution options.
        pins: pins in order of priority.

    Raises:
        PlacementError: no candidate can run the node.
    """
    misses: list[tuple[str, str]] = []
    pin = next((pin for pin in pins if pin.matches(node)), None)
    for backend in backends:
        if pin and backend.name != pin.backend:
            misses.append((backend.name, str(pin)))
            continue
        found = backend.select(node, options)
        if isinstance(found, Kernel):
            return Choice(backend, tuple(misses))
        misses.append((backend.name, found))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in misses)
    raise PlacementError(f"{node.scope}: no backend can run {node.op} ({reasons})")


def place(
    outputs: Mapping[str, Tensor],
    backends: Sequence[Backend],
    options: Options,
    memory_of: Callable[[Backend], str],
    pins: Sequence[Pin] = (),
    leaf: Callable[[Tensor], Tensor] = replica,
) -> tuple[Placement, dict[Tensor, Tensor]]:
    """Merge equal nodes of a graph, and choose a backend for every node.

    The placement consists of new nodes, so it does not keep the graph alive. Shapes are verified
    here, states in `Placement.part`, since outputs that never share a plan may write the same one.

    Args:
        outputs: outputs of the graph by name.
        backends: backends in order.
        options: execution options.
        memory_of: memory of a backend.
        pins: pins in order of priority.
        leaf: returns the node that replaces a leaf.

    Returns:
        The placement, and the placed node of each node of the graph.
    """
    intern = rewrite.Interner()

    def own(node: Tensor) -> Tensor:
        if node.is_leaf:
            return intern(leaf(node))
        return intern(node if node.sources else replica(node))

    merged, moved = rewrite.rewrite(outputs, own)
    rewrite.show("as built", outputs)
    rewrite.show("equal nodes merged", merged)
    rewrite.verify_shapes(merged)
    nodes = [n for n in rewrite.toposort(merged.values()) if not n.is_leaf and not n.is_view]
    choices = {node: choose(node, backends, options, pins) for node in nodes}
    for name, users in _users_of_written(nodes).items():
        _keep_together(name, users, choices, backends, options, memory_of, pins)
    written = _written(nodes, lambda node: memory_of(choices[node].backend))
    return Placement(merged, choices, backends, options, memory_of, written), moved


def _written(nodes: Sequence[Tensor], memory_of: Callable[[Tensor], str]) -> dict[str, str]:
    """Return the memory of every state that an op writes. PlacementError if writers disagree."""
    found: dict[str, str] = {}
    for node in nodes:
        for name in _states_written_by(node):
            memory = memory_of(node)
            if found.setdefault(name, memory) != memory:
                raise PlacementError(
                    f"{node.scope}: {node.op} would write {name!r} in {memory}, "
                    f"but another op writes it in {found[name]}"
                )
    return found


def _states_written_by(node: Tensor) -> list[str]:
    targets = [node.src[i] for i in get(node.op).written(node)]
    roots = [rewrite.root(target) for target in targets if target is not None]
    return [own.name for own in roots if own.op == STATE]


# ---------------------------------------------------------------------- states stay in one memory


def _users_of_written(nodes: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Group the writers and readers of each state that is read in the step that writes it.

    States with a common reader form one group, under one of their names.
    """
    linked: dict[str, str] = {}

    def group(name: str) -> str:
        while name in linked:
            name = linked[name]
        return name

    reads = {node: _written_states_read_by(node) for node in nodes}
    for names in reads.values():
        for name in names[1:]:
            if group(name) != group(names[0]):
                linked[group(name)] = group(names[0])
    wanted = {group(name) for names in reads.values() for name in names}
    found: dict[str, list[Tensor]] = {}
    for node in nodes:
        own = {group(name) for name in (*_states_written_by(node), *reads[node])}
        for name in sorted(own & wanted):
            found.setdefault(name, []).append(node)
    return found


def _written_states_read_by(node: Tensor) -> list[str]:
    roots = [rewrite.root(s) for s in node.sources if not s.base.is_leaf]
    return [own.name for own in roots if own.op == STATE]


def _keep_together(
    name: str,
    users: Sequence[Tensor],
    choices: dict[Tensor, Choice],
    backends: Sequence[Backend],
    options: Options,
    memory_of: Callable[[Backend], str],
    pins: Sequence[Pin],
) -> None:
    """Move all users of a state to the first memory in which all of them can run, if there is one.

    Otherwise a state that grows with the context would be copied in every step.
    """
    if len({memory_of(choices[user].backend) for user in users}) == 1:
        return
    for memory in dict.fromkeys(map(memory_of, backends)):
        own = [backend for backend in backends if memory_of(backend) == memory]
        try:
            moved = [choose(user, own, options, pins) for user in users]
        except PlacementError:
            continue
        residents = (u for u in users if memory_of(choices[u].backend) == memory)
        there = next(residents, users[0])
        reason = f"{name!r} stays in one memory with {there.op} of {there.scope}"
        for user, choice in zip(users, moved):
            old = choices[user]
            if memory_of(old.backend) != memory:
                choices[user] = Choice(choice.backend, (*old.misses, (old.backend.name, reason)))
        return
