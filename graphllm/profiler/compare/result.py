"""Result of a comparison: rows with verdicts by phase, and its form as text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...terminal import escape_control

WALL = "wall time"  # label of the first row of a phase
_BOLD, _COLOURS, _PLAIN = "\033[1m", {"slower": "\033[31m", "faster": "\033[32m"}, "\033[0m"
_WIDE = math.log(2)  # half width of an interval that is too wide to print


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
        return "\n".join(_lines(self, top, colour))


# ---------------------------------------------------------------------------------- text


def _lines(found: Comparison, top: int, colour: bool) -> Iterator[str]:
    """Yield the lines of `Comparison.table`."""
    runs = f", {found.files} runs" if found.files > 1 else ""
    yield escape_control(f"A: {found.sides[0]}{runs}")
    yield escape_control(f"B: {found.sides[1]}{runs}")
    yield from map(escape_control, found.notes)
    for phase in found.phases:
        yield ""
        yield from _phase(phase, top, colour)
    yield ""
    yield from _verdict(found, colour)


def _phase(phase: ComparePhase, top: int, colour: bool) -> Iterator[str]:
    wall, *steps = phase.rows
    sides = zip((wall.a_ns, wall.b_ns), phase.spreads)
    a, b = (f"{1e9 / ns:.1f}" + (f" (± {s:.1%})" if s else "") for ns, s in sides)
    head = f"{escape_control(phase.name)}: {phase.tokens} tokens, {a} -> {b} tok/s"
    yield f"{_BOLD}{head}{_PLAIN}" if colour else head
    if phase.hidden:
        yield f"no verdicts: {escape_control(phase.hidden)}"
    if phase.shared is not None:
        yield from _shared(phase.shared, bool(phase.hidden))
    others = [row for row in steps if not row.changed]
    hidden = set(others[top:]) if top else set()
    shown = [wall, *(row for row in steps if row not in hidden)]
    width = max(14, *(len(escape_control(row.label)) for row in shown))
    yield f"{'ms/token':<{width}} {'A':>9} {'B':>9} {'change':>8} {'95 % interval':>17}  verdict"
    for row in shown:
        yield _coloured(f"{escape_control(row.label):<{width}} {_figures(row)}", row, colour)
    if hidden:
        yield f"({len(hidden)} more rows, none of them slower or faster)"


def _shared(shared: SharedChange, hidden: bool) -> Iterator[str]:
    """Yield a line on the shared change, unless it was removed and is below 1 %."""
    if shared.taken_out and abs(shared.change) < 0.01:
        return
    why = "machine drift or a change common to all ops; removed from the rows of steps"
    if not shared.taken_out:
        why = "rows are as measured" if hidden else "more than machine drift; rows are as measured"
    yield f"all ops are {_describe(shared)}: {why}"


def _figures(row: CompareRow) -> str:
    a, b = (f"{ns / 1e6:.4f}" if ns else "-" for ns in (row.a_ns, row.b_ns))
    if math.isnan(row.change):
        return f"{a:>9} {b:>9} {'':>8} {'':>17}  {row.verdict}"
    interval = f"{_percent(row.low)} to {_percent(row.high)}"
    if math.log((1 + row.high) / (1 + row.low)) > 2 * _WIDE:
        interval = "wider than x2"
    return f"{a:>9} {b:>9} {_percent(row.change):>8} {interval:>17}  {row.verdict}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%" if share < 9 else f"x{1 + share:.1f}"


def _describe(found: SharedChange | CompareRow) -> str:
    word = "slower" if found.change > 0 else "faster"
    size = f"{abs(found.change):.1%}" if found.change < 9 else f"{1 + found.change:.1f} times"
    return f"{size} {word} ({_percent(found.low)} to {_percent(found.high)})"


def _coloured(text: str, row: CompareRow, colour: bool) -> str:
    return f"{_COLOURS[row.verdict]}{text}{_PLAIN}" if colour and row.changed else text


def _verdict(found: Comparison, colour: bool) -> Iterator[str]:
    """Yield a line for each row that changed, or one that nothing did."""
    rows = [row for phase in found.phases for row in phase.rows]
    known = sum(row.verdict == "same" for row in rows)
    if not found.changed:
        yield (
            f"no row is slower or faster by more than {100 * found.min_effect:g} % with "
            f"confidence; {known} of {len(rows)} rows are the same within that bound"
        )
    for name, row in found.changed:
        what = escape_control(name if row.label == WALL else f"{name}: {row.label}")
        fails = f", above {100 * found.fail_above:g} %" if found.fail_above and row.fails else ""
        yield _coloured(f"{what} is {_describe(row)}{fails}", row, colour)
