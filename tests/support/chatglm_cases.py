"""A small ChatGLM configuration, and prompts for it."""

from __future__ import annotations

import numpy as np
from hf_models import SPECS

MASK, SOP, GMASK = 0, 1, 2  # ids in TINY


def random_ids(count: int, before: int = 0, seed: int = 7) -> list[int]:
    """Random ids; with ``before``, that many of them, the last a gMASK, precede sop."""
    ids = [int(i) for i in np.random.default_rng(seed).integers(3, 120, count)]
    if before:
        ids[before - 1 : before + 1] = [GMASK, SOP]
    return ids


CONFIG = {**SPECS["chatglm"].tiny[0], "max_sequence_length": 700}
