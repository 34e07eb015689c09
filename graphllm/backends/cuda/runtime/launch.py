"""What runs on the GPU: modules, launches through the driver, CUDA graphs. Imported when a device
is opened."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from cupy.cuda import Device, Event, Stream, get_elapsed_time, runtime
from cupy.cuda.function import Module as Loaded
from cupy_backends.cuda.api import driver

from ....debug import debug
from ....errors import GraphllmError
from ... import Header, TimestampLog
from .memory import OUT_OF_MEMORY, Buffer, allocating, out_of_memory
from .source import (
    Function,
    Module,
    is_cached,
    load_or_compile,
    module,
    recompile,
    target,
    timed_build,
)
from .timestamps import TIMESTAMPS, ends_and_starts
from .work import Arg, HostCall, Launch, Work

_SUPPORT = module("support")
_THREADS = 256  # of the kernels that handle times
Load = Callable[[Sequence[Function]], None]
_PROGRAMMATIC, _MAX_DYNAMIC_SHARED = (
    6,
    48 << 10,
)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


def _dim3(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, 1, 1)[:3]


def _argument_bytes(arg: Arg) -> bytes:
    """An argument as the driver reads it, at least as wide as any parameter of its kind."""
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, float):
        return struct.pack("<f", arg)
    return struct.pack("<q" if arg < 1 << 63 else "<Q", arg)


class PreparedLaunch:
    """A launch with everything in place: calling it costs one call of the driver."""

    def __init__(self, launch: Launch, handle: int, gpu: Gpu) -> None:
        self._go, self._handle = gpu.library.cuLaunchKernelEx, ctypes.c_void_p(handle)
        data = [_argument_bytes(arg) for arg in launch.args]
        self._values = [ctypes.create_string_buffer(d, max(8, len(d))) for d in data]
        addresses = [ctypes.addressof(v) for v in self._values]
        self._params = (ctypes.c_void_p * max(1, len(data)))(*addresses)
        self._attribute = _Attribute(_PROGRAMMATIC, 0)
        self._attribute.value[0] = 1
        early = launch.early and gpu.capability >= (9, 0)
        self._config = _Config(
            _dim3(launch.grid), _dim3(launch.block), launch.shared, gpu.stream.ptr,
            ctypes.pointer(self._attribute), int(early),
        )  # fmt: skip
        self._reference = ctypes.byref(self._config)
        self._what = f"{launch.function.name} <<<{launch.grid}, {launch.block}, {launch.shared}>>>"

    def __call__(self) -> None:
        status = self._go(self._reference, self._handle, self._params, None)
        if status:
            raise self._failure(status)

    def _failure(self, status: int) -> GraphllmError:
        what = f"the launch of {self._what}"
        if status == OUT_OF_MEMORY:
            return out_of_memory(what)
        return GraphllmError(f"CUDA error {status} at {what}")


class LiveHeader:
    """A header's values in device memory. A kernel writes them, since its arguments are copied when
    it is launched: the host may go on to the next run at once."""

    def __init__(self, buffer: Buffer, header: Header, gpu: Gpu) -> None:
        self.address, self.header = buffer.address, header
        self._buffer, self._gpu = buffer, gpu
        self._sent = header.values.tobytes()
        self._send(self._sent)

    def update(self) -> None:
        """Send the values, if they have changed."""
        values = self.header.values.tobytes()
        if values != self._sent:
            self._send(values)
            self._sent = values

    def _send(self, values: bytes) -> None:
        launch = Launch(_SUPPORT["set_header"], (1,), (1,), (self.address, values), early=False)
        self._gpu.prepare(launch)()


class Gpu:
    """A GPU's stream and the modules on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.use()
        number = int(Device(index).compute_capability)
        self.capability = divmod(number, 10)
        self.processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
        self.arch = target(self.capability)
        self.stream = Stream(non_blocking=True)
        self.library = ctypes.CDLL("libcuda.so.1")
        self._modules: dict[Module, Loaded] = {}
        self._functions: dict[Function, Any] = {}
        self._ends = [Event(disable_timing=True) for _ in range(2)]  # of long runs, in turns
        self._long = 0

    def use(self) -> None:
        """Make this GPU the calling thread's."""
        runtime.setDevice(self.index)

    def is_loaded(self, made: Module) -> bool:
        return made in self._modules

    def is_cached(self, made: Module) -> bool:
        """Whether the module need not be compiled."""
        return is_cached(made, self.arch)

    def load(self, made: Module) -> Loaded:
        if made not in self._modules:
            code, loaded = load_or_compile(made, self.arch), Loaded()
            with allocating(f"the kernels of {made}", len(code)):
                try:
                    loaded.load(code)
                except driver.CUDADriverError as error:
                    if error.status == OUT_OF_MEMORY:
                        raise
                    debug(1, f"{made}: the driver refuses the code of the cache: {error}")
                    loaded.load(recompile(made, self.arch))
            self._modules[made] = loaded
        return self._modules[made]

    def function(self, wanted: Function) -> Any:
        if wanted not in self._functions:
            loaded = self.load(wanted.module)
            with allocating(f"the kernel {wanted.name} of {wanted.module}"):
                self._functions[wanted] = loaded.get_function(wanted.name)
        return self._functions[wanted]

    def prepare(self, launch: Launch) -> Callable[[], None]:
        """The launch, ready to be called again and again."""
        function = self.function(launch.function)
        if launch.shared > _MAX_DYNAMIC_SHARED:
            what = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            have = driver.funcGetAttribute(what, function.ptr)
            if have < launch.shared:
                driver.funcSetAttribute(function.ptr, what, launch.shared)
        return PreparedLaunch(launch, function.ptr, self)

    def transfer(self, source: int, target: int, nbytes: int, to_host: bool) -> None:
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)
        if to_host:
            self.stream.synchronize()

    def time_runs(self, work: Callable[[], None], rounds: int) -> list[float]:
        """What ``work`` takes on the GPU, by its own events: each of ``rounds`` runs after two."""
        found = []
        for _ in range(rounds + 2):
            start, end = Event(), Event()
            start.record(self.stream)
            work()
            end.record(self.stream)
            end.synchronize()
            found.append(get_elapsed_time(start, end) / 1e3)
        return found[2:]

    def clock_offset(self) -> int:
        """What to add to the GPU's clock to have that of `time.perf_counter_ns`: by the reading of
        the GPU's that took the host the least time."""
        place = Buffer(8, self.stream)
        read = self.prepare(
            Launch(_SUPPORT["read_clock"], (1,), (1,), (place.address,), early=False)
        )
        found = []
        for _ in range(8):
            before = time.perf_counter_ns()
            read()
            self.stream.synchronize()
            after = time.perf_counter_ns()
            (there,) = place[:].view(np.int64)
            found.append((after - before, (before + after) // 2 - int(there)))
        return min(found)[1]

    def run_throttled(self, run: Callable[[], None]) -> None:
        """A run that takes the GPU long, once the one before the last is over: what is on the
        stream cannot be taken back, Ctrl-C waits for it, and progress is told too early."""
        end = self._ends[self._long % len(self._ends)]
        end.synchronize()
        run()
        end.record(self.stream)
        self._long += 1

    def header(self, buffer: Buffer, header: Header) -> LiveHeader:
        return LiveHeader(buffer, header, self)


class LaunchSequence:
    """Launches and calls in order. From the second run on, launches that stand together are one
    CUDA graph, if ``captured``; the first run launches them, since functions may still be loaded
    then."""

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
                each = replace(each, early=False)  # counts and inputs are there before it begins
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
    """Steps in their timed build: each kernel notes when its step started and ended, and a run's
    times go to a ring in the GPU's memory. So timed runs are replayed, overlap and run ahead as
    others do."""

    RING_SIZE = 256  # runs whose times are kept until they are read

    def __init__(
        self, gpu: Gpu, work: Sequence[Sequence[Work]], captured: bool, load: Load
    ) -> None:
        self._gpu, self._steps = gpu, len(work)
        size = TIMESTAMPS.itemsize * (len(work) + 1)  # of each step, and of the beginning
        self._times, self._count = Buffer(size, gpu.stream), Buffer(8, gpu.stream)
        self._kept = Buffer(size * self.RING_SIZE, gpu.stream)
        self._log, self._read, self._runs = TimestampLog(), 0, 0
        own = [self._timestamped(w, i) for i, part in enumerate(work, 1) for w in part]
        load([w.function for w, *_ in own if isinstance(w, Launch)])
        times = self._times.address
        begin = self._support("begin_times", times, len(work), threads=_THREADS)
        keep = self._support(
            "keep_times", times, len(work), self._kept.address, self.RING_SIZE, self._count.address,
            threads=_THREADS,
        )  # fmt: skip
        self._sequence = LaunchSequence(
            gpu, [begin, *(w for each in own for w in each), keep], captured
        )

    def _timestamped(self, work: Work, step: int) -> list[Work]:
        """A step's work, with a place for its times."""
        place = self._times.address + TIMESTAMPS.itemsize * step
        if isinstance(work, HostCall):
            return [work, self._support("note_end", place)]
        function = Function(timed_build(work.function.module), work.function.name)
        return [replace(work, function=function, args=(*work.args, place))]

    @staticmethod
    def _support(name: str, *args: int, threads: int = 1) -> Launch:
        return Launch(_SUPPORT[name], (1,), (threads,), args, early=False)

    def recording_to(self, log: TimestampLog) -> Callable[[], None]:
        """A run whose times go to ``log``."""
        if log is not self._log or self._runs - self._read == self.RING_SIZE:
            self._settle()
            self._log, log.collect = log, self._settle
        return self._run

    def _run(self) -> None:
        self._runs += 1
        self._sequence()

    def _settle(self) -> None:
        """Give the log the times of the runs since the last call, once they are over."""
        if self._read == self._runs:
            return
        self._gpu.use()
        ring = self._kept[:].view(TIMESTAMPS).reshape(self.RING_SIZE, self._steps + 1)
        shift = self._gpu.clock_offset()
        for run in range(self._read, self._runs):
            ends, starts = ends_and_starts(ring[run % self.RING_SIZE])
            self._log.runs.append((ends + shift, starts + shift))
        self._read = self._runs


class Segment:
    """Consecutive steps: a list of launches and calls for each. ``load``: has functions ready,
    telling of those that must be compiled; ``keep``: what the steps point at."""

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
        """How often the host puts something on the stream in a run: graphs, launches, calls."""
        return self._plain.submissions

    @property
    def replays(self) -> bool:
        """Whether launches are replayed from CUDA graphs by now."""
        return self._plain.captured

    def run(self, log: TimestampLog | None) -> None:
        """Put all steps on the stream; with a ``log``, in their timed build."""
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
