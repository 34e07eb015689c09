"""Feeds of decode steps: rows of one token each, some of which may be draft tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

import numpy as np

from .block_manager import BlockManager
from .sampling_feeds import history_ring
from .sequence import Chunk
from .sequence_blocks import SequenceBlocks

_COLUMNS = ("ids", "pos", "kv_len", "prefix_len", "count")  # a value for each row


class DecodeFeeds:
    """Feeds of steps with a fixed number of rows: arrays that are filled again for each step.

    A chunk has a row for its token, and one for each of its draft tokens. Only ``q_start`` differs
    from that of as many sequences: the last row of a chunk has the queries of all, and the others
    have none. So kernels know that the keys of the first ones are written in this step, too.

    Args:
        manager: blocks of the KV cache.
        rows: number of rows.
        names: the leaves that are fed.
        history: width of the rings of the last tokens; 0: they are not fed.

    Attributes:
        arrays: the feeds by name; at first ``rows`` and ``q_start`` of a step without draft tokens.
    """

    def __init__(
        self, manager: BlockManager, rows: int, names: Container[str], history: int
    ) -> None:
        self._block = manager.block
        columns = [*_COLUMNS, *(f"slot.{name}" for name in manager.pools)]
        self._values = np.zeros((len(columns) + 1) * rows + 1, np.int32)  # and q_start
        values, starts = np.split(self._values, [len(columns) * rows])
        starts[:] = np.arange(rows + 1)
        self._tables = [np.zeros((rows, manager.width), np.int32) for _ in manager.pools]
        self._history = np.zeros((rows, history), np.int32)
        own = dict(zip(columns, values.reshape(-1, rows)))
        own |= {"q_start": starts, "rows": np.arange(rows, dtype=np.int32)}
        own |= zip((f"table.{name}" for name in manager.pools), self._tables)
        if history:
            own["history"] = self._history
        self.arrays = {name: each for name, each in own.items() if name in names}

    def fill(self, chunks: Sequence[Chunk], blocks: Sequence[SequenceBlocks]) -> dict[str, int]:
        """Set the arrays to the feeds of a step; return numbers of pairs, as `forward_feeds` does.

        ``blocks``: those of each chunk. The values are lists first: a step has few rows, and each
        call of NumPy takes as long as some of these.
        """
        ids, pos, ends, prefixes, counts, starts = (list[int]() for _ in range(6))
        slots, block = [list[int]() for _ in self._tables], self._block
        for (sequence, start, stop, _, drafts), held in zip(chunks, blocks):
            first, rows, count = len(ids), len(drafts) + 1, stop - sequence.prompt_tokens
            own = range(start, start + rows)
            ids += sequence.tokens[start], *drafts
            pos += own
            ends += range(stop, stop + rows)
            prefixes += [sequence.prefix] * rows
            counts += range(count, count + rows)
            starts += [first] * rows
            for table, kept, found in zip(self._tables, held.tables.values(), slots):
                table[first : first + rows] = kept
                found += [kept.item(at // block) * block + at % block for at in own]
        starts.append(len(ids))
        self._values[:] = [*chain(ids, pos, ends, prefixes, counts, *slots, starts)]
        if self._history.size:
            self._fill_history(chunks)
        return {"kv_sum": sum(ends), "prefix_sum": sum(prefixes)}

    def _fill_history(self, chunks: Sequence[Chunk]) -> None:
        row = 0
        for chunk in chunks:
            tokens = [*chunk.sequence.tokens, *chunk.drafts]
            for stop in range(chunk.stop, chunk.stop + len(chunk.drafts) + 1):
                self._history[row] = history_ring(tokens, stop, self._history.shape[1])
                row += 1


def live_values(rows: int) -> dict[str, int]:
    """Return the values of the Vars of a decode step with this many rows."""
    return {"T": rows, "S": rows, "Q": rows + 1, "N": rows}
