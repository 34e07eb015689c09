"""Segments of steps on a GPU: launch sequences, CUDA graphs and timed runs.

Imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from cupy.cuda import Graph

from ....graph.tensor import Dim
from ... import Header, TimestampLog
from .block_times import BlockTable
from .launch import Gpu, LiveHeader
from .memory import Buffer, allocating
from .source import SUPPORT, Function, block_timed_build, timed_build
from .timestamps import TIMESTAMPS, ends_and_starts
from .work import HostCall, Launch, Work

MAX_GRAPHS = 4  # kept of the same calls, for different numbers of rows
# Runs with the same numbers of rows before the one that captures them. A capture of a prefill step
# costs as much as two runs' launches, and its replay saves only little of the step's time.
RUNS_BEFORE_CAPTURE = 3
_THREADS = 256  # of the kernels that handle timestamps
LiveValue = Callable[[Dim], int]
Load = Callable[[Sequence[Launch]], None]


class ReplayedCalls:
    """Launches and library calls, which are replayed as one CUDA graph.

    A graph holds for the live numbers of rows that it was captured with. The first run with these
    numbers enqueues the calls one by one, because it may still load functions and choose
    algorithms. Launches alone, which depend on no number of rows, are captured by the second run.
    """

    def __init__(self, gpu: Gpu, live: LiveValue) -> None:
        self._gpu, self._live = gpu, live
        self._calls: list[Callable[[], None]] = []
        self._rows: dict[Dim, None] = {}  # dimensions that the calls depend on, in order
        # By numbers of rows: the graph, or the number of runs so far. The last used one is last.
        self._graphs: dict[tuple[int, ...], Graph | int] = {}
        self.replayed = False  # by the last run

    def add(self, work: Work) -> None:
        if isinstance(work, Launch):
            self._calls.append(self._gpu.prepare(work))
            return
        assert work.rows is not None
        self._calls.append(work.run)
        self._rows[work.rows] = None

    @property
    def submissions(self) -> int:
        """Number of graphs and calls that the last run enqueued."""
        return 1 if self.replayed else len(self._calls)

    def __call__(self) -> None:
        rows = tuple(map(self._live, self._rows))
        found = self._graphs.get(rows, 0)
        if found == (RUNS_BEFORE_CAPTURE if rows else 1):
            found = self._captured()
        self.replayed = not isinstance(found, int)
        self._graphs.pop(rows, None)
        self._graphs[rows] = found + 1 if isinstance(found, int) else found
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        if not isinstance(found, int):
            found.launch(self._gpu.stream)
            return
        for call in self._calls:
            call()

    def _captured(self) -> Graph:
        stream = self._gpu.stream
        with allocating(f"a CUDA graph of {len(self._calls)} launches"):
            try:
                stream.begin_capture()
                for call in self._calls:
                    call()
                graph = stream.end_capture()
            except BaseException:  # an interrupt, too: later launches would only be captured
                with suppress(Exception):  # the first error says why
                    if stream.is_capturing():
                        stream.end_capture()
                raise
            graph.upload(stream)  # takes its memory now, not at the first launch
        return graph


class LaunchSequence:
    """Launches and host calls in order; those between copies are `ReplayedCalls`."""

    def __init__(self, gpu: Gpu, work: Sequence[Work], live: LiveValue) -> None:
        self._parts: list[ReplayedCalls | Callable[[], None]] = []
        after_launch = False
        for each in work:
            if isinstance(each, Launch) and 0 in each.grid:
                continue
            if isinstance(each, HostCall) and each.rows is None:
                self._parts.append(each.run)
                after_launch = False
                continue
            if not self._parts or not isinstance(self._parts[-1], ReplayedCalls):
                self._parts.append(ReplayedCalls(gpu, live))
            if isinstance(each, Launch) and not after_launch:
                # Live values, inputs and results of host calls must be complete when it starts.
                each = replace(each, programmatic=False)
            after_launch = isinstance(each, Launch)
            self._parts[-1].add(each)  # type: ignore[union-attr]

    def __call__(self) -> None:
        for part in self._parts:
            part()

    @property
    def replayed(self) -> bool:
        """Whether the last run replayed CUDA graphs, copies apart."""
        return all(part.replayed for part in self._parts if isinstance(part, ReplayedCalls))

    @property
    def submissions(self) -> int:
        """Number of graphs, launches and host calls that the last run enqueued."""
        return sum(p.submissions if isinstance(p, ReplayedCalls) else 1 for p in self._parts)


class TimedSequence:
    """Steps in their timed build, whose kernels record when their step started and ended.

    The timestamps of a run go to a ring in device memory, so timed runs are replayed, overlap and
    run ahead of the host as others do. The times of thread blocks (``blocks``) are those of one
    run, which ends before the next one begins.
    """

    RING_SIZE = 256  # runs whose timestamps are kept until they are read

    def __init__(
        self, gpu: Gpu, work: Sequence[Sequence[Work]], live: LiveValue, load: Load, blocks: bool
    ) -> None:
        self._gpu, self._steps = gpu, len(work)
        self._table = BlockTable(work) if blocks else None
        self._blocks = Buffer(self._table.nbytes, gpu.stream) if self._table else None
        self._ring_size = 1 if blocks else self.RING_SIZE
        size = TIMESTAMPS.itemsize * (len(work) + 1)  # of each step, and of the start of the run
        self._times, self._count = Buffer(size, gpu.stream), Buffer(8, gpu.stream)
        self._ring = Buffer(size * self._ring_size, gpu.stream)
        self._log, self._read, self._runs = TimestampLog(), 0, 0
        own = [
            self._timestamped(each, step, index)
            for step, part in enumerate(work)
            for index, each in enumerate(part)
        ]
        load([w for w, *_ in own if isinstance(w, Launch)])
        times = self._times.address
        begin = self._support("begin_timestamps", times, len(work), threads=_THREADS)
        keep = self._support(
            "keep_timestamps", times, len(work), self._ring.address, self._ring_size,
            self._count.address, threads=_THREADS,
        )  # fmt: skip
        self.sequence = LaunchSequence(gpu, [begin, *(w for each in own for w in each), keep], live)

    def _timestamped(self, work: Work, step: int, index: int) -> list[Work]:
        """Work ``index`` of a step, which records its timestamps."""
        place = self._times.address + TIMESTAMPS.itemsize * (step + 1)
        if isinstance(work, HostCall):
            return [work, self._support("record_end", place)]
        build, args = timed_build, (*work.args, place)
        entries = self._table.find(step, index) if self._table else None
        if entries is not None and self._blocks is not None:
            build, args = block_timed_build, (*args, entries.argument(self._blocks.address))
        function = Function(build(work.function.module), work.function.name)
        return [replace(work, function=function, args=args)]

    @staticmethod
    def _support(name: str, *args: int, threads: int = 1) -> Launch:
        return Launch(SUPPORT[name], (1,), (threads,), args, programmatic=False)

    def recording_to(self, log: TimestampLog) -> Callable[[], None]:
        """The function that runs the steps once and records their times in ``log``."""
        if log is not self._log or self._runs - self._read == self._ring_size:
            self._collect()
            self._log, log.collect = log, self._collect
        return self._run

    def _run(self) -> None:
        self._runs += 1
        try:
            self.sequence()
        except BaseException:  # the device may have counted the run or not
            self._read = self._runs = int(self._count[:].view(np.int64)[0])
            raise

    def _collect(self) -> None:
        """Wait for the runs since the last call, and add their times to the log."""
        if self._read == self._runs:
            return
        self._gpu.use()
        recorded = self._ring[:].view(TIMESTAMPS).reshape(self._ring_size, self._steps + 1)
        offset = self._gpu.clock_offset()
        for run in range(self._read, self._runs):
            ends, starts = ends_and_starts(recorded[run % self._ring_size])
            self._log.runs.append((ends + offset, starts + offset))
        if self._table and self._blocks and self._log.blocks is not None:
            self._log.blocks.append(self._table.read(self._blocks[:], offset))
        self._read = self._runs


class Segment:
    """Consecutive steps on one GPU.

    Args:
        gpu: the GPU.
        work: launches and host calls of each step.
        header: the live values.
        on_device: returns their copy on the GPU, None if no step reads any.
        throttled: whether a run waits for the last but one, since a run takes long.
        load: loads the modules of launches, and compiles those that are not cached.
        keep: objects that must live as long as the segment, such as operands.
    """

    def __init__(
        self,
        gpu: Gpu,
        work: Sequence[Sequence[Work]],
        header: Header,
        on_device: Callable[[], LiveHeader | None],
        throttled: bool,
        load: Load,
        keep: object,
    ) -> None:
        self._gpu, self._work, self._header, self._on_device = gpu, work, header, on_device
        self._throttled, self._load, self._keep = throttled, load, keep
        self._plain = LaunchSequence(gpu, [w for part in work for w in part], header.live)
        self._timed: dict[bool, TimedSequence] = {}  # by whether blocks are timed, too

    @property
    def submissions(self) -> int:
        """Number of graphs, launches and host calls that the last run enqueued."""
        return self._plain.submissions

    @property
    def work(self) -> Sequence[Sequence[Work]]:
        """Launches and host calls of each step."""
        return self._work

    @property
    def timed(self) -> TimedSequence | None:
        """The timed build of the steps, once a run has been timed."""
        return self._timed.get(False)

    @property
    def replays(self) -> bool:
        """Whether the last run replayed CUDA graphs, copies apart."""
        return self._plain.replayed

    def run(self, log: TimestampLog | None) -> None:
        """Enqueue all steps; with a ``log``, in the timed build that records what it has."""
        self._gpu.use()
        values = self._on_device()
        if values is not None:
            values.update()
        run = (
            self._plain
            if log is None
            else self._timed_build(log.blocks is not None).recording_to(log)
        )
        if self._throttled:
            self._gpu.run_throttled(run)
        else:
            run()

    def _timed_build(self, blocks: bool) -> TimedSequence:
        if blocks not in self._timed:
            self._timed[blocks] = TimedSequence(
                self._gpu, self._work, self._header.live, self._load, blocks
            )
        return self._timed[blocks]
