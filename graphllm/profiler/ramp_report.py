"""Table of the ramps of a phase: when its launches read memory far below the bandwidth."""

from __future__ import annotations

from collections.abc import Iterator

from ..terminal import escape_control
from .phase import Phase
from .ramp_record import PhaseRamps, RampTotal
from .ramps import LEVEL
from .report import bold, dim

_FINE_NS = 100  # a coarser clock is reported


def ramp_table(phase: Phase, by: str, top: int, colour: bool) -> str:
    """Format the ramps of a phase; for the arguments see `Profile.table`."""
    assert phase.ramps is not None
    return "\n".join(_lines(phase.name, phase.ramps, by, top, colour))


def _lines(name: str, ramps: PhaseRamps, by: str, top: int, colour: bool) -> Iterator[str]:
    runs = f"{ramps.runs} run{'s' * (ramps.runs != 1)}"
    heading = f"{name}, ramps: memory below {LEVEL:.0%} of {ramps.bytes_s / 1e9:,.0f} GB/s; {runs}"
    yield bold(heading, colour)
    sums = ramps.totals(by)
    if not sums:
        yield dim("no kernel recorded the times of its thread blocks", colour)
        return
    shown = list(sums)[: top or None]
    rows = {key: sums[key] for key in shown}
    rest = [total for key, total in sums.items() if key not in rows]
    if rest:
        rows[f"{len(rest)} more"] = _sum(rest)
    rows["all"] = _sum(list(sums.values()))
    width = max(len(by), 14, *map(len, rows))
    head = f"{by:<{width}} {'calls':>6} {'ms/run':>8} {'us/call':>8} {'up us':>7} {'down us':>7}"
    yield dim(f"{head} {'below':>6} {'never':>6}", colour)
    for key, total in rows.items():
        line = f"{escape_control(key):<{width}} {_cells(total, ramps.runs)}"
        yield dim(line, colour) if key == "all" else line
    for note in _notes(ramps):
        yield dim(note, colour)


def _cells(total: RampTotal, runs: int) -> str:
    """Format a sum: calls and time of a run; ramps of a call that has them; shares."""
    up, down = (
        f"{ns / total.reached / 1e3:.2f}" if total.reached else "-" for ns in (total.up, total.down)
    )
    cells = f"{total.calls // runs:>6} {total.ns / runs / 1e6:>8.3f}"
    cells += f" {total.ns / total.calls / 1e3:>8.2f} {up:>7} {down:>7}"
    below, never = total.below / max(total.ns, 1), 1 - total.reached / total.calls
    return f"{cells} {below:>6.0%} {never:>6.0%}"


def _sum(totals: list[RampTotal]) -> RampTotal:
    found = RampTotal()
    for each in totals:
        for name, value in vars(each).items():
            setattr(found, name, getattr(found, name) + value)
    return found


def _notes(ramps: PhaseRamps) -> Iterator[str]:
    yield "up, down: time before memory is first that busy, and after it is last; mean of the calls"
    yield "in which it is. below: share of the time, ramps included. never: share of the calls in"
    yield "which memory is never that busy; all of their time is below. Assumed, not measured: each"
    yield "block reads an equal share of the op's bytes, evenly over its life, and all from memory."
    if ramps.resolution > _FINE_NS:
        yield f"the GPU's clock advances by {ramps.resolution / 1e3:.2g} us; ramps are no finer"
    if any(step.every > 1 for step in ramps.steps):
        most = max(step.every for step in ramps.steps)
        yield f"of launches of many thread blocks, one in up to {most} blocks was recorded"
    kinds = dict.fromkeys(
        f"{step.row.op} {step.row.weight}".strip() for step in ramps.steps if not step.calls
    )
    if kinds:
        yield f"without ramps (library calls, other devices): {escape_control(', '.join(kinds))}"
