"""A comparison as text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...terminal import escape_control
from .result import WALL, ComparePhase, CompareRow, Comparison, SharedChange

_BOLD, _COLOURS, _PLAIN = "\033[1m", {"slower": "\033[31m", "faster": "\033[32m"}, "\033[0m"
_WIDE = math.log(2)  # half width of an interval that is too wide to print


def lines(found: Comparison, top: int, colour: bool) -> Iterator[str]:
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
