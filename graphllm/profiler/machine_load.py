"""Whether other work on the machine disturbed a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .compare.statistics import FEW_RUNS

MAX_OTHER_LOAD = 0.1  # of the processors' time: more than this in use by other processes counts
MAX_INTERFERENCE = 0.2  # a bad run of four is longer than the best by more than this: it counts
MIN_MEASURED_NS = 1e8  # passes that took no longer in all hold a few slices of the scheduler's
_WINDOW = 64  # runs in a row, which the growth of the cache makes no longer
_BAD_QUANTILE = 0.75  # of the runs are no worse


def interference_of_samples(samples: Sequence[int]) -> float:
    """By how much a bad one of four samples is longer than the best, as a share of it."""
    return float(np.quantile(samples, _BAD_QUANTILE)) / min(samples) - 1


def interference_of_steps(passes: Sequence[np.ndarray]) -> float:
    """Of the times of steps in passes [steps, runs], by how much a bad run of four is longer than
    the best, step by step.

    Runs of a token are like those around them, the few of a prompt like those of other passes.
    """
    if passes[0].shape[1] < FEW_RUNS:
        alike = [np.stack(some, axis=1) for some in zip(*(each.T for each in passes))]
    else:
        every = np.concatenate(passes, axis=1)
        alike = np.array_split(every, max(1, every.shape[1] // _WINDOW), axis=1)
    bad = [np.quantile(a, _BAD_QUANTILE, axis=1).sum() / max(1, a.min(axis=1).sum()) for a in alike]
    return float(np.median(bad)) - 1


def times_by_pass(times: np.ndarray, within: np.ndarray, passes: int) -> list[np.ndarray]:
    """Times of a plan's steps [steps, runs] by pass; ``within``: the pass of each run."""
    each = [times[:, within == index] for index in range(passes)]
    return [some for some in each if some.size]


def load_note(others: float | None, ran: Mapping[str, tuple[float, float]]) -> str:
    """One line on what disturbed the measurement, or an empty text.

    Args:
        others: share of the processors' time that other processes used; None if unknown.
        ran: nanoseconds of all passes and their interference, by name of the measurement. Those
            shorter than `MIN_MEASURED_NS` are ignored.
    """
    found = list(_reasons(others, ran))
    return f"the machine was busy: {'; '.join(found)}; measure again" if found else ""


def _reasons(others: float | None, ran: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    if others is not None and others > MAX_OTHER_LOAD:
        yield f"other work had {others:.0%} of the processors' time"
    disturbed = {name: share for name, (ns, share) in ran.items() if ns >= MIN_MEASURED_NS}
    worst = max(disturbed, key=lambda name: disturbed[name], default="")
    if worst and disturbed[worst] > MAX_INTERFERENCE:
        yield f"a quarter of the runs of {worst} took {disturbed[worst]:.0%} longer than the best"
