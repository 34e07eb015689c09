"""Two profiles or benches, or several of each taken in turns: `graphllm.compare`.

A process counts once (`timed.py`), the k-th files of both sides are a pair, and a change is told
from noise by how far pairs lie apart (`noise.py`). What all kinds of ops share is the machine's,
unless it is more than machines do; it is taken out of the rows of steps and reported apart. The
wall time is as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RequestError
from ..machine_load import MAX_INTERFERENCE, MIN_MEASURED_NS
from ..speed import speed
from .samples import PhaseSample, ProcessSample, load_samples
from .statistics import (
    DRIFT,
    LEVEL,
    Changes,
    estimate_changes,
    holm_adjust,
    prior_variance,
    shared_change,
)
from .step_matching import LABELS, label, match_steps

MIN_EFFECT = 0.03  # changes that are not worth a word
ENOUGH_PAIRS = 5  # pairs that measure the noise of any machine
_MAX_MARGIN = math.log(1e9)  # of a margin: nothing is known
_MIN_KINDS = 3  # kinds of ops that cannot tell what all share
WALL = "wall time"

Files = str | Path | Sequence[str | Path]


@dataclass(frozen=True, eq=False)
class CompareRow:
    """One kind of steps, or the wall time. Times: nanoseconds per token, means over files.

    ``change`` is B / A - 1, for steps without what was taken out, and lies between ``low`` and
    ``high`` with 95 % confidence for itself. ``verdict``: ``slower`` or ``faster`` (by more than
    the least effect, with 95 % confidence over all rows together), ``same`` (``low`` and ``high``
    are within it), ``unclear``, or ``only in A``, ``only in B``. ``fails``: slower by more than is
    allowed.
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
        """Whether it is slower or faster."""
        return self.verdict in ("slower", "faster")


@dataclass(frozen=True)
class SharedChange:
    """The change that all kinds of ops have in common. ``taken_out`` of the rows of steps: it may
    be the machine's. Otherwise it is more than that, and all rows are as measured."""

    change: float
    low: float
    high: float
    taken_out: bool


@dataclass(frozen=True)
class ComparePhase:
    """``prefill`` or ``decode``, or a test of a bench. ``spreads``: of the wall times of A and B,
    as `Speed.spread`: of the passes of one file, or of the medians of several. ``hidden``: why
    there are no verdicts, or empty."""

    name: str
    tokens: int
    spreads: tuple[float, float]
    shared: SharedChange | None
    hidden: str
    rows: tuple[CompareRow, ...]  # the wall time first, then what takes longest


@dataclass(frozen=True)
class Comparison:
    """A, which comes first, and B, each of so many ``files``. ``notes``: how they differ."""

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
        """For JSON: no number is NaN."""
        found = {"schema": "graphllm.comparison", "version": 2, **asdict(self)}
        for phase in found["phases"]:
            for row in phase["rows"]:
                row |= {k: None for k, v in row.items() if isinstance(v, float) and math.isnan(v)}
        return found

    def table(self, top: int = 0, colour: bool = False) -> str:
        """As text. ``top``: so many rows of each phase besides those that changed; 0: all."""
        from .table import lines

        return "\n".join(lines(self, top, colour))


def compare(
    a: Files,
    b: Files,
    *,
    by: str = "op",
    min_effect: float = MIN_EFFECT,
    fail_above: float | None = None,
    force: bool = False,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """What changed from ``a`` to ``b``, files of `graphllm profile -o` or `graphllm bench -o json`.

    Several files a side are runs in turns, the k-th ones of both a pair. ``by``: op, scope, layer,
    backend or format. ``min_effect``, ``fail_above``: shares, 0.03 for 3 %. ``force``: also of
    different models or shapes. RequestError says what is wrong with a file, or keeps two apart.
    """
    if by not in LABELS:
        raise RequestError(f"by = {by!r} must be one of {', '.join(LABELS)}")
    sides = [[each] if isinstance(each, (str, Path)) else list(each) for each in (a, b)]
    count = len(sides[0])
    if not count or len(sides[1]) != count:
        raise RequestError(f"{count} files against {len(sides[1])}: give as many on both sides")
    processes = load_samples([*sides[0], *sides[1]])
    if names is not None:  # of the sides, for errors
        processes = [replace(p, path=names[i >= count]) for i, p in enumerate(processes)]
    for other in processes[1:]:
        _check(processes[0], other, force)
    left, right = processes[:count], processes[count:]
    phases = [name for name in left[0].phases if all(name in p.phases for p in processes)]
    if not phases:
        raise RequestError(f"{left[0].path} and {right[0].path} have no phase or test in common")
    asked = _Options(by, math.log1p(min_effect), LEVEL / len(phases))
    found = [_phase(name, left, right, asked) for name in phases]
    return Comparison(
        names or (left[0].path, right[0].path),
        count,
        min_effect,
        fail_above,
        tuple(_notes(left[0], right[0])),
        tuple(_with_verdicts(found, min_effect, fail_above)),
    )


def _check(a: ProcessSample, b: ProcessSample, force: bool) -> None:
    """RequestError unless both did the same work, or need not."""
    for key in [*a.workload, *b.workload] if not force else ():
        had, has = (side.workload.get(key, "none") for side in (a, b))
        if had != has:
            raise RequestError(f"{b.path}: {key} is {has}, in {a.path} it is {had}", "force")
    if (a.phases.keys() != b.phases.keys()) and not force:
        names = [", ".join(side.phases) for side in (a, b)]
        raise RequestError(f"{b.path}: has {names[1]}; {a.path} has {names[0]}", "force")


def _notes(a: ProcessSample, b: ProcessSample) -> list[str]:
    """How the runs differed besides in what is compared."""
    keys = dict.fromkeys([*a.workload, *b.workload, *a.settings, *b.settings])
    both = [
        (key, {**a.workload, **a.settings}.get(key), {**b.workload, **b.settings}.get(key))
        for key in keys
    ]
    return [f"{key}: {had} -> {has}" for key, had, has in both if had != has]


# ------------------------------------------------------------------------------------------ phases

Groups = dict[str, tuple[list[int], list[int]]]  # label -> indices of the rows of A and of B


@dataclass(frozen=True)
class _Options:
    """``least``: the effect, as a logarithm; ``level``: of saying wrongly that all has changed."""

    by: str
    least: float
    level: float


@dataclass(frozen=True)
class _PhaseEstimate:
    """A phase whose rows have no verdicts yet; ``logs`` are their changes."""

    phase: ComparePhase
    logs: Changes
    only: tuple[CompareRow, ...]


def _phase(
    name: str, left: Sequence[ProcessSample], right: Sequence[ProcessSample], asked: _Options
) -> _PhaseEstimate:
    a, b = [p.phases[name] for p in left], [p.phases[name] for p in right]
    for side, processes in ((a, left), (b, right)):
        _check_steps(name, side, processes)
    groups, kinds = _groups(a[0], b[0], asked.by)
    both = {label: own for label, own in groups.items() if own[0] and own[1]}
    shared, logs = _changes(a, b, both, kinds, asked)
    walls_ns = [_mean([t.speed.token_ns for t in side]) for side in (a, b)]
    rows = [CompareRow(WALL, walls_ns[0], walls_ns[1])]
    rows += [_timed_row(label, a, b, own) for label, own in both.items()]
    only = [_timed_row(label, a, b, own) for label, own in groups.items() if label not in both]
    tokens, hidden = a[0].speed.tokens, _hidden(left, right, name)
    phase = ComparePhase(name, tokens, (_spread(a), _spread(b)), shared, hidden, tuple(rows))
    return _PhaseEstimate(phase, logs, tuple(only))


def _spread(side: Sequence[PhaseSample]) -> float:
    if len(side) == 1:
        return side[0].speed.spread
    return speed(side[0].speed.tokens, [t.speed.ns for t in side]).spread


def _changes(
    a: Sequence[PhaseSample],
    b: Sequence[PhaseSample],
    groups: Groups,
    kinds: Groups,
    asked: _Options,
) -> tuple[SharedChange | None, Changes]:
    """Of the wall time as measured; of each group less what all kinds of ops share, if that is
    drift."""
    walls = np.array([[math.log(y.speed.ns / x.speed.ns)] for x, y in zip(a, b)])
    logs, variance = _logs(a, b, groups)
    logs, variance = np.hstack([walls, logs]), np.append(_wall_variance(a, b), variance)
    if len(kinds) < _MIN_KINDS:
        return None, estimate_changes(logs, variance + 2 * DRIFT**2)
    drifts = shared_change(*_logs(a, b, kinds))
    own = estimate_changes(logs - drifts[:, None], variance)
    shared, drift = _shared(drifts, asked)
    taken_out = np.full(len(own.mean), shared.taken_out)
    taken_out[0] = False
    mean = np.where(taken_out, own.mean, own.mean + drift.mean)
    error = np.where(taken_out, own.error, np.hypot(own.error, drift.error))
    return shared, replace(own, mean=mean, error=error)


def _wall_variance(a: Sequence[PhaseSample], b: Sequence[PhaseSample]) -> float:
    """Of a pair's log(B / A) of the wall time: the usual one, and what passes differed by."""
    return sum(
        _mean([float(prior_variance(t.wall_floor, t.speed.ns)) + t.speed.error**2 for t in side])
        for side in (a, b)
    )


def _check_steps(
    name: str, side: Sequence[PhaseSample], processes: Sequence[ProcessSample]
) -> None:
    """RequestError unless all files of a side ran the same steps."""
    keys = [[(row["op"], row["scope"], row["shape"]) for row in timed.rows] for timed in side]
    for other, process in zip(keys, processes):
        if other != keys[0]:
            raise RequestError(
                f"{process.path}: other steps of {name} than in {processes[0].path}, of its side"
            )


def _groups(a: PhaseSample, b: PhaseSample, by: str) -> tuple[Groups, Groups]:
    """What the rows of a report stand for; and the kinds of ops, of steps that both sides have."""
    groups: Groups = {}
    kinds: Groups = {}
    for stretch in match_steps(a.rows, b.rows):
        for found, key in ((groups, by), (kinds, "op"))[: 1 + stretch.same]:
            own = found.setdefault(label(stretch, a.rows, b.rows, key), ([], []))
            own[0].extend(stretch.a)
            own[1].extend(stretch.b)
    return groups, kinds


def _logs(
    a: Sequence[PhaseSample], b: Sequence[PhaseSample], groups: Groups
) -> tuple[np.ndarray, np.ndarray]:
    """Of each pair log(B / A) [pairs, groups], and its usual variance [groups]."""
    times, variances = [], []
    for index, side in enumerate((a, b)):
        wanted = [group[index] for group in groups.values()]
        own = np.array([[t.times[steps].sum() for steps in wanted] for t in side])
        floor = np.array([np.sqrt((side[0].floor[steps] ** 2).sum()) for steps in wanted])
        times.append(own)
        variances.append(prior_variance(floor, own.mean(axis=0)))
    return np.log(times[1] / times[0]), variances[0] + variances[1]


def _shared(drifts: np.ndarray, asked: _Options) -> tuple[SharedChange, Changes]:
    """What all kinds of ops of the pairs share, [pairs]: whether it is more than machines drift."""
    drift = estimate_changes(drifts[:, None], np.array([2 * DRIFT**2]), pooled=False)
    change, margin = float(drift.mean[0]), float(drift.margin(asked.level)[0])
    low, high = math.expm1(change - margin), math.expm1(change + margin)
    return SharedChange(math.expm1(change), low, high, abs(change) - margin <= asked.least), drift


def _hidden(left: Sequence[ProcessSample], right: Sequence[ProcessSample], name: str) -> str:
    """Why these pairs can tell nothing, or empty. Enough of them do by how far they lie apart."""
    if len(left) >= ENOUGH_PAIRS:
        return ""
    for process in (*left, *right):
        measured = process.phases[name].measured
        if measured < MIN_MEASURED_NS:
            return (
                f"{process.path}: {measured / 1e9:.2f} s of {name} are too short for so few files"
            )
        # The longest phase knows best.
        longest = max(process.phases, key=lambda each: process.phases[each].speed.ns)
        worst = max((name, longest), key=lambda each: process.phases[each].interference)
        disturbed = process.phases[worst].interference
        if disturbed > MAX_INTERFERENCE:
            return (
                f"the machine was busy; {process.path}: a quarter of the runs of {worst} took "
                f"at least {disturbed:.0%} longer than the fastest"
            )
    return ""


def _timed_row(
    label: str, a: Sequence[PhaseSample], b: Sequence[PhaseSample], own: Any
) -> CompareRow:
    """With its times; the verdict is for later, unless one side has nothing of it."""
    ns = [
        _mean([t.times[indices].sum() / t.speed.tokens for t in side]) if indices else 0.0
        for side, indices in zip((a, b), own)
    ]
    verdict = "unclear" if all(own) else f"only in {'A' if own[0] else 'B'}"
    return CompareRow(label, ns[0], ns[1], verdict=verdict)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---------------------------------------------------------------------------------------- verdicts


def _with_verdicts(
    found: Sequence[_PhaseEstimate], min_effect: float, fail_above: float | None
) -> Iterator[ComparePhase]:
    """The phases with verdicts, which hold over all rows of all of them."""
    chances = _p_values(found, min_effect)
    failing = _p_values(found, fail_above) if fail_above is not None else [1.0] * len(chances)
    at = 0
    for each in found:
        count, phase = len(each.phase.rows), each.phase
        rows = [
            _verdict(row, each.logs, index, min_effect, chances[at + index], failing[at + index])
            for index, row in enumerate(phase.rows)
        ]
        if phase.hidden:
            rows = [replace(row, verdict="unclear") for row in rows]
        at += count
        steps = sorted([*rows[1:], *each.only], key=lambda row: -max(row.a_ns, row.b_ns))
        yield replace(phase, rows=(rows[0], *steps))


def _p_values(found: Sequence[_PhaseEstimate], effect: float) -> list[float]:
    """For all rows in order: the chance of being wrong about any, if those so far are believed.

    A row that took longer is not called faster because others took longer still.
    """
    each = []
    for part in found:
        beyond = part.logs.p_values(math.log1p(effect))
        for row, mean, chance in zip(part.phase.rows, part.logs.mean, beyond):
            told = not part.phase.hidden and (row.b_ns > row.a_ns) == (mean > 0)
            each.append(chance if told else 1.0)
    return holm_adjust(each)


def _verdict(
    row: CompareRow, logs: Changes, index: int, effect: float, chance: float, failing: float
) -> CompareRow:
    mean, margin = float(logs.mean[index]), min(_MAX_MARGIN, float(logs.margin()[index]))
    if chance < LEVEL:
        word = "slower" if mean > 0 else "faster"
    else:
        word = "same" if abs(mean) + margin < math.log1p(effect) else "unclear"
    change, low, high = (math.expm1(mean + sign * margin) for sign in (0, -1, 1))
    return replace(
        row, change=change, low=low, high=high, verdict=word, fails=mean > 0 and failing < LEVEL
    )
