"""Result of a comparison: rows with verdicts, by phase."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

WALL = "wall time"  # label of the first row of a phase


@dataclass(frozen=True, eq=False)
class CompareRow:
    """One group of steps, or the wall time.

    Attributes:
        label: name of the group.
        a_ns: nanoseconds per token of A, mean over files.
        b_ns: nanoseconds per token of B.
        change: B / A - 1; for groups of steps without the shared change, if that was removed.
        low: lower end of the 95 % confidence interval of ``change``, for this row alone.
        high: upper end of the interval.
        verdict: ``slower`` or ``faster`` (by more than the minimum effect, with 95 % confidence
            over all rows together), ``same`` (the interval is within the minimum effect),
            ``unclear``, ``only in A`` or ``only in B``.
        fails: slower by more than the allowed share, with confidence.
    """

    label: str
    a_ns: float
    b_ns: float
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    verdict: str = "unclear"
    fails: bool = False

    @property
    def changed(self) -> bool:
        """Whether the verdict is slower or faster."""
        return self.verdict in ("slower", "faster")


@dataclass(frozen=True)
class SharedChange:
    """Change that all kinds of ops have in common, with its 95 % confidence interval.

    ``taken_out``: it is small enough to be machine drift and was removed from the rows of steps;
    otherwise all rows are as measured.
    """

    change: float
    low: float
    high: float
    taken_out: bool


@dataclass(frozen=True)
class ComparePhase:
    """Comparison of ``prefill``, ``decode`` or a test of a bench.

    Attributes:
        name: name of the phase.
        tokens: tokens per pass.
        spreads: `Speed.spread` of A and B: over the passes of one file, or over the medians of
            several files.
        shared: change common to all kinds of ops; None with too few kinds.
        hidden: why there are no verdicts, or empty.
        rows: the wall time first, then groups of steps by decreasing time.
    """

    name: str
    tokens: int
    spreads: tuple[float, float]
    shared: SharedChange | None
    hidden: str
    rows: tuple[CompareRow, ...]


@dataclass(frozen=True)
class Comparison:
    """Comparison of A (the baseline) and B.

    Attributes:
        sides: names of A and B.
        files: number of files of each side.
        min_effect: minimum effect of a verdict, as a share.
        fail_above: slowdown that fails the comparison, as a share, or None.
        notes: differences between the settings of A and B.
        phases: the phases that both have.
    """

    sides: tuple[str, str]
    files: int
    min_effect: float
    fail_above: float | None
    notes: tuple[str, ...]
    phases: tuple[ComparePhase, ...]

    @property
    def changed(self) -> list[tuple[str, CompareRow]]:
        """Rows that are slower or faster, with the names of their phases."""
        return [(p.name, row) for p in self.phases for row in p.rows if row.changed]

    @property
    def failed(self) -> bool:
        """Whether a row is slower by more than ``fail_above``, with confidence."""
        return any(row.fails for phase in self.phases for row in phase.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, with null for NaN."""
        found = {"schema": "graphllm.comparison", "version": 2, **asdict(self)}
        for phase in found["phases"]:
            for row in phase["rows"]:
                row |= {k: None for k, v in row.items() if isinstance(v, float) and math.isnan(v)}
        return found

    def table(self, top: int = 0, colour: bool = False) -> str:
        """Return the comparison as text.

        Args:
            top: number of unchanged rows to show in each phase; 0 shows all.
            colour: use ANSI colours.
        """
        from .table import lines

        return "\n".join(lines(self, top, colour))
