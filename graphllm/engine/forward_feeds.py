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
    """Return the feeds of `forward_variables`, and the numbers of (query, key) pairs.

    These are ``kv_sum``, all of them, and ``prefix_sum``, those whose key is in a prefix.

    Args:
        manager: blocks of the KV cache.
        spans: tokens of each sequence in the step.
        rows: indices of the tokens whose logits are computed; by default each sequence's last one.
    """
    starts = np.array([span.start for span in spans], np.int32)
    counts = np.array([len(span.tokens) for span in spans], np.int32)
    ends = np.cumsum(counts, dtype=np.int32)
    shifts = np.repeat(starts - ends + counts, counts)  # from an index of the step to a position
    pos = np.arange(len(shifts), dtype=np.int32) + shifts
    feeds = {
        "ids": np.array([token for span in spans for token in span.tokens], np.int32),
        "pos": pos,
        "q_start": np.concatenate([np.zeros(1, np.int32), ends]),
        "kv_len": starts + counts,
        "prefix_len": np.array([span.prefix for span in spans], np.int32),
        "rows": ends - 1 if rows is None else rows.astype(np.int32),
    }
    block, sequence = manager.block, np.repeat(np.arange(len(spans)), counts)
    for name in manager.pools:
        table = feeds[f"table.{name}"] = block_tables([span.blocks for span in spans], name)
        feeds[f"slot.{name}"] = table[sequence, pos // block] * block + pos % block
    pairs = sum(map(kv_pairs, starts.tolist(), counts.tolist()))
    return feeds, {"kv_sum": pairs, "prefix_sum": int(counts @ feeds["prefix_len"])}


def block_tables(rows: Sequence[SequenceBlocks], group: str) -> np.ndarray:
    """Return the block tables of several sequences, [S, width]; quicker than `np.stack`."""
    return np.concatenate([blocks.tables[group] for blocks in rows]).reshape(len(rows), -1)


def kv_pairs(start: int, count: int) -> int:
    """Return the number of (query, key) pairs of ``count`` tokens after ``start`` cached ones."""
    return count * start + count * (count + 1) // 2
