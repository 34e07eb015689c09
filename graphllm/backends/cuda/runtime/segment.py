"""Segments of steps on a GPU: launch sequences, CUDA graphs and timed runs.

Imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ... import TimestampLog
from .launch import Gpu, LiveHeader
from .memory import Buffer, allocating
from .source import SUPPORT, Function, timed_build
from .timestamps import TIMESTAMPS, ends_and_starts
from .work import HostCall, Launch, Work

_THREADS = 256  # of the kernels that handle timestamps
Load = Callable[[Sequence[Function]], None]


class LaunchSequence:
    """Launches and host calls in order.

    If ``captured``, each group of consecutive launches is replayed as one CUDA graph from the
    second run on. The first run launches them one by one, because it may still load functions.
    """

    def __init__(self, gpu: Gpu, work: Sequence[Work], captured: bool) -> None:
        self._gpu, self._capture_next, self.runs = gpu, captured, 0
        self.captured = False
        self._submissions: list[list[Callable[[], None]] | Callable[[], None]] = []
        for each in work:
            if isinstance(each, HostCall):
                self._submissions.append(each.run)
                continue
            if 0 in each.grid:
                continue
            if not self._submissions or not isinstance(self._submissions[-1], list):
                self._submissions.append([])
                # Live values and inputs must be complete before the first launch starts.
                each = replace(each, programmatic=False)
            self._submissions[-1].append(gpu.prepare(each))  # type: ignore[union-attr]

    def __call__(self) -> None:
        if self._capture_next and self.runs == 1:
            self._submissions = [
                self._capture(p) if isinstance(p, list) else p for p in self._submissions
            ]
            self.captured = True
        for submission in self._submissions:
            if isinstance(submission, list):
                for launch in submission:
                    launch()
            else:
                submission()
        self.runs += 1

    @property
    def submissions(self) -> int:
        return sum(len(p) if isinstance(p, list) else 1 for p in self._submissions)

    def _capture(self, launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        stream = self._gpu.stream
        with allocating(f"a CUDA graph of {len(launches)} launches"):
            stream.begin_capture()
            try:
                for launch in launches:
                    launch()
            finally:
                graph = stream.end_capture()
            graph.upload(stream)  # takes its memory now, not at the first launch
        return lambda: graph.launch(stream)


class TimedSequence:
    """Steps in their timed build, whose kernels record when their step started and ended.

    The timestamps of a run go to a ring in device memory, so timed runs are replayed, overlap and
    run ahead of the host as others do.
    """

    RING_SIZE = 256  # runs whose timestamps are kept until they are read

    def __init__(
        self, gpu: Gpu, work: Sequence[Sequence[Work]], captured: bool, load: Load
    ) -> None:
        self._gpu, self._steps = gpu, len(work)
        size = TIMESTAMPS.itemsize * (len(work) + 1)  # of each step, and of the start of the run
        self._times, self._count = Buffer(size, gpu.stream), Buffer(8, gpu.stream)
        self._ring = Buffer(size * self.RING_SIZE, gpu.stream)
        self._log, self._read, self._runs = TimestampLog(), 0, 0
        own = [self._timestamped(w, i) for i, part in enumerate(work, 1) for w in part]
        load([w.function for w, *_ in own if isinstance(w, Launch)])
        times = self._times.address
        begin = self._support("begin_timestamps", times, len(work), threads=_THREADS)
        keep = self._support(
            "keep_timestamps", times, len(work), self._ring.address, self.RING_SIZE,
            self._count.address, threads=_THREADS,
        )  # fmt: skip
        self.sequence = LaunchSequence(
            gpu, [begin, *(w for each in own for w in each), keep], captured
        )

    def _timestamped(self, work: Work, step: int) -> list[Work]:
        """A step's work, which records its timestamps."""
        place = self._times.address + TIMESTAMPS.itemsize * step
        if isinstance(work, HostCall):
            return [work, self._support("record_end", place)]
        function = Function(timed_build(work.function.module), work.function.name)
        return [replace(work, function=function, args=(*work.args, place))]

    @staticmethod
    def _support(name: str, *args: int, threads: int = 1) -> Launch:
        return Launch(SUPPORT[name], (1,), (threads,), args, programmatic=False)

    def recording_to(self, log: TimestampLog) -> Callable[[], None]:
        """The function that runs the steps once and records their times in ``log``."""
        if log is not self._log or self._runs - self._read == self.RING_SIZE:
            self._collect()
            self._log, log.collect = log, self._collect
        return self._run

    def _run(self) -> None:
        self._runs += 1
        self.sequence()

    def _collect(self) -> None:
        """Wait for the runs since the last call, and add their times to the log."""
        if self._read == self._runs:
            return
        self._gpu.use()
        recorded = self._ring[:].view(TIMESTAMPS).reshape(self.RING_SIZE, self._steps + 1)
        offset = self._gpu.clock_offset()
        for run in range(self._read, self._runs):
            ends, starts = ends_and_starts(recorded[run % self.RING_SIZE])
            self._log.runs.append((ends + offset, starts + offset))
        self._read = self._runs


class Segment:
    """Consecutive steps on one GPU.

    Args:
        gpu: the GPU.
        work: launches and host calls of each step.
        live: returns the live values, None if no step reads any.
        captured: whether launches are replayed from CUDA graphs.
        load: loads the modules of functions, and compiles those that are not cached.
        keep: objects that must live as long as the segment, such as operands.
    """

    def __init__(
        self,
        gpu: Gpu,
        work: Sequence[Sequence[Work]],
        live: Callable[[], LiveHeader | None],
        captured: bool,
        load: Load,
        keep: object,
    ) -> None:
        self._gpu, self._work, self._live, self._captured = gpu, work, live, captured
        self._load, self._keep = load, keep
        self._plain = LaunchSequence(gpu, [w for part in work for w in part], captured)
        self._timed: TimedSequence | None = None

    @property
    def submissions(self) -> int:
        """Number of graphs, launches and host calls that a run enqueues."""
        return self._plain.submissions

    @property
    def work(self) -> Sequence[Sequence[Work]]:
        """Launches and host calls of each step."""
        return self._work

    @property
    def timed(self) -> TimedSequence | None:
        """The timed build of the steps, once a run has been timed."""
        return self._timed

    @property
    def replays(self) -> bool:
        """Whether launches are already replayed from CUDA graphs."""
        return self._plain.captured

    def run(self, log: TimestampLog | None) -> None:
        """Enqueue all steps; with a ``log``, in their timed build."""
        self._gpu.use()
        values = self._live()
        if values is not None:
            values.update()
        if log is not None and self._timed is None:
            self._timed = TimedSequence(self._gpu, self._work, self._captured, self._load)
        run = self._plain if log is None or self._timed is None else self._timed.recording_to(log)
        if self._captured:
            run()
        else:
            self._gpu.run_throttled(run)
