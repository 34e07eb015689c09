"""Labels of classifiers, and the functions that turn logits into scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError, quote


def label_names(config: Mapping[str, Any], count: int, where: object) -> tuple[str, ...]:
    """Return the names of ``count`` labels: ``id2label`` of config.json, or LABEL_0 and so on.

    ConfigError, which begins with ``where``: the names are malformed, or another number.
    """
    stated = config.get("id2label")
    if stated is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(stated, dict) or not all(isinstance(n, str) for n in stated.values()):
        raise ConfigError(f"{where}: id2label = {quote(stated)} is not an object of strings")
    if stated.keys() != {str(i) for i in range(count)}:
        raise ConfigError(f"{where}: id2label has {len(stated)} labels, the head has {count}")
    return tuple(stated[str(i)] for i in range(count))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    x = logits.astype(np.float64)
    return np.exp(-np.logaddexp(0, -x)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    x = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return (x / x.sum(axis=-1, keepdims=True)).astype(np.float32)
