"""Feeds of the sampling ops: settings, stop token ids and the recent token ids of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import RequestError
from ..model.decoder import Limits
from .request import Sampling

INT32_MAX = 2**31 - 1


def sampling_feeds(
    limits: Limits, tokens: Sequence[int], sampling: Sampling, eos_ids: Sequence[int], count: int
) -> dict[str, np.ndarray]:
    """Return the feeds of the sampling ops for one sequence; see `Batch`.

    Args:
        limits: limits of the graph.
        tokens: the prompt and the ids sampled so far.
        sampling: settings.
        eos_ids: token ids that ``min_tokens`` and ``ignore_eos`` forbid.
        count: number of sampled ids at the end of ``tokens``.

    Raises:
        RequestError: there are more than ``limits.stops`` EOS ids.
    """
    if len(eos_ids) > limits.stops:
        raise RequestError(
            f"the model has {len(eos_ids)} EOS ids; at most {limits.stops} are supported"
        )
    stop = np.full(limits.stops, -1, np.int32)
    stop[: len(eos_ids)] = list(eos_ids)
    floats = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat": sampling.repeat_penalty,
        "presence": sampling.presence_penalty,
        "frequency": sampling.frequency_penalty,
    }
    min_tokens = INT32_MAX if sampling.ignore_eos else sampling.min_tokens
    ints = {
        "top_k": sampling.top_k,
        "min_tokens": min_tokens,
        "count": count,
        "sample_index": 0,
        "done": 0,
    }
    return {
        **{name: np.array([value], np.float32) for name, value in floats.items()},
        **{name: np.array([value], np.int32) for name, value in ints.items()},
        "seed": np.array([sampling.seed or 0], np.int64),
        "stop": stop,
        "history": _history_ring(tokens, limits.history),
    }


def _history_ring(tokens: Sequence[int], width: int) -> np.ndarray:
    """Return the last ids as a ring [1, width]: position p in column p % width, -1 if empty."""
    ring = np.full((1, width), -1, np.int32)
    first = max(0, len(tokens) - width)
    ring[0, np.arange(first, len(tokens)) % width] = tokens[first:]
    return ring
