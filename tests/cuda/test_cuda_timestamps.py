"""Start and end of steps from the timestamps of timed kernels. No GPU is needed."""

from __future__ import annotations

import numpy as np

from graphllm.backends.cuda.runtime.timestamps import TIMESTAMPS, ends_and_starts


def of(*timestamps: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    ends, starts = ends_and_starts(np.array(list(timestamps), TIMESTAMPS))
    return ends.tolist(), starts.tolist()


def test_consecutive_steps():
    ends, starts = of((100, -1, 100), (150, 160, 1000), (1600, 1700, 3000), (3600, 3700, 5000))
    assert ends == [100, 1000, 3000, 5000] and starts == [150, 1600, 3600]


def test_the_next_step_shows_when_a_step_ended():
    """Other steps get the same delay, but end no later than the next step starts."""
    ends, starts = of(
        (100, -1, 100), (150, 160, 1000), (900, 1040, 3000), (3600, 3700, 5000), (5010, 5020, 6000)
    )
    assert ends == [140, 1040, 3040, 5010, 6040] and starts == [150, 900, 3600, 5010]


def test_library_calls_and_steps_without_work():
    ends, starts = of((100, -1, 100), (-1, -1, 6000), (-1, -1, 0), (6100, 6200, 7000))
    assert ends == [100, 6000, 6000, 7000] and starts == [100, 6000, 6100]


def test_timestamps_are_not_modified():
    notes = np.array([(100, -1, 100), (90, 160, 1000), (900, 1040, 3000)], TIMESTAMPS)
    before = notes.copy()
    ends_and_starts(notes)
    assert (notes == before).all()
