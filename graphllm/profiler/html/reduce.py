"""Reduction of a report for the HTML page: one column per key, without the times of each run.

A column is a list with one value per row; strings are indices into the list ``texts``, which has
each string once. So 100,000 rows take a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import median_low
from typing import Any

# Columns with many distinct values are last, so that the others have small indices.
TEXTS = ("op", "weight", "backend", "kernel", "why", "bound", "origin", "shape", "scope")
NUMBERS = ("plan", "step", "layer", "overlap")


class _Texts:
    """Assigns indices to strings in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        """Return all strings in the order of their indices."""
        return list(self._numbers)


def reduce_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report with its phases in columns; keys as in docs/profile-format.md."""
    texts = _Texts()
    phases = [_phase(phase, texts) for phase in report["phases"]]
    rest = {key: value for key, value in report.items() if key != "phases"}
    return {**rest, "phases": phases, "texts": texts.all()}


def _phase(phase: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    plans: dict[int, list[Mapping[str, Any]]] = {}
    for row in phase["rows"]:
        plans.setdefault(row["plan"], []).append(row)
    own = ("name", "tokens", "passes", "closing", "speed", "overhead", "disturbed")
    return {
        **{key: phase[key] for key in own},
        "rows": _columns(phase["rows"], texts),
        "typical": [_median_run(plan, rows, phase["runs"]) for plan, rows in plans.items()],
        "arena": [_arena(arena, texts) for arena in phase["arena"]],
        "requests": [_request(cost, texts) for cost in phase.get("requests", [])],
    }


def _request(cost: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    ops = [(texts[name], op["ns"]) for name, op in cost["ops"].items()]
    return {**cost, "ops": ops}


def _columns(rows: Sequence[Mapping[str, Any]], texts: _Texts) -> dict[str, list[Any]]:
    times = [row["times"] for row in rows]
    return {
        "parts": [texts[" + ".join(row["parts"])] for row in rows],
        "inputs": [texts[", ".join(row["inputs"])] for row in rows],
        **{key: [texts[row[key]] for row in rows] for key in TEXTS},
        **{key: [row[key] for row in rows] for key in NUMBERS},
        "copy": [int(row["copy"]) for row in rows],
        "bytes": [round(row["bytes"]) for row in rows],
        "flops": [round(row["flops"]) for row in rows],
        "limit": [None if row["limit"] is None else round(row["limit"]) for row in rows],
        "calls": [*map(len, times)],
        "sum": [*map(sum, times)],
        "min": [*map(min, times)],
        "median": [*map(median_low, times)],
        "max": [*map(max, times)],
    }


def _median_run(
    plan: int, rows: Sequence[Mapping[str, Any]], runs: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the run of a plan with the median duration, with the times of its steps."""
    own = [run for run in runs if run["plan"] == plan]
    lengths = []
    for index, run in enumerate(own):
        last = run["segments"][-1]
        steps = rows[last["first"] : last["first"] + last["count"]]
        ended = last["begin"] + sum(row["times"][index] for row in steps)
        lengths.append((max(ended, run["returned"]) - run["called"], index))
    index = median_low(lengths)[1]
    times = [row["times"][index] for row in rows]
    return {**own[index], "index": index, "runs": len(own), "times": times}


def _arena(arena: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    """Return an arena in columns; the name of a buffer is split into op and scope."""
    spans = arena["spans"]
    names = [span["name"].partition(" ") for span in spans]
    numbers = ("offset", "nbytes", "first", "last")
    columns = {key: [span[key] for span in spans] for key in numbers}
    columns["op"] = [texts[op] for op, _, _ in names]
    columns["scope"] = [texts[scope] for _, _, scope in names]
    return {
        **{key: arena[key] for key in ("plan", "memory", "nbytes")},
        **_peak(spans),
        "spans": columns,
    }


def _peak(spans: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the peak of bytes alive at one step, and the first such step."""
    change = [0] * (max((span["last"] for span in spans), default=0) + 2)
    for span in spans:
        change[span["first"]] += span["nbytes"]
        change[span["last"] + 1] -= span["nbytes"]
    alive = list(accumulate(change))
    return {"peak": max(alive), "at": alive.index(max(alive))}
