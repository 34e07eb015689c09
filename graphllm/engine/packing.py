"""Packing of ragged sequences into batches of bounded size, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np


def pack(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield batches of indices of sequences, the longest first; empty sequences are left out.

    Args:
        lengths: tokens of each sequence, at most ``budget``.
        budget: most tokens of a batch.
    """
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if tokens + lengths[index] > budget:
            yield batch
            batch, tokens = [], 0
        if lengths[index]:
            batch.append(index)
            tokens += lengths[index]
    if batch:
        yield batch


def batch_feeds(
    sequences: Sequence[Sequence[int]],
    first_position: int,
    types: Sequence[Sequence[int]] | None = None,
) -> dict[str, np.ndarray]:
    """Return the inputs of `model.encoder.EncoderBatch`.

    Args:
        sequences: token ids of each sequence.
        first_position: position of the first token of a sequence.
        types: token types of each sequence; zeros by default.
    """
    lengths = [len(ids) for ids in sequences]
    q_start = np.cumsum([0, *lengths], dtype=np.int32)
    total = int(q_start[-1])

    def joined(parts: Sequence[Sequence[int]]) -> np.ndarray:
        return np.fromiter(chain.from_iterable(parts), np.int32, total)

    return {
        "ids": joined(sequences),
        "pos": np.arange(first_position, first_position + total, dtype=np.int32)
        - np.repeat(q_start[:-1], lengths),
        "token_types": np.zeros(total, np.int32) if types is None else joined(types),
        "q_start": q_start,
    }
