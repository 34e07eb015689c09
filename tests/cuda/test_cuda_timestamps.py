"""What the notes of timed kernels say of their steps. No GPU is needed."""

from __future__ import annotations

import numpy as np

from graphllm.backends.cuda.runtime.timestamps import TIMESTAMPS, ends_and_starts


def of(*notes: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    ends, starts = ends_and_starts(np.array(list(notes), TIMESTAMPS))
    return ends.tolist(), starts.tolist()


def test_steps_one_after_another():
    ends, starts = of((100, -1, 100), (150, 160, 1000), (1600, 1700, 3000), (3600, 3700, 5000))
    assert ends == [100, 1000, 3000, 5000] and starts == [150, 1600, 3600]


def test_the_next_step_tells_when_a_step_is_over():
    """And those that no other waits for take as long, but not beyond the next one's start."""
    ends, starts = of(
        (100, -1, 100), (150, 160, 1000), (900, 1040, 3000), (3600, 3700, 5000), (5010, 5020, 6000)
    )
    assert ends == [140, 1040, 3040, 5010, 6040] and starts == [150, 900, 3600, 5010]


def test_steps_of_libraries_and_without_work():
    ends, starts = of((100, -1, 100), (-1, -1, 6000), (-1, -1, 0), (6100, 6200, 7000))
    assert ends == [100, 6000, 6000, 7000] and starts == [100, 6000, 6100]


def test_the_notes_given_are_left_alone():
    notes = np.array([(100, -1, 100), (90, 160, 1000), (900, 1040, 3000)], TIMESTAMPS)
    before = notes.copy()
    ends_and_starts(notes)
    assert (notes == before).all()
