"""Locate the first divergence from the oracle within a layer: module, op and source line.

The layer runs from the oracle's input, with all its values traced. A value is correct if the oracle
has an equal one in that layer, and not suspect if a correct value was computed from it. The first
value that differs from its counterpart names the module; the ops between it and correct values are
the suspects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..engine.trace import Tracer
from ..graph.rewrite import toposort
from ..graph.scopes import relative_origin
from ..graph.tensor import Tensor
from ..ops import get
from .case import Case
from .oracle_record import AttentionRecord, OracleRecord
from .subgraphs import (
    Subgraph,
    Substitution,
    comparable,
    format_attributes,
    is_within,
    module_input,
    nearest_deviation,
)

_ATTENTIONS = ("attention", "packed_attention")
_MAX_NAMED_OPS = 6  # more are summarized in a line
_PASSIVE_MODULES = (
    "Dropout",
    "Identity",
    "ModuleList",
    "RotaryEmbedding",
)  # modules that compute nothing


@dataclass
class NamedValue:
    """A value of the graph that the oracle has, too.

    Attributes:
        node: node of the graph.
        label: description of the value.
        path: path of its module.
        want: values of the oracle.
    """

    node: Tensor
    label: str
    path: str
    want: Sequence[np.ndarray]


@dataclass(frozen=True)
class Divergence:
    """Description of a divergence: one line, and details."""

    summary: str
    lines: tuple[str, ...]


@dataclass
class _Values:
    """Values of one subgraph by node, and which of them are correct."""

    got: dict[Tensor, np.ndarray]
    correct: set[Tensor] = field(default_factory=set)
    upstream: set[Tensor] = field(default_factory=set)  # a correct value was computed from them

    def is_wrong(self, named: NamedValue, limit: float) -> bool:
        """Whether a value differs from the oracle's, and no correct value depends on it."""
        return named.node not in self.upstream and not self.matches(named.node, named.want, limit)

    def matches(self, node: Tensor, wanted: Iterable[np.ndarray], limit: float) -> bool:
        """Whether the value of ``node`` equals one of ``wanted`` up to NMSE ``limit``."""
        found = nearest_deviation(self.got[node], wanted)
        return found is not None and found.nmse <= limit


def locate_divergence(case: Case, subgraph: Subgraph, limit: float) -> Divergence:
    """Find the first wrong value in ``subgraph``, whose result is wrong.

    Args:
        case: the validated model.
        subgraph: a layer, or what is before or after the layers.
        limit: NMSE up to which values are equal.
    """
    assert case.oracle is not None
    others = [path for path in case.layers if path != subgraph.name]
    whole = subgraph.name not in case.layers  # before the first layer or after the last

    def wanted(path: str) -> bool:
        own = path not in case.layers if whole else is_within(path, subgraph.name)
        return own and not any(is_within(path, other) for other in others)

    record = case.oracle.run(case.ids, wanted)
    nodes = [node for node in subgraph.nodes if comparable(node)]
    named_values = [*_modules(case, nodes, record), *_attentions(subgraph.nodes, record)]
    named_values.append(
        NamedValue(subgraph.result, f"result of {subgraph.name}", subgraph.name, [subgraph.want])
    )
    values = _trace_values(case, subgraph, [*nodes, *(named.node for named in named_values)])
    named_values = [
        s for s in named_values if nearest_deviation(values.got[s.node], s.want) is not None
    ]
    _mark_correct(values, nodes, named_values, record, limit)
    order = {node: i for i, node in enumerate(subgraph.nodes)}
    wrong = [s for s in named_values if s.node in order and values.is_wrong(s, limit)]
    if not wrong:
        text = f"{subgraph.name} differs, but none of its values does without fusion"
        return Divergence(text, ("graphllm diff --fused finds the fused op",))
    first = min(wrong, key=lambda named: order[named.node])
    return _describe(subgraph, first, _suspects(first.node, order, values), values, record, case)


def _trace_values(case: Case, subgraph: Subgraph, nodes: Sequence[Tensor]) -> _Values:
    """Trace ``nodes``, starting from the oracle's value before the subgraph."""
    from .subgraphs import split_graph

    traced = {f"value {i}": node for i, node in enumerate(dict.fromkeys(nodes))}
    substitutions = {}
    for cut in split_graph(case.engine, case.layers, case.record):
        if cut.name == subgraph.before:
            traced["before"], substitutions["before"] = cut.result, Substitution(cut.want)
    got = Tracer(case.engine, traced).trace(case.ids, "value *", substitutions)
    return _Values({traced[name]: value for name, value in got.items()})


# ----------------------------------------------------------------------------------- named values


def _modules(case: Case, nodes: Sequence[Tensor], record: OracleRecord) -> list[NamedValue]:
    """Return the inputs and outputs of modules of the same path."""
    found = []
    for path, node in case.engine.scope_values.items():
        if path in record.read:
            read = module_input(nodes, path)
            if read is not None:
                found.append(NamedValue(read, f"input of {path}", path, [record.read[path]]))
        if path in record.returned:
            found.append(NamedValue(node, f"output of {path}", path, [record.returned[path]]))
    return found


def _attentions(nodes: Sequence[Tensor], record: OracleRecord) -> list[NamedValue]:
    """Return the inputs and results of attentions, which are no modules of their own."""
    found = []
    for node in nodes:
        known = record.attended.get(node.scope) if node.op in _ATTENTIONS else None
        if known is None:
            continue
        query, key, value = (_written(source) for source in node.sources[:3])
        found += [
            NamedValue(query, f"query of {node.scope}", node.scope, [known.query]),
            NamedValue(key, f"cached key of {node.scope}", node.scope, [known.key]),
            NamedValue(value, f"cached value of {node.scope}", node.scope, [known.value]),
            NamedValue(node, f"attention result of {node.scope}", node.scope, [known.result]),
        ]
    return [named for named in found if comparable(named.node)]


def _written(source: Tensor) -> Tensor:
    """Return what is written to the KV pool ``source``; other nodes as they are."""
    pool = source.base
    written = get(pool.op).written(pool) if not pool.is_leaf else ()
    return pool.sources[1] if written else source


# --------------------------------------------------------------------------------- correct values


def _mark_correct(
    values: _Values,
    nodes: Sequence[Tensor],
    named_values: Sequence[NamedValue],
    record: OracleRecord,
    limit: float,
) -> None:
    """Mark the values that are correct."""
    arrays = [*record.returned.values(), *record.read.values()]
    for known in record.attended.values():
        arrays += [known.query, known.key, known.value, known.result]
    expected: dict[Tensor, list[np.ndarray]] = {}
    for named in named_values:
        expected.setdefault(named.node, []).extend(named.want)
    for node in dict.fromkeys([*nodes, *(s.node for s in named_values)]):
        if values.matches(node, expected.get(node, arrays), limit):
            values.correct.add(node)
    for known in record.attended.values():
        _mark_correct_scores(values, named_values, known, limit)
    right = [n for n in [*nodes, *(named.node for named in named_values)] if n in values.correct]
    values.upstream.update(s for node in toposort(right) for s in node.sources)


def _mark_correct_scores(
    values: _Values, named_values: Sequence[NamedValue], known: AttentionRecord, limit: float
) -> None:
    """Accept queries and keys whose columns are permuted if their products are correct."""
    query, key = (
        next((s.node for s in named_values if any(w is each for w in s.want)), None)
        for each in (known.query, known.key)
    )
    if query is None or key is None:
        return
    ours = [values.got[node].astype(np.float64) for node in (query, key)]
    theirs = [known.query.swapaxes(0, 1), known.key.swapaxes(0, 1)]
    if [a.shape for a in ours] != [a.shape for a in theirs]:
        return
    found = nearest_deviation(_scores(*ours), [_scores(*theirs)])
    if found is not None and found.nmse <= limit:
        for node in (query, key):
            values.correct.add(node)
            values.upstream.add(node)  # they need not equal the oracle's


def _scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return scores [T, H, T] of query [T, H, D] and key [T, Hkv, D]."""
    heads = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    return np.einsum("thd,shd->ths", query, heads)


def _suspects(wrong: Tensor, order: dict[Tensor, int], values: _Values) -> list[Tensor]:
    """Return the nodes between correct values and a wrong one, inclusive, in execution order."""
    found, seen, stack = [], set[Tensor](), [wrong]
    while stack:
        node = stack.pop()
        fine = node in values.correct or node in values.upstream
        if node in seen or fine or node not in order:
            continue
        seen.add(node)
        stack.extend(node.sources)
        if comparable(node) and not node.is_view:
            found.append(node)
    return sorted(found, key=lambda node: order[node])


# ------------------------------------------------------------------------------------ description


def _describe(
    subgraph: Subgraph,
    named: NamedValue,
    made: list[Tensor],
    values: _Values,
    record: OracleRecord,
    case: Case,
) -> Divergence:
    ops = list(dict.fromkeys(f"{node.op} at {relative_origin(node.origin)}" for node in made))
    if len(ops) > _MAX_NAMED_OPS:
        ops = [f"{len(ops)} ops, from {ops[0]} to {ops[-1]}"]
    computed_by = f": computed by {', '.join(ops)}" if ops else ""
    missing = "" if ops else ": the ops before it are correct, and an op after them is missing"
    found = nearest_deviation(values.got[named.node], named.want)
    assert found is not None
    at = ",".join(map(str, found.worst))
    worst = f"worst at [{at}]: {found.got:.6g}, expected {found.want:.6g}"
    lines = [f"{named.label}: NMSE {found.nmse:.1e}, {worst}"]
    for node in made:
        lines.append(f"{node.op}({format_attributes(node.attrs)}) in {node.scope}")
        lines += _differing_attributes(node, record)
    lines += _missing_modules(named.path, record, case)
    return Divergence(f"{subgraph.name}: {named.label} differs{computed_by}{missing}", tuple(lines))


_OPTIONS = {"scale": "scaling", "window": "sliding_window", "softcap": "softcap"}


def _differing_attributes(node: Tensor, record: OracleRecord) -> list[str]:
    """Return lines on attributes for which the oracle has another value."""
    pairs = []
    known = record.attended.get(node.scope)
    if node.op in _ATTENTIONS and known is not None:
        pairs = [(ours, known.options.get(theirs)) for ours, theirs in _OPTIONS.items()]
    if "eps" in node.attrs:
        pairs += [("eps", value) for value in record.facts.get(node.scope, {}).values()]
    return [
        f"  {name} = {node.attrs[name]:.6g}; oracle: {value or 0:.6g}"
        for name, value in pairs
        if isinstance(value, (int, float, type(None))) and not _same(node.attrs[name], value)
    ]


def _same(ours: float, theirs: float | None) -> bool:
    return abs(ours - (theirs or 0)) <= 1e-6 * abs(ours)


def _missing_modules(path: str, record: OracleRecord, case: Case) -> list[str]:
    """Return a line on modules near ``path`` that the oracle runs and the model file does not."""
    parent = path.rpartition(".")[0] if path not in case.layers else path
    names = [
        f"{name} ({kind})"
        for name, kind in record.modules.items()
        if (is_within(name, path) or name.rpartition(".")[0] == parent)
        and not kind.endswith(_PASSIVE_MODULES)
        and name not in case.engine.scope_values
    ]
    return [f"modules only in the oracle: {', '.join(names)}"] if names else []
