"""Where within a layer a model parts from its oracle: which module, which op, which line.

The layer is run from the oracle's own input, with every value in it handed out. A value is right if
the oracle has the same one in that layer, and passed over if something right was computed from it.
The first one that differs from its counterpart names the module, and the ops between it and what is
right are those that can have made it so.
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

_MAX_NAMED_OPS = 6  # so many ops are named in a line
_PASSIVE_MODULES = (
    "Dropout",
    "Identity",
    "ModuleList",
    "RotaryEmbedding",
)  # modules that compute nothing


@dataclass
class NamedValue:
    """A value of the graph that the oracle has by name. ``label``: what it is; ``path``: whose."""

    node: Tensor
    label: str
    path: str
    want: Sequence[np.ndarray]


@dataclass(frozen=True)
class Divergence:
    """Where it is, in a line and in more."""

    summary: str
    lines: tuple[str, ...]


@dataclass
class _Values:
    """Values of one region by node, and which of them are right."""

    got: dict[Tensor, np.ndarray]
    correct: set[Tensor] = field(default_factory=set)
    upstream: set[Tensor] = field(default_factory=set)  # something right was computed from them

    def is_wrong(self, spot: NamedValue, limit: float) -> bool:
        """Whether it differs from what the oracle has there, and that matters."""
        return spot.node not in self.upstream and not self.matches(spot.node, spot.want, limit)

    def matches(self, node: Tensor, wanted: Iterable[np.ndarray], limit: float) -> bool:
        found = nearest_deviation(self.got[node], wanted)
        return found is not None and found.nmse <= limit


def locate_divergence(case: Case, subgraph: Subgraph, limit: float) -> Divergence:
    """Where in ``subgraph``, whose result is off, the first wrong value is made."""
    assert case.oracle is not None
    others = [path for path in case.layers if path != subgraph.name]
    whole = subgraph.name not in case.layers  # what is before the layers, or behind them

    def wanted(path: str) -> bool:
        own = path not in case.layers if whole else is_within(path, subgraph.name)
        return own and not any(is_within(path, other) for other in others)

    record = case.oracle.run(case.ids, wanted)
    nodes = [node for node in subgraph.nodes if comparable(node)]
    spots = [*_modules(case, nodes, record), *_attentions(subgraph.nodes, record)]
    spots.append(
        NamedValue(
            subgraph.result, f"the result of {subgraph.name}", subgraph.name, [subgraph.want]
        )
    )
    values = _trace_values(case, subgraph, [*nodes, *(spot.node for spot in spots)])
    spots = [s for s in spots if nearest_deviation(values.got[s.node], s.want) is not None]
    _mark_correct(values, nodes, spots, record, limit)
    order = {node: i for i, node in enumerate(subgraph.nodes)}
    wrong = [s for s in spots if s.node in order and values.is_wrong(s, limit)]
    if not wrong:
        text = f"{subgraph.name} differs, though nothing in it does when its ops are not fused"
        return Divergence(text, ("graphllm diff --fused tells which fused op it is",))
    first = min(wrong, key=lambda spot: order[spot.node])
    return _describe(subgraph, first, _suspects(first.node, order, values), values, record, case)


def _trace_values(case: Case, subgraph: Subgraph, nodes: Sequence[Tensor]) -> _Values:
    """The values of ``nodes``, from the oracle's value before the region."""
    from .subgraphs import split_graph

    named = {f"value {i}": node for i, node in enumerate(dict.fromkeys(nodes))}
    swaps = {}
    for cut in split_graph(case.llm, case.layers, case.record):
        if cut.name == subgraph.before:
            named["before"], swaps["before"] = cut.result, Substitution(cut.want)
    got = Tracer(case.llm.engine, named).trace(case.ids, "value *", swaps)
    return _Values({named[name]: value for name, value in got.items()})


# ------------------------------------------------------------------------- what the oracle has, too


def _modules(case: Case, nodes: Sequence[Tensor], record: OracleRecord) -> list[NamedValue]:
    """What modules of the same path read and return."""
    found = []
    for path, node in case.llm.engine.scope_values.items():
        if path in record.read:
            read = module_input(nodes, path)
            if read is not None:
                found.append(NamedValue(read, f"what {path} reads", path, [record.read[path]]))
        if path in record.returned:
            found.append(NamedValue(node, f"what {path} returns", path, [record.returned[path]]))
    return found


def _attentions(nodes: Sequence[Tensor], record: OracleRecord) -> list[NamedValue]:
    """What an attention reads and gives, which no module stands for."""
    found = []
    for node in nodes:
        known = record.attended.get(node.scope) if node.op == "attention" else None
        if known is None:
            continue
        query, key, value = (_written(source) for source in node.sources[:3])
        found += [
            NamedValue(
                query, f"the query that {node.scope} attends with", node.scope, [known.query]
            ),
            NamedValue(key, f"the key that {node.scope} caches", node.scope, [known.key]),
            NamedValue(value, f"the value that {node.scope} caches", node.scope, [known.value]),
            NamedValue(node, f"what {node.scope} attends to", node.scope, [known.result]),
        ]
    return [spot for spot in found if comparable(spot.node)]


def _written(source: Tensor) -> Tensor:
    """What is written to a pool, if that is one."""
    pool = source.base
    written = get(pool.op).written(pool) if not pool.is_leaf else ()
    return pool.sources[1] if written else source


# ------------------------------------------------------------------------------------ what is right


def _mark_correct(
    values: _Values,
    nodes: Sequence[Tensor],
    spots: Sequence[NamedValue],
    record: OracleRecord,
    limit: float,
) -> None:
    """Mark the values that are right."""
    arrays = [*record.returned.values(), *record.read.values()]
    for known in record.attended.values():
        arrays += [known.query, known.key, known.value, known.result]
    expected: dict[Tensor, list[np.ndarray]] = {}
    for spot in spots:
        expected.setdefault(spot.node, []).extend(spot.want)
    for node in dict.fromkeys([*nodes, *(s.node for s in spots)]):
        if values.matches(node, expected.get(node, arrays), limit):
            values.correct.add(node)
    for known in record.attended.values():
        _mark_correct_scores(values, spots, known, limit)
    right = [n for n in [*nodes, *(spot.node for spot in spots)] if n in values.correct]
    values.upstream.update(s for node in toposort(right) for s in node.sources)


def _mark_correct_scores(
    values: _Values, spots: Sequence[NamedValue], known: AttentionRecord, limit: float
) -> None:
    """Queries and keys whose columns stand in another order are right if their products are."""
    query, key = (
        next((s.node for s in spots if any(w is each for w in s.want)), None)
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
            values.upstream.add(node)  # they need not be the oracle's


def _scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """[T, H, T] of query [T, H, D] and key [T, Hkv, D]."""
    heads = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    return np.einsum("thd,shd->ths", query, heads)


def _suspects(wrong: Tensor, order: dict[Tensor, int], values: _Values) -> list[Tensor]:
    """The nodes between right values and a wrong one, in the order of a run, itself included."""
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


# ---------------------------------------------------------------------------------------- in words


def _describe(
    subgraph: Subgraph,
    spot: NamedValue,
    made: list[Tensor],
    values: _Values,
    record: OracleRecord,
    case: Case,
) -> Divergence:
    ops = list(dict.fromkeys(f"{node.op} at {relative_origin(node.origin)}" for node in made))
    if len(ops) > _MAX_NAMED_OPS:
        ops = [f"{len(ops)} ops, from {ops[0]} to {ops[-1]}"]
    by = f": made by {', '.join(ops)}" if ops else ""
    missing = "" if ops else ": the ops that make it are right, something is not done after them"
    found = nearest_deviation(values.got[spot.node], spot.want)
    assert found is not None
    at = ",".join(map(str, found.worst))
    worst = f"worst at [{at}]: {found.got:.6g}, not {found.want:.6g}"
    lines = [f"{spot.label}: NMSE {found.nmse:.1e}, {worst}"]
    for node in made:
        lines.append(f"{node.op}({format_attributes(node.attrs)}) of {node.scope}")
        lines += _differing_attributes(node, record)
    lines += _missing_modules(spot.path, record, case)
    return Divergence(f"{subgraph.name}: {spot.label} differs{by}{missing}", tuple(lines))


_OPTIONS = {"scale": "scaling", "window": "sliding_window", "softcap": "softcap"}


def _differing_attributes(node: Tensor, record: OracleRecord) -> list[str]:
    """Attributes for which the oracle has another value."""
    pairs = []
    known = record.attended.get(node.scope)
    if node.op == "attention" and known is not None:
        pairs = [(ours, known.options.get(theirs)) for ours, theirs in _OPTIONS.items()]
    if "eps" in node.attrs:
        pairs += [("eps", value) for value in record.facts.get(node.scope, {}).values()]
    return [
        f"  {name} = {node.attrs[name]:.6g}; the oracle's is {value or 0:.6g}"
        for name, value in pairs
        if isinstance(value, (int, float, type(None))) and not _same(node.attrs[name], value)
    ]


def _same(ours: float, theirs: float | None) -> bool:
    return abs(ours - (theirs or 0)) <= 1e-6 * abs(ours)


def _missing_modules(path: str, record: OracleRecord, case: Case) -> list[str]:
    """Modules beside ``path`` that the oracle runs and the model file does not."""
    parent = path.rpartition(".")[0] if path not in case.layers else path
    names = [
        f"{name} ({kind})"
        for name, kind in record.modules.items()
        if (is_within(name, path) or name.rpartition(".")[0] == parent)
        and not kind.endswith(_PASSIVE_MODULES)
        and name not in case.llm.engine.scope_values
    ]
    return [f"modules of the oracle alone: {', '.join(names)}"] if names else []
