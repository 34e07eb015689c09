"""Pooling: one vector for the hidden states of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def _weighted_mean(x: np.ndarray) -> np.ndarray:
    weights = np.arange(1, len(x) + 1, dtype=np.float32)[:, None]
    return (x * weights).sum(axis=0) / weights.sum()


# sentence-transformers' names, in the order in which it concatenates several; x is [tokens, dim].
POOLINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(axis=0),
    "mean": lambda x: x.mean(axis=0),
    "mean_sqrt_len_tokens": lambda x: x.sum(axis=0) / np.float32(len(x) ** 0.5),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda x: x[-1],
}


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
