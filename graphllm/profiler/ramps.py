"""Ramps of a launch: the time in which its reads were far below the memory's bandwidth.

The input is when each thread block of a launch started and ended. When a block reads is not
measured: each block is taken to read an equal share of the launch's bytes, evenly over its life.
The rate of the launch is the sum over the blocks that live.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.8  # share of the memory bandwidth below which the memory counts as not busy
# Blocks beyond the live rows return at once and read nothing: those that live shorter than this
# share of a typical block.
_IDLE = 0.2
_ROUNDING = 1e-9  # relative error of a sum of rates


class Ramp(NamedTuple):
    """Nanoseconds of one launch.

    Attributes:
        time: what the profile counts as its time.
        up: until its rate first reaches `LEVEL` of the bandwidth; all of its time if it never does.
        down: after its rate was last that high; 0 if it never is.
        below: all time in which the rate is lower, the ramps included.
        reached: whether it reaches that rate.
    """

    time: float
    up: float
    down: float
    below: float
    reached: bool


Launches = Sequence[tuple[np.ndarray, np.ndarray]]  # starts and ends of blocks [n], of each launch


def ramp(launches: Launches, begin: float, end: float, nbytes: float, bytes_s: float) -> Ramp:
    """Return the ramps of the launches of an op, which run one after the other.

    Args:
        launches: starts and ends of the thread blocks of each launch, in nanoseconds.
        begin: end of the launch before them. A block that starts earlier waits until then.
        end: when their results were available.
        nbytes: bytes that they read and write together.
        bytes_s: memory bandwidth in bytes per second.
    """
    times, rates = rate_curve(launches, begin, nbytes)
    points = np.clip(np.concatenate([[begin], times, [end]]), begin, end)
    lengths = np.diff(points)
    level = LEVEL * bytes_s / 1e9 * (1 - _ROUNDING)
    high = (np.concatenate([[0.0], rates, [0.0]]) >= level) & (lengths > 0)
    time = float(end - begin)
    if not high.any():
        return Ramp(time, time, 0.0, time, False)
    (where,) = np.nonzero(high)
    up, down = points[where[0]] - begin, end - points[where[-1] + 1]
    return Ramp(time, float(up), float(down), float(lengths[~high].sum()), True)


def rate_curve(launches: Launches, begin: float, nbytes: float) -> tuple[np.ndarray, np.ndarray]:
    """Return times [n + 1] and the bytes per nanosecond between each two of them [n].

    Bytes are divided among the launches by the time of their blocks. For the arguments see `ramp`.
    """
    lives = []
    for starts, ends in launches:
        lives.append(_lives(np.maximum(starts, begin), ends))
        begin = max(begin, ends.max(initial=begin))
    total = sum(float((ends - starts).sum()) for starts, ends in lives)
    times, changes = [np.empty(0)], [np.empty(0)]
    for starts, ends in lives:
        own = ends - starts
        rates = nbytes * (own.sum() / total) / len(own) / own if len(own) else own
        times += [starts, ends]
        changes += [rates, -rates]
    every = np.concatenate(times)
    if not every.size:
        return np.empty(0), np.empty(0)
    order = np.argsort(every, kind="stable")
    return every[order], np.cumsum(np.concatenate(changes)[order])[:-1]


def _lives(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the blocks that read, as float64.

    A typical block is the median by squares of lives: neither many blocks that return at once nor a
    single late one change it.
    """
    own = np.maximum(ends - starts, 0)
    ordered = np.sort(own)
    sums = np.cumsum(ordered.astype(float) ** 2)
    if not own.size or not sums[-1]:
        return np.empty(0), np.empty(0)
    typical = ordered[np.searchsorted(sums, sums[-1] / 2)]
    reads = own >= _IDLE * typical
    return starts[reads].astype(float), ends[reads].astype(float)


def clock_resolution(times: np.ndarray) -> int:
    """Return the smallest difference between two of ``times`` (integers); 0 if all are equal."""
    steps = np.diff(np.unique(times))
    return int(steps.min()) if steps.size else 0
