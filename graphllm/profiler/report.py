"""A profile as text: a table of each phase, where the rest of the time went, what was missed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..backends import find
from ..terminal import escape_control
from .accounting import TimeAccounting
from .record import Total, totals

if TYPE_CHECKING:
    from .profile import Phase, Profile

_BOLD, _DIM, _RED, _PLAIN = "\033[1m", "\033[2m", "\033[31m", "\033[0m"
_LOW_SHARE = 0.5  # a share of the limit below this stands out, where there is much to gain


def table(profile: Profile, by: str, top: int, colour: bool) -> str:
    """See `Profile.table`."""
    blocks = ["\n".join(_phase(phase, by, top, colour)) for phase in profile.phases]
    reasons = dict.fromkeys(
        escape_control(f"{row.op} ran on {row.backend}: {row.why}")
        for phase in profile.phases
        for row in phase.rows
        if row.why
    )
    roofs = [
        f"ceilings of {name}: {roof.doubt} (graphllm doctor --measure)"
        for name, roof in profile.rooflines.items()
        if roof.doubt
    ]
    busy = [f"note: {profile.load_note}"] if profile.load_note else []
    used = {row.backend for phase in profile.phases for row in phase.rows}
    names = used - profile.rooflines.keys()
    measurable = sorted(name for name in names if find(name).measure is not None)
    roofs += [
        f"{name} is not measured: no limits (graphllm doctor --measure)" for name in measurable
    ]
    start = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in profile.start.items())
    return "\n\n".join([*blocks, "\n".join([*reasons, *roofs, *busy, f"beside that: {start}"])])


def _phase(phase: Phase, by: str, top: int, colour: bool) -> Iterator[str]:
    """One phase's table."""
    limits = {row: limit for row, (limit, bound) in phase.limits.items() if bound}
    sums = totals(phase.rows, by, limits)
    scale = _Columns(phase, bool(limits), colour)
    yield _heading(phase, scale, colour)
    names = list(sums)[: top or None]
    rest = [sums[name] for name in list(sums)[len(names) :]]
    width = max(len(by), 14, *(len(name) for name in names))
    head = f"{by:<{width}} {'calls':>6} {scale.unit + '/token':>9} {'share':>6}"
    head += f" {'GB/s':>7} {'GFLOP/s':>9}"
    yield _dim(head + (f" {'limit':>6} {'to gain':>9}" if limits else ""), colour)
    for name in names:
        yield f"{escape_control(name):<{width}} {scale.row(sums[name])}"
    if rest:
        yield f"{f'{len(rest)} more':<{width}} {scale.row(_sum_totals(rest))}"
    yield from _accounting_rows(phase.accounting, width, scale, colour)


def _heading(phase: Phase, scale: _Columns, colour: bool) -> str:
    what = f"{phase.name}: {phase.tokens} tokens, {phase.speed}"
    each = phase.speed.token_ns / scale.ns
    what += f", {each:.3f} {scale.unit}/token; profiling overhead {phase.overhead:+.1%}"
    return f"{_BOLD}{what}{_PLAIN}" if colour else what


class _Columns:
    """Totals of all passes as columns: per token, and against the phase's wall time."""

    def __init__(self, phase: Phase, has_ceiling: bool, colour: bool) -> None:
        self.wall = phase.accounting.wall
        self.tokens = phase.tokens * len(phase.passes)
        self.passes = len(phase.passes)
        self.has_ceiling, self.colour = has_ceiling, colour
        short = phase.speed.token_ns < 1e6
        self.unit, self.ns = ("us", 1e3) if short else ("ms", 1e6)

    def part(self, ns: float) -> str:
        return f"{ns / self.ns / self.tokens:>9.3f} {ns / max(self.wall, 1):>6.1%}"

    def row(self, total: Total) -> str:
        line = f"{total.calls // self.passes:>6} {self.part(total.ns)}"
        line += f" {total.gb_s:>7.1f} {total.gflop_s:>9.1f}"
        if not self.has_ceiling:
            return line
        share = total.limit / total.ns if total.ns else 0.0
        gain = max(0.0, total.ns - total.limit) / self.ns / self.tokens
        cells = f" {share:>6.0%} {gain:>9.3f}"
        poor = share < _LOW_SHARE and total.ns - total.limit > 0.05 * self.wall
        return line + (f"{_RED}{cells}{_PLAIN}" if poor and self.colour else cells)


def _sum_totals(totals_: list[Total]) -> Total:
    found = Total()
    for each in totals_:
        found.calls += each.calls
        found.ns += each.ns
        found.overlap += each.overlap
        found.bytes += each.bytes
        found.flops += each.flops
        found.limit += each.limit
    return found


def _accounting_rows(
    closing: TimeAccounting, width: int, scale: _Columns, colour: bool
) -> Iterator[str]:
    """What is not an op's, and that it adds up."""
    yield _dim(f"{'all ops':<{width}} {'':>6} {scale.part(closing.ops)}", colour)
    for name in ("copies", "gaps", "host", "unattributed"):
        yield _dim(f"{name:<{width}} {'':>6} {scale.part(getattr(closing, name))}", colour)
    yield _dim(f"{'wall':<{width}} {'':>6} {scale.part(closing.wall)}", colour)


def _dim(line: str, colour: bool) -> str:
    return f"{_DIM}{line}{_PLAIN}" if colour else line
