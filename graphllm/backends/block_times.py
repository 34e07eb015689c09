"""Times of the thread blocks of a launch, which `TimestampLog.blocks` has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class BlockTimes(NamedTuple):
    """When thread blocks of one launch started and ended: int64 [n] each, in ns as the log's.

    ``every``: one in this many blocks is recorded.
    """

    starts: np.ndarray
    ends: np.ndarray
    every: int
