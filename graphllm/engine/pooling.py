"""Pooling: one vector for the hidden states of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ops.pooling import POOLINGS


def pool(x: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Pool the hidden states x [tokens, dim] of one sequence: float32 [len(names) * dim].

    Sequences are pooled one by one, so that a vector does not depend on its batch.
    """
    if not len(x):
        return np.zeros(len(names) * x.shape[1], np.float32)
    return np.concatenate([POOLINGS[name](x) for name in names], dtype=np.float32)


def normalize(vector: np.ndarray) -> np.ndarray:
    """Return ``vector`` scaled to length one; a vector of zeros stays as it is."""
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    return vector / np.float32(max(length, 1e-12))
