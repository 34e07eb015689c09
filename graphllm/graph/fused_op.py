"""Fused ops: declaration, decomposition into other ops, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import GraphError
from . import rewrite
from .dtype import dtype
from .op import Cost, Fusion, OpDef, Proposal, Sample, Users, get, register
from .tensor import INPUT, VIEW, Env, Meta, Tensor

_ALIGN = 64  # bytes: alignment of each result within a row


@dataclass(frozen=True)
class Decomposition:
    """The decomposition of a fused node over placeholders for its operands."""

    leaves: tuple[Tensor | None, ...]
    parts: tuple[Tensor, ...]  # in topological order
    nodes: tuple[Tensor, ...]  # those that are no views
    results: tuple[Tensor, ...]
    states: tuple[
        int | None, ...
    ]  # for each result, the index of the state operand that it aliases
    offsets: tuple[int, ...]  # for each result, its byte offset in a row
    row_nbytes: int

    @property
    def packed(self) -> bool:
        """Whether several results share the node's buffer, each in its columns of a row."""
        return sum(s is None for s in self.states) > 1


def decompose(node: Tensor) -> Decomposition:
    """Return the decomposition of the fused ``node``."""
    return decomposition(node.op, node.src, node.attrs)


def decomposition(
    name: str, src: Sequence[Tensor | None], attrs: Mapping[str, Any]
) -> Decomposition:
    """Return the decomposition of the fused op ``name``, the same one for all equal Metas.

    GraphError if the operands ``src`` do not fit together.
    """
    metas = tuple(None if s is None else s.meta for s in src)
    return _decompose(get(name), metas, tuple(sorted(attrs.items())))


@lru_cache(maxsize=4096)
def _decompose(
    op: OpDef, metas: tuple[Meta | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> Decomposition:
    fusion = op.fusion
    assert fusion is not None
    leaves = tuple(
        None if m is None else Tensor(INPUT, (), {"name": f"{i}"}, m, (), "")
        for i, m in enumerate(metas)
    )
    built = fusion.build(*leaves, **dict(attrs))
    results: tuple[Tensor, ...] = built if isinstance(built, tuple) else (built,)
    places = {leaf: i for i, leaf in enumerate(leaves) if leaf is not None}
    states = tuple(places.get(rewrite.root(r)) for r in results)
    offsets, at = [], 0
    for result, state in zip(results, states):
        offsets.append(at)
        if state is None:
            at += -(-result.meta.strides[0] // _ALIGN) * _ALIGN
    parts = tuple(n for n in rewrite.toposort(results) if not n.is_leaf)
    nodes = tuple(n for n in parts if not n.is_view)
    return Decomposition(leaves, parts, nodes, results, states, tuple(offsets), at)


def results(node: Tensor) -> tuple[Tensor, ...]:
    """Return the results of a fused node: views of its buffer and of the states it writes."""
    own = decompose(node)
    found = []
    for result, state, offset in zip(own.results, own.states, own.offsets):
        meta = result.meta
        if state is not None:
            target = node.src[state]
            assert target is not None
            attrs = {"shape": meta.shape, "strides": meta.strides, "offset": 0}
            view = Tensor(VIEW, (target, node), attrs, target.meta, node.scopes, node.origin)
        elif not own.packed:
            view = node
        else:
            strides = (own.row_nbytes, *meta.strides[1:])
            attrs = {
                "shape": meta.shape, "strides": strides, "offset": offset, "dtype": meta.dtype
            }  # fmt: skip
            inside = Meta(meta.shape, meta.dtype, strides, node.meta.offset + offset)
            view = Tensor(VIEW, (node,), attrs, inside, node.scopes, node.origin)
        found.append(view)
    return tuple(found)


def fused_op(
    name: str,
    *,
    anchor: str,
    propose: Callable[[Tensor, Users], Proposal | None],
    tol: Mapping[str, float],
    samples: Sequence[Sample],
    writes: Callable[[int], tuple[int, ...]] | None = None,
    grouped: bool = False,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare a fused op; the decorated function builds its decomposition.

    Args:
        name: name of the op.
        anchor, propose, grouped: see `graphllm.graph.op.Fusion`.
        tol: tolerance by dtype.
        samples: test inputs.
        writes: see `graphllm.graph.op.OpDef`.
    """

    def infer(*metas: Meta | None, **attrs: Any) -> Meta:
        own = _decompose(get(name), metas, tuple(sorted(attrs.items())))
        (first, *_) = (r.meta for r, s in zip(own.results, own.states) if s is None)
        return Meta.of((first.rows, own.row_nbytes), dtype("i8")) if own.packed else first

    def cost(out: Meta, *metas: Meta | None, env: Env, **attrs: Any) -> Cost:
        return _joint_cost(_decompose(get(name), metas, tuple(sorted(attrs.items()))), env)

    def body(*operands: Any, **attrs: Any) -> Any:
        raise GraphError(f"{name} is a fused op and has no NumPy body")

    def declare(build: Callable[..., Any]) -> OpDef:
        return register(
            name, build, infer=infer, cost=cost, tol=dict(tol), samples=samples,
            reference=body, writes=writes, fusion=Fusion(build, anchor, propose, grouped),
        )  # fmt: skip

    return declare


def _joint_cost(own: Decomposition, env: Env) -> Cost:
    """Sum the costs of the parts, without internal traffic and counting shared reads once.

    What a part reads of a state that another one writes is no internal traffic.
    """
    nodes = {part for part in own.nodes if not get(part.op).writes}
    ends = set(map(rewrite.root, own.results))
    total, seen = Cost(0, 0), set()
    for part in own.nodes:
        total += get(part.op).node_cost(part, env)
        inside = 0 if part in ends or get(part.op).writes else part.meta.at(env).nbytes
        for source in part.sources:
            if source.base in nodes or source.base in seen:
                inside += source.meta.at(env).nbytes
            seen.add(source.base)
        total += Cost(0, -inside)
    return total
