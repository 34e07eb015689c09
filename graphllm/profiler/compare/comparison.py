"""`graphllm.compare`: compare two profiles or benches, or several interleaved runs of each.

A process counts once (`samples`), the k-th files of both sides are a pair, and the spread between
pairs separates changes from noise (`statistics`). A change that all kinds of ops share is reported
separately; if it is no larger than machine drift, it is removed from the rows of steps. The wall
time is as measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import RequestError
from ..machine_load import MAX_INTERFERENCE, MIN_MEASURED_NS
from ..speed import speed
from .result import WALL, ComparePhase, CompareRow, Comparison, SharedChange
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

MIN_EFFECT = 0.03  # smaller changes are not reported
ENOUGH_PAIRS = 5  # pairs that measure the noise of any machine
_MAX_MARGIN = math.log(1e9)  # upper bound of a margin, to avoid overflow
_MIN_KINDS = 3  # kinds of ops below which the shared change is not estimated

Files = str | Path | Sequence[str | Path]


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
    """Compare files of `graphllm profile -o` or `graphllm bench -o json`.

    Args:
        a: file, or files of interleaved runs, of the baseline.
        b: file or files to compare with; the k-th files of both sides are a pair.
        by: group steps by op, scope, layer, backend or format.
        min_effect: minimum effect of a verdict, as a share (0.03 is 3 %).
        fail_above: slowdown that fails the comparison, as a share.
        force: allow different models, shapes or phases.
        names: names of the sides; None for the paths of the files.

    Raises:
        RequestError: a file is invalid, or the files are not comparable.
    """
    if by not in LABELS:
        raise RequestError(f"by = {by!r} must be one of {', '.join(LABELS)}")
    sides = [[each] if isinstance(each, (str, Path)) else list(each) for each in (a, b)]
    count = len(sides[0])
    if not count or len(sides[1]) != count:
        raise RequestError(
            f"{count} files against {len(sides[1])}: both sides need the same number"
        )
    processes = load_samples([*sides[0], *sides[1]])
    if names is not None:  # for error messages
        processes = [replace(p, path=names[i >= count]) for i, p in enumerate(processes)]
    for other in processes[1:]:
        _check(processes[0], other, force)
    left, right = processes[:count], processes[count:]
    phases = [name for name in left[0].phases if all(name in p.phases for p in processes)]
    if not phases:
        raise RequestError(f"{left[0].path} and {right[0].path} have no phase or test in common")
    options = _Options(by, math.log1p(min_effect), LEVEL / len(phases))
    found = [_phase(name, left, right, options) for name in phases]
    return Comparison(
        names or (left[0].path, right[0].path),
        count,
        min_effect,
        fail_above,
        tuple(_notes(left[0], right[0])),
        tuple(_with_verdicts(found, min_effect, fail_above)),
    )


def _check(a: ProcessSample, b: ProcessSample, force: bool) -> None:
    """Raise RequestError unless both ran the same workload, or ``force`` is set."""
    for key in [*a.workload, *b.workload] if not force else ():
        had, has = (side.workload.get(key, "none") for side in (a, b))
        if had != has:
            raise RequestError(f"{b.path}: {key} is {has}, but {had} in {a.path}", "force")
    if (a.phases.keys() != b.phases.keys()) and not force:
        names = [", ".join(side.phases) for side in (a, b)]
        raise RequestError(f"{b.path}: has phases {names[1]}, but {a.path} has {names[0]}", "force")


def _notes(a: ProcessSample, b: ProcessSample) -> list[str]:
    """Return the differences between the settings of both sides."""
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
    """Options of the analysis: grouping, logarithm of the minimum effect, significance level."""

    by: str
    min_log: float
    level: float


@dataclass(frozen=True)
class _PhaseEstimate:
    """A phase before verdicts; ``logs``: changes of its rows; ``only``: rows of one side."""

    phase: ComparePhase
    logs: Changes
    only: tuple[CompareRow, ...]


def _phase(
    name: str, left: Sequence[ProcessSample], right: Sequence[ProcessSample], options: _Options
) -> _PhaseEstimate:
    a, b = [p.phases[name] for p in left], [p.phases[name] for p in right]
    for side, processes in ((a, left), (b, right)):
        _check_steps(name, side, processes)
    groups, kinds = _groups(a[0], b[0], options.by)
    both = {label: own for label, own in groups.items() if own[0] and own[1]}
    shared, logs = _changes(a, b, both, kinds, options)
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
    options: _Options,
) -> tuple[SharedChange | None, Changes]:
    """Estimate the shared change, and the changes of the wall time and of each group.

    The shared change is removed from the groups if it is small enough to be machine drift.
    """
    walls = np.array([[math.log(y.speed.ns / x.speed.ns)] for x, y in zip(a, b)])
    logs, variance = _logs(a, b, groups)
    logs, variance = np.hstack([walls, logs]), np.append(_wall_variance(a, b), variance)
    if len(kinds) < _MIN_KINDS:
        return None, estimate_changes(logs, variance + 2 * DRIFT**2)
    drifts = shared_change(*_logs(a, b, kinds))
    own = estimate_changes(logs - drifts[:, None], variance)
    shared, drift = _shared(drifts, options)
    taken_out = np.full(len(own.mean), shared.taken_out)
    taken_out[0] = False
    mean = np.where(taken_out, own.mean, own.mean + drift.mean)
    error = np.where(taken_out, own.error, np.hypot(own.error, drift.error))
    return shared, replace(own, mean=mean, error=error)


def _wall_variance(a: Sequence[PhaseSample], b: Sequence[PhaseSample]) -> float:
    """Variance of a pair's log(B / A) of the wall time: prior plus variance between passes."""
    return sum(
        _mean([float(prior_variance(t.wall_floor, t.speed.ns)) + t.speed.error**2 for t in side])
        for side in (a, b)
    )


def _check_steps(
    name: str, side: Sequence[PhaseSample], processes: Sequence[ProcessSample]
) -> None:
    """Raise RequestError unless all files of a side ran the same steps."""
    keys = [[(row["op"], row["scope"], row["shape"]) for row in timed.rows] for timed in side]
    for other, process in zip(keys, processes):
        if other != keys[0]:
            raise RequestError(
                f"{process.path}: the steps of {name} differ from those in {processes[0].path}"
            )


def _groups(a: PhaseSample, b: PhaseSample, by: str) -> tuple[Groups, Groups]:
    """Group the steps as asked; and group the steps that both sides have by kind of op."""
    groups: Groups = {}
    kinds: Groups = {}
    for matched in match_steps(a.rows, b.rows):
        for found, key in ((groups, by), (kinds, "op"))[: 1 + matched.same]:
            own = found.setdefault(label(matched, a.rows, b.rows, key), ([], []))
            own[0].extend(matched.a)
            own[1].extend(matched.b)
    return groups, kinds


def _logs(
    a: Sequence[PhaseSample], b: Sequence[PhaseSample], groups: Groups
) -> tuple[np.ndarray, np.ndarray]:
    """Return log(B / A) of each pair [pairs, groups] and its prior variance [groups]."""
    times, variances = [], []
    for index, side in enumerate((a, b)):
        wanted = [group[index] for group in groups.values()]
        own = np.array([[t.times[steps].sum() for steps in wanted] for t in side])
        floor = np.array([np.sqrt((side[0].floor[steps] ** 2).sum()) for steps in wanted])
        times.append(own)
        variances.append(prior_variance(floor, own.mean(axis=0)))
    return np.log(times[1] / times[0]), variances[0] + variances[1]


def _shared(drifts: np.ndarray, options: _Options) -> tuple[SharedChange, Changes]:
    """Judge the shared changes of the pairs [pairs]: machine drift, or more?"""
    drift = estimate_changes(drifts[:, None], np.array([2 * DRIFT**2]), pooled=False)
    change, margin = float(drift.mean[0]), float(drift.margin(options.level)[0])
    low, high = math.expm1(change - margin), math.expm1(change + margin)
    taken_out = abs(change) - margin <= options.min_log
    return SharedChange(math.expm1(change), low, high, taken_out), drift


def _hidden(left: Sequence[ProcessSample], right: Sequence[ProcessSample], name: str) -> str:
    """Return why these pairs allow no verdicts, or an empty string.

    Enough pairs measure the noise by their spread, whatever the machine did.
    """
    if len(left) >= ENOUGH_PAIRS:
        return ""
    for process in (*left, *right):
        measured = process.phases[name].measured
        if measured < MIN_MEASURED_NS:
            return (
                f"{process.path}: {measured / 1e9:.2f} s of {name} are too short for fewer than "
                f"{ENOUGH_PAIRS} pairs"
            )
        # The longest phase measures the interference best.
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
    """Return a row with times; its verdict is still open unless only one side has the group."""
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
    """Yield the phases with verdicts, which hold jointly over all rows of all phases."""
    p_values = _p_values(found, min_effect)
    failing = _p_values(found, fail_above) if fail_above is not None else [1.0] * len(p_values)
    at = 0
    for each in found:
        count, phase = len(each.phase.rows), each.phase
        rows = [
            _verdict(row, each.logs, index, min_effect, p_values[at + index], failing[at + index])
            for index, row in enumerate(phase.rows)
        ]
        if phase.hidden:
            rows = [replace(row, verdict="unclear") for row in rows]
        at += count
        steps = sorted([*rows[1:], *each.only], key=lambda row: -max(row.a_ns, row.b_ns))
        yield replace(phase, rows=(rows[0], *steps))


def _p_values(found: Sequence[_PhaseEstimate], effect: float) -> list[float]:
    """Return the Holm-adjusted p-values of all rows in order.

    A row that took longer is never called faster because others took even longer.
    """
    each = []
    for part in found:
        beyond = part.logs.p_values(math.log1p(effect))
        for row, mean, p in zip(part.phase.rows, part.logs.mean, beyond):
            valid = not part.phase.hidden and (row.b_ns > row.a_ns) == (mean > 0)
            each.append(p if valid else 1.0)
    return holm_adjust(each)


def _verdict(
    row: CompareRow, logs: Changes, index: int, effect: float, p_value: float, failing: float
) -> CompareRow:
    mean, margin = float(logs.mean[index]), min(_MAX_MARGIN, float(logs.margin()[index]))
    if p_value < LEVEL:
        verdict = "slower" if mean > 0 else "faster"
    else:
        verdict = "same" if abs(mean) + margin < math.log1p(effect) else "unclear"
    change, low, high = (math.expm1(mean + sign * margin) for sign in (0, -1, 1))
    return replace(
        row, change=change, low=low, high=high, verdict=verdict, fails=mean > 0 and failing < LEVEL
    )
