"""Runner: the feeds and plans of a step, and the decode loop of a batch that stays the same."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np

from ..compiler.plan import Plan
from ..graph.tensor import Tensor
from ..model.batch import CacheSpec, Limits
from ..runtime.decode_loop import DecodeLoop
from ..runtime.executor import Executor
from ..runtime.recorder import Recorder
from .block_manager import BlockManager
from .generation import Generation
from .sampling_feeds import sampling_feeds
from .sequence import Chunk
from .step_result import StepResult

Feeds = dict[str, np.ndarray]


@dataclass
class _Loop:
    """A decode loop over fixed rows; ``lengths``: computed tokens of each once all have run."""

    rows: list[Generation]
    outputs: list[str]
    recorder: Recorder | None
    steps: DecodeLoop
    lengths: list[int]


class Runner:
    """Runs steps of several sequences.

    A step that continues the one before it (the same sequences in the same order, each by the token
    sampled last) needs no feeds: the device has advanced the step variables. Devices that support
    it then run ahead: the next step is launched before the sampled ids of this one are read.

    Args:
        executor: executor of the placed graph.
        outputs: outputs of the graph by name.
        caches: KV cache groups.
        limits: limits of the graph.
        manager: blocks of the sequences.
    """

    def __init__(
        self,
        executor: Executor,
        outputs: dict[str, Tensor],
        caches: Rows[CacheSpec],
        limits: Limits,
        manager: BlockManager,
    ) -> None:
        self.executor, self.outputs, self.limits = executor, outputs, limits
        self.caches, self.manager = [c.name for c in caches], manager
        self.pools = [name for name in outputs if name.startswith("kv.")]
        self._loop: _Loop | None = None
        self._advanced: list[Generation] = []  # rows whose next step needs no feeds

    @property
    def logits_outputs(self) -> list[str]:
        """Names of the outputs of a step without sampling: the logits and the KV pools."""
        return ["logits", *self.pools]

    # -- plans
    def plan(self, outputs: Rows[str], tokens: int, sequences: int = 1, rows: int = 1) -> Plan:
        """Return the plan of steps with at most this many tokens, sequences and rows of logits."""
        q = (2, sequences + 1)
        bounds = {"T": (1, tokens), "S": (1, sequences), "Q": q, "N": (1, rows)}
        return self.executor.compile({name: self.outputs[name] for name in outputs}, bounds)

    def bucket(self, sequences: int) -> int:
        """Return the upper bound of sequences of the plan that runs this many: a power of two."""
        return min(self.limits.sequences, 1 << (sequences - 1).bit_length())

    # -- one step with feeds from the host
    def run(
        self, chunks: Rows[Chunk], rows: list[Generation], recorder: Recorder | None
    ) -> StepResult:
        """Run one step fed by the host; the chunks that sample come first.

        Args:
            chunks: what to compute.
            rows: the requests of the chunks.
            recorder: recorder of the step.
        """
        self.reset()
        size, sampling = self.bucket(len(chunks)), sum(chunk.samples for chunk in chunks)
        if not sampling:
            outputs, plan = [], self.plan(self.pools, self.limits.tokens, size)
        else:
            outputs = _outputs("ids" if sampling == len(rows) else "sampled", rows[:sampling])
            plan = self.plan(outputs, self.limits.tokens, size, size)
        feeds, env = self.feeds(plan, chunks, rows)
        found = self.executor.run(plan, feeds, env, recorder, outputs)
        if not outputs:
            return StepResult(np.zeros(0, np.int32))
        self._advanced = rows if sampling == len(rows) else []
        return StepResult(*(found[name] for name in outputs))

    def feeds(
        self, plan: Plan, parts: Rows[Chunk], rows: Rows[Generation]
    ) -> tuple[Feeds, dict[str, int]]:
        """Return the feeds of a step, and the number of its (query, key) pairs."""
        sequences = [chunk.sequence for chunk in parts]
        counts = [chunk.stop - chunk.start for chunk in parts]
        ends = np.cumsum(counts, dtype=np.int32)
        tokens = [t for c in parts for t in c.sequence.tokens[c.start : c.stop]]
        feeds = {
            "ids": np.array(tokens, np.int32),
            "pos": np.concatenate([np.arange(c.start, c.stop, dtype=np.int32) for c in parts]),
            "q_start": np.concatenate([np.zeros(1, np.int32), ends]),
            "kv_len": np.array([c.stop for c in parts], np.int32),
            "prefix_len": np.array([s.prefix for s in sequences], np.int32),
            "rows": ends[: max(1, sum(c.samples for c in parts))] - 1,
        }
        for name in self.caches:
            slots = [
                self.manager.slots(row.blocks, name, c.start, c.stop) for c, row in zip(parts, rows)
            ]
            feeds[f"slot.{name}"] = np.concatenate(slots)
            feeds[f"table.{name}"] = self._tables(rows, name)
        feeds |= sampling_feeds(self.limits, rows, plan.leaves, _suffix(rows) != "")
        pairs = (kv_pairs(c.start, c.stop - c.start) for c in parts)
        return feeds, {"kv_sum": sum(pairs)}

    def _tables(self, rows: Rows[Generation], name: str) -> np.ndarray:
        return np.stack([row.blocks.tables[name] for row in rows])

    # -- decode steps of one batch
    @property
    def waiting(self) -> int:
        """Number of steps that were launched and not taken."""
        return self._loop.steps.waiting if self._loop else 0

    def decode(
        self, chunks: Rows[Chunk], rows: list[Generation], recorder: Recorder | None
    ) -> None:
        """Launch a decode step: one token of each sequence, all sampled.

        Args:
            chunks: what to compute.
            rows: the requests of the chunks.
            recorder: recorder of the steps.
        """
        loop, outputs = self._loop, _outputs("ids", rows)
        if loop is None or (loop.rows, loop.outputs, loop.recorder) != (rows, outputs, recorder):
            self._loop = self._new_loop(chunks, rows, outputs, recorder)
        self.launch(chunks)

    def _new_loop(
        self, chunks: Rows[Chunk], rows: list[Generation], outputs: list[str],
        recorder: Recorder | None,
    ) -> _Loop:  # fmt: skip
        count = len(rows)
        size = self.bucket(count)
        feeds: Feeds = {"q_start": np.arange(count + 1, dtype=np.int32)}
        feeds["rows"] = np.arange(count, dtype=np.int32)
        plan = self.plan(outputs, size, size, size)
        if self._advanced != rows:
            feeds |= self.feeds(plan, chunks, rows)[0]
        env = {"T": count, "S": count, "Q": count + 1, "N": count}
        lengths: list[int] = []
        steps = self.executor.decode_loop(
            plan, feeds, env, outputs[0], recorder,
            lambda: {"kv_sum": sum(lengths)}, outputs[1:],
        )  # fmt: skip
        return _Loop(rows, outputs, recorder, steps, lengths)

    @property
    def can_run_ahead(self) -> bool:
        """Whether the device takes another step before the oldest launched one is taken."""
        return self._loop is not None and self.waiting <= self._loop.steps.lookahead

    def launch(self, chunks: Rows[Chunk]) -> None:
        """Launch the next step of the decode loop, whose blocks are reserved.

        The updated block tables are written in stream order, behind the steps already launched.
        """
        loop, block = self._loop, self.limits.block
        assert loop is not None
        loop.lengths[:] = [chunk.stop for chunk in chunks]
        if any(length % block <= 1 for length in loop.lengths):
            for name in self.caches:
                self.executor.set_state(f"table.{name}", self._tables(loop.rows, name))
        loop.steps.launch()

    def take(self) -> StepResult:
        """Wait for the oldest launched step, and return its result."""
        loop = self._loop
        assert loop is not None
        ids = loop.steps.take()
        further = loop.steps.take_further() if len(loop.outputs) > 1 else ()
        self._advanced = loop.rows
        return StepResult(ids, *further)

    def reset(self) -> None:
        """Forget the decode loop: the next step is fed by the host."""
        self._loop, self._advanced = None, []


def _suffix(rows: Rows[Generation]) -> str:
    """Return the suffix of the outputs: of those with penalties if a row needs them."""
    return ".penalised" if any(row.changes_logits for row in rows) else ""


def _outputs(name: str, rows: Rows[Generation]) -> list[str]:
    """Return the names of the outputs of a `StepResult`; ``name``: that of the sampled ids."""
    suffix = _suffix(rows)
    if any(row.asks_logprobs for row in rows):
        return [name + suffix, "logprobs" + suffix, "top_ids", "top_logprobs"]
    return [name + suffix]


def kv_pairs(start: int, count: int) -> int:
    """Return the number of (query, key) pairs of ``count`` tokens after ``start`` cached ones."""
    return count * start + count * (count + 1) // 2
