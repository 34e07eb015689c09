"""Matching of the steps of two profiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

Row = Mapping[str, Any]  # of a profile's JSON
Key = Callable[[Row], Hashable]

# Steps match if all of these are equal; the steps left over are matched by op and scope only.
_KEYS: tuple[Key, ...] = (
    lambda row: (row["op"], row["scope"], row["weight"], row["shape"]),
    lambda row: (row["op"], row["scope"]),
)
LABELS: dict[str, Callable[[Row], str]] = {
    "op": lambda row: f"{row['op']} {row['weight']}".strip(),
    "scope": lambda row: row["scope"] or "-",
    "layer": lambda row: "-" if row["layer"] is None else f"layer {row['layer']}",
    "backend": lambda row: row["backend"],
    "format": lambda row: row["weight"] or "-",
}


@dataclass(frozen=True)
class MatchedSteps:
    """Indices of steps of two plans that do the same work.

    Either one step of each plan, or all steps between two such pairs, for instance because they are
    fused on one side. A side is empty if the other does additional work.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    same: bool  # the same step on both sides


def match_steps(a: Sequence[Row], b: Sequence[Row]) -> list[MatchedSteps]:
    """Match all steps of two plans, in execution order."""
    return list(_match_ranges(a, b, range(len(a)), range(len(b)), _KEYS))


def _match_ranges(
    a: Sequence[Row], b: Sequence[Row], at: range, bt: range, keys: Sequence[Key]
) -> Iterator[MatchedSteps]:
    if not keys or not at or not bt:
        if at or bt:
            yield MatchedSteps(tuple(at), tuple(bt), False)
        return
    left, right = [keys[0](a[i]) for i in at], [keys[0](b[i]) for i in bt]
    # The last block is an empty one at the ends.
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
    i = j = 0
    for block in blocks:
        yield from _match_ranges(a, b, at[i : block.a], bt[j : block.b], keys[1:])
        i, j = block.a + block.size, block.b + block.size
        yield from (
            MatchedSteps((x,), (y,), True) for x, y in zip(at[block.a : i], bt[block.b : j])
        )


def label(matched: MatchedSteps, a: Sequence[Row], b: Sequence[Row], by: str) -> str:
    """Return the label of matched steps in a report.

    Args:
        matched: the steps.
        a: rows of the first profile.
        b: rows of the second profile.
        by: a key of `LABELS`.
    """
    name = LABELS[by]
    sides = [
        _listed(name(rows[i]) for i in indices)
        for rows, indices in ((a, matched.a), (b, matched.b))
        if indices
    ]
    return " -> ".join(dict.fromkeys(sides))


def _listed(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return " + ".join(known) if len(known) <= 2 else f"{known[0]} .. {known[-1]}"
