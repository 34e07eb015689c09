"""How sure a change of times is: the statistics of `graphllm compare`.

Times of one process agree with each other more than with those of the next: memory lies elsewhere,
the machine has other guests. So a process gives one number for a step, and changes are logarithms
of ratios between processes that ran in turns. Few pairs say little about their own spread; what the
spread usually is counts as `PRIOR_DF` more of them. With one pair nothing is known of it, and twice
the usual is assumed. docs/architecture.md says where the constants come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

# The usual standard deviation between processes, of a step's time: a share of it, some nanoseconds,
# and some more over the root of the runs that were taken.
RELATIVE_SD, STEP_NS, RUN_NS = 0.0125, 250.0, 2000.0
# A pass wakes threads, which may be late by a slice of the scheduler's. In a pass of `FEW_RUNS` or
# more the median does not see that; in a shorter one the first steps of a run do.
WAKE_NS, FEW_RUNS, FIRST_STEPS = 4e6, 8, 4
DRIFT = 0.025  # of what all steps of a process have in common
PRIOR_DF = 4
SINGLE_PAIR_FACTOR, SINGLE_PAIR_DF = (
    2.0,
    30,
)  # where there is one pair: times the usual, and degrees of freedom
LEVEL = 0.05  # of a verdict being wrong, over all rows of a report
_MIN_POOLED_ROWS = 4  # rows that tell nothing of the others' spread

# Of the size of normal numbers, three quarters are below it.
_NORMAL_Q75 = NormalDist().inv_cdf(0.875)


@dataclass(frozen=True)
class Changes:
    """Logarithms of ratios with their standard errors, each of t's distribution with ``df``."""

    mean: np.ndarray  # [rows]
    error: np.ndarray  # [rows]
    df: int

    def margin(self, level: float = LEVEL) -> np.ndarray:
        """Half of the interval that holds each, but for ``level``: [rows]."""
        return t_quantile(level / 2, self.df) * self.error

    def p_values(self, effect: float) -> list[float]:
        """For each the chance of being as far from 0 if it truly were ``effect`` at most."""
        z = (np.abs(self.mean) - effect) / self.error
        return [min(1.0, 2 * t_tail(float(each), self.df)) for each in z]


def prior_variance(floor: Any, times: Any) -> Any:
    """The usual variance of log(time) between processes, of numbers or arrays. ``floor``: see
    `step_floor`."""
    return RELATIVE_SD**2 + np.minimum(1.0, floor / times) ** 2


def step_floor(calls: int, runs: int, first: bool) -> float:
    """Nanoseconds by which a step's time a pass usually differs between processes beside its share:
    of ``calls`` a pass, and ``runs`` that were timed; ``first``: it begins a run."""
    late = WAKE_NS if first and calls < FEW_RUNS else 0.0
    return calls * math.hypot(STEP_NS, math.hypot(RUN_NS, late) / math.sqrt(runs))


def wall_floor(passes: int) -> float:
    """As `step_floor`, of the wall time of a pass."""
    return WAKE_NS / math.sqrt(passes)


def shared_change(logs: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """What the columns of ``logs`` [pairs, kinds] share: their weighted median, [pairs].

    Of kinds of ops, not of steps: a slower kernel is one of them, however many steps it has.
    """
    order = np.argsort(logs, axis=1)
    weight = np.cumsum((1 / variance)[order], axis=1)
    middle = (weight < weight[:, -1:] / 2).sum(axis=1)
    rows = np.arange(len(logs))
    return logs[rows, order[rows, middle]]


def estimate_changes(logs: np.ndarray, variance: np.ndarray, pooled: bool = True) -> Changes:
    """Means over pairs. logs [pairs, rows]; variance [rows]: the usual one of a pair.

    ``pooled``: rows tell of each other whether the machine is noisier than usual.
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


def holm_adjust(chances: Sequence[float]) -> list[float]:
    """Chances adjusted for there being many (Holm 1979): below a level, all such verdicts together
    are wrong no more often than that."""
    adjusted, least = [0.0] * len(chances), 0.0
    for done, index in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        least = max(least, min(1.0, (len(chances) - done) * chances[index]))
        adjusted[index] = least
    return adjusted


# --------------------------------------------------------------------------- Student's distribution


@lru_cache(maxsize=64)
def _student(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Points t > 0, ascending, and the logarithms of the chance to lie above them.

    With t = sqrt(df) / tan(x), that chance is the integral of sin^(df - 1) from 0 to x.
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
    """The chance that a number of Student's distribution is above ``t``."""
    points, chances = _student(df)
    above = math.exp(float(np.interp(abs(t), points, chances)))
    return above if t >= 0 else 1 - above


def t_quantile(chance: float, df: int) -> float:
    """Where `t_tail` is ``chance``, of at most a half."""
    points, chances = _student(df)
    return float(np.interp(-math.log(chance), -chances, points))
