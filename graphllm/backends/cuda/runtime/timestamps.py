"""What kernels of the timed build note, and what it says of their steps."""

from __future__ import annotations

import numpy as np

# When a step started, when what is before it was over, and when it ended: Stamps of common.cuh.
# What was not noted is -1 (0 for an end).
STAMPS = np.dtype([("start", np.int64), ("ready", np.int64), ("end", np.int64)])


def ends_and_starts(stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When the run began and each step ended [n + 1], and when each started [n].

    A step is over when its results are there for the next one, a good part of a microsecond after
    its last thread. Where the next has started by then, its `ready` tells; elsewhere it is as long
    after the last thread as it is there, but not after the next one's start.
    """
    starts, ready, ends = (stamps[name].copy() for name in STAMPS.names or ())
    ends = np.maximum.accumulate(ends)  # a step without work ends with the one before
    seen = (starts[1:] >= 0) & (starts[1:] < ends[:-1]) & (ready[1:] >= ends[:-1])
    later = np.full(len(ends), int(np.median((ready[1:] - ends[:-1])[seen])) if seen.any() else 0)
    later[:-1][seen] = (ready[1:] - ends[:-1])[seen]
    begun = starts[1:] >= ends[:-1]
    later[:-1][begun] = np.minimum(later[:-1], starts[1:] - ends[:-1])[begun]
    ends = np.maximum.accumulate(ends + later)
    return ends, np.where(starts[1:] < 0, ends[:-1], starts[1:])  # libraries note no start
