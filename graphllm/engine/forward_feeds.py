"""Feeds of the forward pass of a step: token ids, positions, and places in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .block_manager import BlockManager
from .sequence_blocks import SequenceBlocks

Feeds = dict[str, np.ndarray]


class Span(NamedTuple):
    """Tokens of a sequence that a step computes.

    Attributes:
        tokens: their ids.
        start: position of the first one.
        prefix: length of the sequence's bidirectional prefix.
        blocks: the blocks of the sequence, reserved for the tokens.
    """

    tokens: Sequence[int]
    start: int
    prefix: int
    blocks: SequenceBlocks

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


def forward_feeds(
    manager: BlockManager, spans: Sequence[Span], rows: np.ndarray | None = None
) -> tuple[Feeds, dict[str, int]]:
    """Return the feeds of `forward_variables`, and the number of (query, key) pairs, ``kv_sum``.

    Args:
        manager: blocks of the KV cache.
        spans: tokens of each sequence in the step.
        rows: indices of the tokens whose logits are computed; by default each sequence's last one.
    """
    counts = [len(span.tokens) for span in spans]
    ends = np.cumsum(counts, dtype=np.int32)
    feeds = {
        "ids": np.array([token for span in spans for token in span.tokens], np.int32),
        "pos": np.concatenate([np.arange(s.start, s.stop, dtype=np.int32) for s in spans]),
        "q_start": np.concatenate([np.zeros(1, np.int32), ends]),
        "kv_len": np.array([span.stop for span in spans], np.int32),
        "prefix_len": np.array([span.prefix for span in spans], np.int32),
        "rows": ends - 1 if rows is None else rows.astype(np.int32),
    }
    for name in manager.pools:
        slots = [manager.slots(span.blocks, name, span.start, span.stop) for span in spans]
        feeds[f"slot.{name}"] = np.concatenate(slots)
        feeds[f"table.{name}"] = np.stack([span.blocks.tables[name] for span in spans])
    return feeds, {"kv_sum": sum(kv_pairs(s.start, n) for s, n in zip(spans, counts))}


def kv_pairs(start: int, count: int) -> int:
    """Return the number of (query, key) pairs of ``count`` tokens after ``start`` cached ones."""
    return count * start + count * (count + 1) // 2
