"""The check ``layers``: hidden states after the embedding and every layer, and the logits.

The isolated deviation of a value is computed from the oracle's value before it, so that an error
shows only in the layer that makes it. The cumulative deviation is that of the plain run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine.trace import Tracer
from ..errors import ModelFileError
from .case import Case
from .divergence import locate_divergence
from .report import FAILED, PASSED, Check
from .subgraphs import Subgraph, Substitution, nearest_deviation, split_graph

# Bounds on NMSE. Float32 reaches 1e-13 to 1e-11 per layer; half-precision products, as in the CUDA
# kernels, reach 1e-6 to 1e-5.
EXACT, HALVES = 1e-9, 1e-4


def hidden_states(case: Case) -> Check:
    """Compare the hidden states with the oracle's."""
    found = split_graph(case.engine, case.layers, case.record)
    _check_numbers(case, found)
    limit = EXACT if case.exact else HALVES
    rows = _rows(case, found)
    bad = [subgraph for subgraph, row in zip(found, rows) if not row["alone"] <= limit]
    notes = _untested_windows(case)
    if not bad:
        worst = max(row["alone"] for row in rows)
        text = f"{len(found)} values, NMSE at most {worst:.0e} isolated"
        text += f", {max(row['chain'] for row in rows):.0e} cumulative (allowed: {limit:.0e})"
        return Check("layers", PASSED, "; ".join([text, *notes]), rows=tuple(rows))
    divergence = locate_divergence(case, bad[0], limit)
    others = f"{len(bad)} of {len(found)} values differ if computed from the oracle's inputs: "
    names = [subgraph.name for subgraph in bad]
    others += ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    lines = (*divergence.lines, others, *notes)
    return Check("layers", FAILED, divergence.summary, lines, tuple(rows))


def _check_numbers(case: Case, found: list[Subgraph]) -> None:
    """Raise ModelFileError if the oracle computes NaN or infinity, which would match anything."""
    for subgraph in found:
        if not np.isfinite(subgraph.want).all():
            assert case.oracle is not None
            text = f"{case.oracle.name} computes NaN or infinity there: the weights are damaged"
            raise ModelFileError(f"{subgraph.name}: {text}")


def _rows(case: Case, found: list[Subgraph]) -> list[dict[str, Any]]:
    """Return isolated (``alone``) and cumulative (``chain``) deviation of each value."""
    engine = case.engine
    nodes = {subgraph.name: subgraph.result for subgraph in found}
    substitutions = {subgraph.name: Substitution(subgraph.want) for subgraph in found[:-1]}
    tracer = Tracer(engine, nodes)
    alone = tracer.trace(case.ids, found[-1].name, substitutions)
    alone |= {name: each.value for name, each in substitutions.items()}
    chain = tracer.trace(case.ids, list(nodes))
    rows = []
    for subgraph in found:
        both = [
            nearest_deviation(values[subgraph.name], [subgraph.want]) for values in (alone, chain)
        ]
        assert both[0] is not None and both[1] is not None
        row = {"value": subgraph.name, "alone": both[0].nmse, "alone max": both[0].max}
        rows.append({**row, "chain": both[1].nmse, "chain max": both[1].max})
    return rows


def _untested_windows(case: Case) -> list[str]:
    """Return a note on attention windows that the ids do not exceed."""
    windows = {layer.window for layer in case.config.layers}
    wide = sorted(w for w in windows if w >= len(case.ids))
    if not wide:
        return []
    return [f"the window of {wide[0]} tokens is not exceeded by {len(case.ids)} tokens (--tokens)"]
