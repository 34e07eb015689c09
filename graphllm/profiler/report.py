"""A profile as text: a table per phase, the accounting of wall time, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..backends import find
from ..terminal import escape_control
from .accounting import TimeAccounting
from .phase import Phase, Roofline
from .record import Total, totals
from .request_costs import RequestCost

_BOLD, _DIM, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[0m"
_LOW_SHARE = 0.5  # rows below this share of the roofline are highlighted if headroom is large


def footer(
    phases: Sequence[Phase], rooflines: Mapping[str, Roofline], load_note: str,
    start: Mapping[str, float],
) -> str:  # fmt: skip
    """Return the lines below the tables: ops that missed a backend, doubtful ceilings, startup.

    Args:
        phases: phases of the profile.
        rooflines: ceilings by backend.
        load_note: what disturbed the passes, or empty.
        start: seconds of each part of the startup.
    """
    reasons = dict.fromkeys(
        escape_control(f"{row.op} ran on {row.backend}: {row.why}")
        for phase in phases
        for row in phase.rows
        if row.why
    )
    ceilings = [
        f"ceilings of {name}: {roofline.doubt} (graphllm doctor --measure)"
        for name, roofline in rooflines.items()
        if roofline.doubt
    ]
    busy = [f"note: {load_note}"] if load_note else []
    names = {row.backend for phase in phases for row in phase.rows} - rooflines.keys()
    measurable = sorted(name for name in names if find(name).measure is not None)
    ceilings += [
        f"{name} is not measured: no ceilings (graphllm doctor --measure)" for name in measurable
    ]
    text = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in start.items())
    return "\n".join([*reasons, *ceilings, *busy, f"startup: {text}"])


_MOST_OPS = 4  # columns of the table of requests


def request_table(costs: Sequence[RequestCost], phases: Sequence[Phase], colour: bool) -> str:
    """Format the cost of each request per pass: in total, and of the ops that take longest.

    Args:
        costs: cost of each request over all phases and passes.
        phases: the phases.
        colour: use ANSI colours.
    """
    passes = len(phases[0].passes)
    sums: dict[str, float] = {}
    for cost in costs:
        for name, op in cost.ops.items():
            sums[name] = sums.get(name, 0.0) + op.ns
    ops = sorted(sums, key=lambda name: -sums[name])[:_MOST_OPS]
    titles = [*map(escape_control, ops), "other ops", "gaps", "host"]
    widths = [max(9, len(title)) for title in titles]
    head = f"{'request':>7} {'tokens':>7} {'ms':>9} {'share':>6} {'GB':>8} {'GFLOP':>9}"
    lines = [dim(f"{head} {' '.join(f'{t:>{w}}' for t, w in zip(titles, widths))}", colour)]
    whole = sum(cost.ns for cost in costs)
    for cost in costs:
        times = [cost.ops[name].ns if name in cost.ops else 0.0 for name in ops]
        rest = cost.ns - cost.gaps - cost.host - sum(times)
        cells = zip([*times, rest, cost.gaps, cost.host], widths)
        line = f"{cost.request:>7} {cost.tokens // passes:>7} {cost.ns / passes / 1e6:>9.2f}"
        line += f" {cost.ns / whole:>6.1%} {cost.bytes / passes / 1e9:>8.3f}"
        line += f" {cost.flops / passes / 1e9:>9.3f}"
        lines.append(f"{line} {' '.join(f'{ns / passes / 1e6:>{w}.2f}' for ns, w in cells)}")
    wall = sum(phase.accounting.wall for phase in phases)
    lines.append(dim(f"all requests: {whole / wall:.1%} of the wall time; ms per pass", colour))
    return "\n".join(lines)


def phase_table(phase: Phase, by: str, top: int, colour: bool) -> str:
    """Format one phase; for the arguments see `Profile.table`."""
    return "\n".join(_phase(phase, by, top, colour))


def _phase(phase: Phase, by: str, top: int, colour: bool) -> Iterator[str]:
    """Yield the lines of one phase."""
    limits = {row: limit for row, (limit, bound) in phase.limits.items() if bound}
    sums = totals(phase.rows, by, limits)
    columns = _Columns(phase, bool(limits), colour)
    yield _heading(phase, columns, colour)
    names = list(sums)[: top or None]
    rest = [sums[name] for name in list(sums)[len(names) :]]
    width = max(len(by), 14, *(len(name) for name in names))
    head = f"{by:<{width}} {'calls':>6} {columns.unit + '/token':>9} {'share':>6}"
    head += f" {'GB/s':>7} {'GFLOP/s':>9}"
    yield dim(head + (f" {'roofline':>8} {'headroom':>9}" if limits else ""), colour)
    for name in names:
        yield f"{escape_control(name):<{width}} {columns.row(sums[name])}"
    if rest:
        yield f"{f'{len(rest)} more':<{width}} {columns.row(_sum_totals(rest))}"
    yield from _accounting_rows(phase.accounting, width, columns, colour)


def _heading(phase: Phase, columns: _Columns, colour: bool) -> str:
    heading = f"{phase.name}: {phase.tokens} tokens, {phase.speed}"
    each = phase.speed.token_ns / columns.ns
    heading += f", {each:.3f} {columns.unit}/token; profiling overhead {phase.overhead:+.1%}"
    return bold(heading, colour)


class _Columns:
    """Format totals of all passes as columns: per token, and as share of the wall time."""

    def __init__(self, phase: Phase, has_ceiling: bool, colour: bool) -> None:
        self.wall = phase.accounting.wall
        self.tokens = phase.tokens * len(phase.passes)
        self.passes = len(phase.passes)
        self.has_ceiling, self.colour = has_ceiling, colour
        short = phase.speed.token_ns < 1e6
        self.unit, self.ns = ("us", 1e3) if short else ("ms", 1e6)

    def part(self, ns: float) -> str:
        """Format a time: per token, and as share of the wall time."""
        return f"{ns / self.ns / self.tokens:>9.3f} {ns / max(self.wall, 1):>6.1%}"

    def row(self, total: Total) -> str:
        """Format a sum of rows."""
        line = f"{total.calls // self.passes:>6} {self.part(total.ns)}"
        line += f" {total.gb_s:>7.1f} {total.gflop_s:>9.1f}"
        if not self.has_ceiling:
            return line
        share = total.limit / total.ns if total.ns else 0.0
        headroom = max(0.0, total.ns - total.limit) / self.ns / self.tokens
        cells = f" {share:>8.0%} {headroom:>9.3f}"
        low = share < _LOW_SHARE and total.ns - total.limit > 0.05 * self.wall
        return line + (f"{_RED}{cells}{_PLAIN}" if low and self.colour else cells)


def _sum_totals(rows: list[Total]) -> Total:
    found = Total()
    for each in rows:
        found.calls += each.calls
        found.ns += each.ns
        found.overlap += each.overlap
        found.bytes += each.bytes
        found.flops += each.flops
        found.limit += each.limit
    return found


def _accounting_rows(
    accounting: TimeAccounting, width: int, columns: _Columns, colour: bool
) -> Iterator[str]:
    """Yield the rows that complete the ops to the wall time."""
    yield dim(f"{'all ops':<{width}} {'':>6} {columns.part(accounting.ops)}", colour)
    for name in ("copies", "gaps", "host", "unattributed"):
        yield dim(f"{name:<{width}} {'':>6} {columns.part(getattr(accounting, name))}", colour)
    yield dim(f"{'wall':<{width}} {'':>6} {columns.part(accounting.wall)}", colour)


def dim(line: str, colour: bool) -> str:
    return f"{_DIM}{line}{_PLAIN}" if colour else line


def bold(line: str, colour: bool) -> str:
    """Return the line, in bold if ``colour``."""
    return f"{_BOLD}{line}{_PLAIN}" if colour else line
