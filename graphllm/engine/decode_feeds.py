"""Feeds of decode steps: rows of one token each, some of which may be draft tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from .block_manager import BlockManager
from .sampling_feeds import history_ring
from .sequence import Chunk
from .sequence_blocks import SequenceBlocks

_COLUMNS = ("ids", "pos", "kv_len", "prefix_len", "count")  # an i32 for each row


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
        self._manager = manager
        self._columns = np.zeros((len(_COLUMNS), rows), np.int32)
        self._index, self._starts = (np.arange(n, dtype=np.int32) for n in (rows, rows + 1))
        self._history = np.zeros((rows, history), np.int32)
        self._tables = {  # and slots, by cache group
            name: (np.zeros((rows, manager.width), np.int32), np.zeros(rows, np.int32))
            for name in manager.pools
        }
        own = {"q_start": self._starts, "rows": self._index, **dict(zip(_COLUMNS, self._columns))}
        if history:
            own["history"] = self._history
        for name, (table, slots) in self._tables.items():
            own |= {f"table.{name}": table, f"slot.{name}": slots}
        self.arrays = {name: each for name, each in own.items() if name in names}

    def fill(self, chunks: Sequence[Chunk], blocks: Sequence[SequenceBlocks]) -> dict[str, int]:
        """Set the arrays to the feeds of a step; return numbers of pairs, as `forward_feeds` does.

        ``blocks``: those of each chunk.
        """
        ids, pos, ends, prefixes, counts, starts = ([] for _ in range(6))  # type: ignore[var-annotated]
        tables = list[dict[str, np.ndarray]]()
        for (sequence, start, _, _, drafts), held in zip(chunks, blocks):
            rows, count = len(drafts) + 1, start + 1 - sequence.prompt_tokens
            starts += [len(ids)] * rows
            ids += sequence.tokens[start], *drafts
            pos += range(start, start + rows)
            ends += range(start + 1, start + 1 + rows)
            prefixes += [sequence.prefix] * rows
            counts += range(count, count + rows)
            tables += [held.tables] * rows
        starts.append(len(ids))
        self._columns[:], self._starts[:] = (ids, pos, ends, prefixes, counts), starts
        block = self._manager.block
        whole, rest = np.divmod(self._columns[1], block)
        for name, (table, slots) in self._tables.items():
            np.concatenate([each[name] for each in tables], out=table.reshape(-1))
            np.multiply(table[self._index, whole], block, out=slots)
            slots += rest
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
