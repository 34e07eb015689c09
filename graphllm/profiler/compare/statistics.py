"""Statistics of `graphllm compare`: estimates of changes and their confidence.

Times of one process agree with each other more than with those of another, since memory placement
and the load of the machine differ. So a process counts as one sample per step, and a change is the
logarithm of the ratio between two interleaved processes. Few pairs say little about their own
variance, so a prior variance counts as `PRIOR_DF` further degrees of freedom. A single pair says
nothing about it, so twice the prior standard deviation is assumed. docs/design/profiling.md has the
measurements behind the constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

# Prior standard deviation of a step's time between processes: a share of the time, a constant in
# nanoseconds per call, and a constant that decreases with the square root of the number of runs.
RELATIVE_SD, STEP_NS, RUN_NS = 0.0125, 250.0, 2000.0
# A pass wakes up threads, which may be late by a time slice of the scheduler. The median over
# `FEW_RUNS` or more runs hides that; with fewer, the first steps of a run show it.
WAKE_NS, FEW_RUNS, FIRST_STEPS = 4e6, 8, 4
DRIFT = 0.025  # standard deviation of the change that all steps of a process share
PRIOR_DF = 4
# With a single pair: factor on the prior standard deviation, and degrees of freedom.
SINGLE_PAIR_FACTOR, SINGLE_PAIR_DF = 2.0, 30
LEVEL = 0.05  # significance level, over all rows of a report together
_MIN_POOLED_ROWS = 4  # with fewer rows, their variances are not pooled

# 75th percentile of the absolute value of a standard normal variable.
_NORMAL_Q75 = NormalDist().inv_cdf(0.875)


@dataclass(frozen=True)
class Changes:
    """Log-ratios with standard errors, following Student's t-distribution with ``df``."""

    mean: np.ndarray  # [rows]
    error: np.ndarray  # [rows]
    df: int

    def margin(self, level: float = LEVEL) -> np.ndarray:
        """Return the half width of the confidence interval at level ``1 - level``: [rows]."""
        return t_quantile(level / 2, self.df) * self.error

    def p_values(self, effect: float) -> list[float]:
        """Return the p-values of the hypotheses that the true change is at most ``effect``."""
        z = (np.abs(self.mean) - effect) / self.error
        return [min(1.0, 2 * t_tail(float(each), self.df)) for each in z]


def prior_variance(floor: Any, times: Any) -> Any:
    """Return the prior variance of log(time) between processes; scalars or arrays.

    ``floor``: see `step_floor`.
    """
    return RELATIVE_SD**2 + np.minimum(1.0, floor / times) ** 2


def step_floor(calls: int, runs: int, first: bool) -> float:
    """Return the absolute part of the prior standard deviation of a step's time, in nanoseconds.

    Args:
        calls: calls of the step per pass.
        runs: number of profiled runs.
        first: whether the step is among the first of a run.
    """
    late = WAKE_NS if first and calls < FEW_RUNS else 0.0
    return calls * math.hypot(STEP_NS, math.hypot(RUN_NS, late) / math.sqrt(runs))


def wall_floor(passes: int) -> float:
    """Return the absolute part of the prior standard deviation of a pass's wall time."""
    return WAKE_NS / math.sqrt(passes)


def shared_change(logs: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """Return the weighted median over the columns of ``logs`` [pairs, kinds]: [pairs].

    Columns are kinds of ops, not steps, so that a slower kernel counts once however many steps it
    has.
    """
    order = np.argsort(logs, axis=1)
    weight = np.cumsum((1 / variance)[order], axis=1)
    middle = (weight < weight[:, -1:] / 2).sum(axis=1)
    rows = np.arange(len(logs))
    return logs[rows, order[rows, middle]]


def estimate_changes(logs: np.ndarray, variance: np.ndarray, pooled: bool = True) -> Changes:
    """Estimate the mean change of each row over pairs.

    Args:
        logs: log-ratios [pairs, rows].
        variance: prior variance of a pair [rows].
        pooled: scale the prior by the noise of all rows, if it is higher than usual.
    """
    pairs = len(logs)
    pooled = pooled and logs.shape[1] >= _MIN_POOLED_ROWS
    if pairs == 1:
        assumed = SINGLE_PAIR_FACTOR**2 * variance
        size = (
            np.quantile(np.abs(logs[0]) / np.sqrt(assumed), 0.75) / _NORMAL_Q75 if pooled else 1.0
        )
        return Changes(logs[0], np.sqrt(assumed) * max(1.0, float(size)), SINGLE_PAIR_DF)
    own, df = logs.var(axis=0, ddof=1), pairs - 1
    if not pooled:
        return Changes(logs.mean(axis=0), np.sqrt(np.maximum(own, variance) / pairs), df)
    scale = max(1.0, float(np.median(own / variance)) / (1 - 2 / (9 * df)) ** 3)
    both = (PRIOR_DF * scale * variance + df * own) / (PRIOR_DF + df)
    error = np.sqrt(np.maximum(both, own) / pairs)
    return Changes(logs.mean(axis=0), error, PRIOR_DF + df)


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm 1979).

    The verdicts whose adjusted p-values are below a level are all correct with at least the
    probability 1 - level.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for done, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min(1.0, (len(p_values) - done) * p_values[index]))
        adjusted[index] = least
    return adjusted


# --------------------------------------------------------------------------- Student's distribution


@lru_cache(maxsize=64)
def _student(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Tabulate the t-distribution: ascending points t > 0 and log-probabilities of exceeding them.

    With t = sqrt(df) / tan(x), that probability is proportional to the integral of sin^(df - 1)
    from 0 to x.
    """
    x = np.exp(np.linspace(math.log(1e-9), math.log(math.pi / 2), 1 << 14))
    height = np.sin(x) ** (df - 1)
    below = height[0] * x[0] / df + np.concatenate(
        ([0.0], np.cumsum((height[1:] + height[:-1]) / 2 * np.diff(x)))
    )
    t = math.sqrt(df) / np.tan(x)
    t[-1] = 0.0
    return t[::-1], np.log(below / below[-1] / 2)[::-1]


def t_tail(t: float, df: int) -> float:
    """Return the probability that a t-distributed variable exceeds ``t``."""
    points, log_tails = _student(df)
    above = math.exp(float(np.interp(abs(t), points, log_tails)))
    return above if t >= 0 else 1 - above


def t_quantile(p: float, df: int) -> float:
    """Return the point at which `t_tail` is ``p``; ``p`` is at most 0.5."""
    points, log_tails = _student(df)
    return float(np.interp(-math.log(p), -log_tails, points))
