"""Decode steps of one request whose draft tokens the device accepts and predicts.

A step with draft tokens that the host feeds waits for the host, which must know what the step
before it sampled. Here the device appends the accepted tokens to the sequence, looks up the next
drafts, and places them (`graphllm.ops.drafts`). So the host launches a step before it takes the one
before it, and chooses nothing but the number of its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..compiler.plan import Plan
from ..runtime.decode_loop import DecodeLoop
from .acceptance_rates import AcceptanceRates
from .decode_feeds import live_values
from .generation import Generation
from .runner import Runner
from .sampler import ACCEPTED, PLACED, PROCESSED, STAGES
from .sampling_feeds import Row
from .scheduler import Scheduler
from .sequence import Chunk
from .speculation import Speculation, may_have_drafts
from .step_result import StepResult, result_outputs
from .step_times import StepTimes

_MAX_KEPT = 32  # decode loops
_MOST_IDLE = 8  # consecutive steps without drafts, after which steps are plain ones again


class _Loop(NamedTuple):
    """A decode loop for steps of up to as many rows as its plan takes.

    Attributes:
        starts: the feed ``q_start`` of the steps.
    """

    steps: DecodeLoop
    starts: np.ndarray


class DeviceDrafts:
    """Decode steps of one request at a time; see the module.

    Such steps begin when a prediction of the host pays (`prepare`, `begin`), and end when drafts
    have not paid for some steps.

    Args:
        runner: runs the steps.
        scheduler: reserves the blocks.
        speculation: chooses the numbers of drafts.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, speculation: Speculation) -> None:
        self._runner, self._scheduler, self._speculation = runner, scheduler, speculation
        self._rows = min(runner.limits.drafts + 1, runner.limits.step_sequences)
        self._supported = True  # until a plain loop turns out not to run ahead
        self._times, self._rates = StepTimes(), AcceptanceRates()
        self._loops: dict[tuple[int, tuple[str, ...]], _Loop] = {}  # by most rows, and outputs
        self._feeds = _Feeds(runner, self._rows)
        self._fed_rows = 0  # rows of the steps whose feeds the device has; 0: of none
        self._in_flight = deque[tuple[DecodeLoop, int]]()  # steps that were not taken, with rows
        self._row: Generation | None = None  # whose settings the device has
        self._outputs: tuple[str, ...] = ()
        self._predicted: tuple[int, ...] = ()  # drafts of the oldest step in flight, and more
        self._taken = 0  # rows of the step that was taken last
        self._first = True  # whether it was the first one
        self._idle = 0  # consecutive steps without drafts, up to the last launched
        self._unpredicted = 0  # consecutive steps without a prediction, up to the last taken

    @property
    def waiting(self) -> int:
        """Number of steps that were launched and not taken."""
        return len(self._in_flight)

    def plans(self) -> list[Plan]:
        """Return the plans of a request without log-probabilities."""
        names = ["sampled", ACCEPTED], [PLACED]
        return [self._plan(each, size) for each in names for size in self._sizes]

    @property
    def _sizes(self) -> list[int]:
        """Most rows of each loop, descending."""
        bits = range((self._rows - 1).bit_length(), -1, -1)
        return list(dict.fromkeys(self._runner.bucket(min(1 << b, self._rows)) for b in bits))

    def _plan(self, names: Sequence[str], size: int) -> Plan:
        return self._runner.plan(names, size, size, size)

    # -- begin
    def serves(self, rows: Sequence[Row]) -> bool:
        """Whether the rows are one request that the device can continue alone.

        The host chooses the tokens of beams, and those that processors change; penalties read the
        last tokens of each row, which only the host feeds.
        """
        row = rows[0]
        if not self._supported or len(rows) > 1 or not may_have_drafts(row):
            return False
        return not (row.processors or row.asks_candidates) and row.stages < PROCESSED

    def prepare(self, row: Row, launched: int) -> bool:
        """Write the settings for `begin` while plain steps run, if drafts pay after them.

        Args:
            row: a request that `serves` accepts.
            launched: number of plain steps in flight.

        Returns:
            Whether drafts pay.
        """
        assert isinstance(row, Generation)
        if not self._first_drafts(row, launched):
            return False
        if row is not self._row:
            self._row, self._rates = row, AcceptanceRates()
            self._outputs = *result_outputs("sampled", [row]), ACCEPTED + STAGES[row.stages]
        self._runner.write_settings(self._plan(self._outputs, 1), [row] * self._rows)
        return True

    def _first_drafts(self, row: Generation, launched: int) -> int:
        """Return the number of drafts of a first step, behind ``launched`` plain steps."""
        room = self._room(row, launched, len(row.sequence.tokens) + launched)
        return self._speculation.choose_ahead(row, launched, room, self._times)

    def begin(self, chunk: Chunk, row: Row) -> bool:
        """Launch a step, fed by the host, if drafts pay; return whether it was launched.

        Args:
            chunk: the step.
            row: a request that `serves` accepts.
        """
        if row is not self._row:  # plain steps come first
            self._supported = self._runner.lookahead != 0
            return False
        if not self.prepare(row, 0):
            return False
        self._runner.leave_loop()
        if (1, self._outputs) not in self._loops:
            self._make_loops(self._outputs)
        self._predicted = self._speculation.predict(self._row, self._rows - 1)
        self._feeds.write(self._row, chunk.stop, self._predicted)
        self._times.begin_drafts()
        self._first, self._idle, self._unpredicted, self._fed_rows = True, 0, 0, 0
        return self._launch(chunk, 0, self._first_drafts(self._row, 0))

    def _make_loops(self, outputs: tuple[str, ...]) -> None:
        """Make all loops with these outputs, while the device has nothing to do."""
        executor, sizes = self._runner.executor, self._sizes
        if len(self._loops) + len(sizes) > _MAX_KEPT:
            self._loops.clear()
        self._feeds.prepare(self._plan(outputs, 1), self._plan([PLACED], 1))
        for size in sizes:
            starts = np.zeros(size + 1, np.int32)
            steps = executor.decode_loop(
                self._plan(outputs, size), {"q_start": starts}, live_values(size), outputs[0],
                others=outputs[1:],
            )  # fmt: skip
            placed = executor.segments(self._plan([PLACED], size))
            placers = [partial(segment.run, None) for segment, _ in placed]
            steps.launchers = [*placers, *steps.launchers]
            self._loops[size, outputs] = _Loop(steps, starts)

    # -- steps
    def step(self, ahead: bool) -> tuple[list[Chunk], StepResult]:
        """Take the oldest step; ``ahead``: launch another one first, if possible.

        Returns:
            The chunk with the accepted drafts, and what their rows and the next one sampled. A
            request that has ended has no drafts.
        """
        if ahead:
            self._follow()
        return self._take()

    def _follow(self) -> None:
        """Launch the next step before the last one is taken.

        That is not possible if the answer or the context ends before, another sequence may be
        admitted, or blocks run out.
        """
        row = self._row
        if row is None or len(self._in_flight) != 1 or row.ends_after(1):
            return
        known, ahead = len(row.sequence.tokens), self._in_flight[0][1]
        most = known + ahead  # tokens before those that the step samples
        if max(self._idle, self._unpredicted) >= _MOST_IDLE or most > self._scheduler.context:
            return
        following = self._scheduler.following([Chunk(row.sequence, known - 1, known, True)])
        if following is not None:
            rates = self._rates.rates(self._room(row, 1, most))
            count = self._speculation.choose_of(rates, self._times)
            self._launch(following[0], ahead - 1, count)

    def _launch(self, chunk: Chunk, before: int, count: int) -> bool:
        """Launch a step; return False if there are no blocks for it.

        Args:
            chunk: its first row, if the step before it accepts no drafts.
            before: drafts of the step before it.
            count: number of drafts.
        """
        row = self._row
        if row is None or not self._scheduler.extend(chunk, before + count):
            return False
        self._feeds.update_tables(row)
        steps = self._feed_rows(count + 1)
        steps.launch()
        self._in_flight.append((steps, count + 1))
        self._idle = 0 if count else self._idle + 1
        return True

    def _room(self, row: Generation, launched: int, stop: int) -> int:
        """Return how many drafts a step can have.

        Args:
            row: the request.
            launched: number of steps in flight.
            stop: most tokens before those that the step samples.
        """
        left = row.sampling.max_tokens - row.count - launched - 1
        return max(0, min(self._rows - 1, left, self._scheduler.context - stop))

    def _feed_rows(self, rows: int) -> DecodeLoop:
        """Return the decode loop of a step, whose number of rows the device then has."""
        key = self._runner.bucket(rows), self._outputs
        steps, starts = self._loops[key]
        if rows != self._fed_rows:
            starts[:rows], starts[rows:] = 0, rows  # the last row has the queries of all
            steps.feed()
            self._runner.executor.header.set(live_values(rows))
            self._fed_rows = rows
        return steps

    def _take(self) -> tuple[list[Chunk], StepResult]:
        """Wait for the oldest step, and append the accepted drafts to the sequence."""
        row, (steps, rows) = self._row, self._in_flight.popleft()
        assert row is not None
        *values, predicted = [steps.take(), *steps.take_others()]
        result = StepResult.of(dict(zip(self._outputs, values)))
        drafts, first = self._predicted[: rows - 1], self._predicted[:1]
        known = predicted.tolist()
        self._predicted = tuple(known[: known.index(-1)] if -1 in known else known)
        self._taken, at = rows, row.sequence.computed
        chunks = [Chunk(row.sequence, at, at + 1, True, () if row.done else drafts)]
        row.drafted += len(chunks[0].drafts)
        sampled = result.ids.tolist()
        chunks, kept = self._speculation.accept(chunks, sampled)
        hits = len(kept) - 1 if rows > 1 else int(first == (sampled[0],))
        self._rates.note(max(rows - 1, 1), hits)
        self._unpredicted = 0 if first else self._unpredicted + 1
        return chunks, result.at(kept)

    def note_drafts(self, seconds: float) -> None:
        """Note how long after the step before it the step that was taken last ended."""
        if not self._first:  # the first one waited for its feeds
            self._times.note(self._taken, True, seconds)
        self._first = False

    def note_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Note the time of a plain step of a request that `serves` accepts."""
        self._times.note(1, False, seconds)

    def reset(self) -> None:
        """Forget launched steps, and what was fed."""
        self._in_flight.clear()
        self._loops.clear()
        self._row = None
        self._feeds.forget()


class _Feeds:
    """What the host feeds at the first of a series of steps: arrays that are filled again.

    Args:
        runner: runs the steps.
        rows: most rows of a step.
    """

    def __init__(self, runner: Runner, rows: int) -> None:
        limits, manager = runner.limits, runner.manager
        self._buffers, self._bind = runner.executor.buffers, runner.executor.bind
        self._arrays = {
            "draft.ids": np.full(limits.drafts, -1, np.int32),
            "draft.tokens": np.zeros(limits.context + limits.drafts + 1, np.int32),
            "draft.progress": np.zeros(2, np.int32),
            "prefix_len": np.zeros(rows, np.int32),
            "rows": np.arange(rows, dtype=np.int32),
        }
        self._tables = {name: np.zeros((rows, manager.width), np.int32) for name in manager.pools}
        self._writers: list[Callable[[], None]] = []
        self._table_writers: list[Callable[[], None]] = []
        self._row: Generation | None = None  # whose first tokens the array has
        self._filled = 0  # number of these tokens

    def prepare(self, *plans: Plan) -> None:
        """Look up the buffers of the plans, and write the arrays."""
        names = set[str]()
        for plan in plans:
            self._bind(plan)
            names |= plan.leaves.keys()
        arrays = {name: each for name, each in self._arrays.items() if name in names}
        tables = {f"table.{name}": each for name, each in self._tables.items()}
        self._writers = self._buffers.writers(arrays)
        self._table_writers = self._buffers.writers(tables)
        for call in (*self._writers, *self._table_writers):
            call()

    def write(self, row: Generation, length: int, drafts: tuple[int, ...]) -> None:
        """Write what `ops.place_drafts` reads of a sequence with ``length`` tokens."""
        arrays, sequence = self._arrays, row.sequence
        first = self._filled if row is self._row else 0
        arrays["draft.tokens"][first:length] = sequence.tokens[first:length]
        self._row, self._filled = row, length
        arrays["draft.ids"][:] = -1
        arrays["draft.ids"][: len(drafts)] = drafts
        arrays["draft.progress"][:] = length, sequence.prompt_tokens
        arrays["prefix_len"][:] = sequence.prefix
        for call in self._writers:
            call()
        self._write_tables(row)

    def update_tables(self, row: Generation) -> None:
        """Write the block tables of the sequence if they have changed, in stream order."""
        own = row.blocks.tables
        if not all(np.array_equal(table[0], own[name]) for name, table in self._tables.items()):
            self._write_tables(row)

    def _write_tables(self, row: Generation) -> None:
        for name, table in self._tables.items():
            table[:] = row.blocks.tables[name]
        for call in self._table_writers:
            call()

    def forget(self) -> None:
        """Forget which tokens are filled in."""
        self._row = None
