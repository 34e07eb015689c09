"""Hidden states: after the embedding, after every layer, and the logits, each by itself.

Every value is replaced by the oracle's on the way, so that what a layer does wrong shows in that
layer and in no other; and once more without, which is how far rounding has gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..engine.trace import Tracer
from ..errors import ModelFileError
from .case import Case
from .divergence import locate_divergence
from .report import FAILED, PASSED, Check
from .subgraphs import LOGITS, Subgraph, Substitution, nearest_deviation, split_graph

# Mean square error as a share of the mean square: float32 reaches 1e-13 to 1e-11 a layer, halves,
# as the CUDA kernels multiply them, 1e-6 to 1e-5.
EXACT, HALVES = 1e-9, 1e-4


def hidden_states(case: Case) -> Check:
    """The check ``layers``."""
    found = split_graph(case.llm, case.layers, case.record)
    _check_numbers(case, found)
    limit = EXACT if case.exact else HALVES
    rows = _rows(case, found)
    bad = [subgraph for subgraph, row in zip(found, rows) if not row["alone"] <= limit]
    notes = _untested_windows(case)
    if not bad:
        worst = max(row["alone"] for row in rows)
        text = f"{len(found)} values, NMSE at most {worst:.0e} each alone"
        text += f", {max(row['chain'] for row in rows):.0e} in their chain (allowed: {limit:.0e})"
        return Check("layers", PASSED, "; ".join([text, *notes]), rows=tuple(rows))
    parting = locate_divergence(case, bad[0], limit)
    others = f"{len(bad)} of {len(found)} values differ, each computed from the oracle's: "
    names = [subgraph.name for subgraph in bad]
    others += ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    return Check("layers", FAILED, parting.summary, (*parting.lines, others, *notes), tuple(rows))


def _check_numbers(case: Case, found: list[Subgraph]) -> None:
    """ModelFileError where the oracle itself computes no numbers, with which all would agree."""
    for subgraph in found:
        if not np.isfinite(subgraph.want).all():
            assert case.oracle is not None
            text = f"{case.oracle.name} computes NaN or infinity there: the weights are damaged"
            raise ModelFileError(f"{subgraph.name}: {text}")


def _rows(case: Case, found: list[Subgraph]) -> list[dict[str, Any]]:
    """NMSE of each value, from the oracle's before it and from our own."""
    engine = case.llm.engine
    nodes = {subgraph.name: subgraph.result for subgraph in found}
    swaps = {
        subgraph.name: Substitution(subgraph.want) for subgraph in found if subgraph.name != LOGITS
    }
    tracer = Tracer(engine, nodes)
    alone = tracer.trace(case.ids, LOGITS, swaps)
    alone |= {name: swap.value for name, swap in swaps.items()}
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
    """What so few tokens do not show."""
    windows = {layer.window for layer in case.llm.decoder.cfg.layers}
    wide = sorted(w for w in windows if w >= len(case.ids))
    if not wide:
        return []
    return [f"a window of {wide[0]} tokens is not tried by {len(case.ids)} (--tokens)"]
