"""Start and end of every step, from the timestamps that kernels of the timed build record."""

from __future__ import annotations

import numpy as np

# struct Timestamps of common.cuh, in nanoseconds: when the step started, when the results of its
# predecessor were available, and when its last block ended. -1 (0 for `end`) where nothing was
# recorded.
TIMESTAMPS = np.dtype([("start", np.int64), ("ready", np.int64), ("end", np.int64)])


def ends_and_starts(timestamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the run began and each step ended [n + 1], and at which each started [n].

    A step ends when its results are available to the next step, which is a good part of a
    microsecond after its last thread ends. If the next step had started by then, its `ready` is
    that time. Elsewhere the same delay is assumed (the median of those observed), but the end is
    not later than the next step's start.
    """
    starts, ready, ends = (timestamps[name].copy() for name in TIMESTAMPS.names or ())
    ends = np.maximum.accumulate(ends)  # a step without work ends with its predecessor
    seen = (starts[1:] >= 0) & (starts[1:] < ends[:-1]) & (ready[1:] >= ends[:-1])
    delay = np.full(len(ends), int(np.median((ready[1:] - ends[:-1])[seen])) if seen.any() else 0)
    delay[:-1][seen] = (ready[1:] - ends[:-1])[seen]
    begun = starts[1:] >= ends[:-1]
    delay[:-1][begun] = np.minimum(delay[:-1], starts[1:] - ends[:-1])[begun]
    ends = np.maximum.accumulate(ends + delay)
    return ends, np.where(starts[1:] < 0, ends[:-1], starts[1:])  # library calls record no start
