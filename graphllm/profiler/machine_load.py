"""Detection of measurements that were disturbed by other work on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .compare.statistics import FEW_RUNS

MAX_OTHER_LOAD = 0.1  # share of the processors' time used by other processes
MAX_INTERFERENCE = 0.2  # excess of the 75th percentile of run times over the minimum
MIN_MEASURED_NS = 1e8  # shorter measurements span only a few time slices of the scheduler
_WINDOW = 64  # consecutive runs over which the growth of the KV cache is negligible
_SLOW_QUANTILE = 0.75


def interference_of_samples(samples: Sequence[int]) -> float:
    """Return the excess of the 75th percentile of ``samples`` over their minimum, as a share."""
    return float(np.quantile(samples, _SLOW_QUANTILE)) / min(samples) - 1


def interference_of_steps(passes: Sequence[np.ndarray]) -> float:
    """Return the excess of the 75th percentile of run times over the minimum, as a share.

    Decode steps are compared with the neighbouring ones, since the KV cache grows; the few steps of
    a prefill are compared with the same steps of other passes. Percentile and minimum are taken
    step by step and summed.

    Args:
        passes: times of one plan in each pass, [steps, runs].
    """
    if passes[0].shape[1] < FEW_RUNS:
        alike = [np.stack(some, axis=1) for some in zip(*(each.T for each in passes))]
    else:
        every = np.concatenate(passes, axis=1)
        alike = np.array_split(every, max(1, every.shape[1] // _WINDOW), axis=1)
    bad = [
        np.quantile(a, _SLOW_QUANTILE, axis=1).sum() / max(1, a.min(axis=1).sum()) for a in alike
    ]
    return float(np.median(bad)) - 1


def times_by_pass(times: np.ndarray, within: np.ndarray, passes: int) -> list[np.ndarray]:
    """Split the times of a plan by pass.

    Args:
        times: [steps, runs].
        within: index of the pass of each run [runs].
        passes: number of passes; those without runs are left out.
    """
    each = [times[:, within == index] for index in range(passes)]
    return [some for some in each if some.size]


def load_note(others: float | None, ran: Mapping[str, tuple[float, float]]) -> str:
    """Return one line on what disturbed the measurement, or an empty string.

    Args:
        others: share of the processors' time that other processes used; None if unknown.
        ran: nanoseconds of all passes and their interference, by name of the measurement. Those
            shorter than `MIN_MEASURED_NS` are ignored.
    """
    found = list(_reasons(others, ran))
    return f"the machine was busy: {'; '.join(found)}; measure again" if found else ""


def _reasons(others: float | None, ran: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    if others is not None and others > MAX_OTHER_LOAD:
        yield f"other processes used {others:.0%} of the processor time"
    disturbed = {name: share for name, (ns, share) in ran.items() if ns >= MIN_MEASURED_NS}
    worst = max(disturbed, key=lambda name: disturbed[name], default="")
    if worst and disturbed[worst] > MAX_INTERFERENCE:
        excess = f"at least {disturbed[worst]:.0%} longer than the fastest"
        yield f"a quarter of the runs of {worst} took {excess}"
