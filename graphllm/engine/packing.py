"""Packing of ragged sequences into batches of bounded size, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    positions = np.concatenate([np.arange(length) for length in lengths]) + first_position
    kinds = np.zeros(len(positions)) if types is None else np.concatenate(types)
    return {
        "ids": np.concatenate(sequences).astype(np.int32),
        "pos": positions.astype(np.int32),
        "token_types": kinds.astype(np.int32),
        "q_start": np.cumsum([0, *lengths]).astype(np.int32),
    }
