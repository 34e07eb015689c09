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

from ...errors import GraphllmError
from .. import Header
from .device import Arg, Call, Launch, Work
from .memory import OUT_OF_MEMORY, Buffer, no_room, room
from .source import Function, Module, image, kept, module, target

_SUPPORT = module("support")
_EARLY, _MAX_DYNAMIC_SHARED = 6, 48 << 10  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    return (*sizes, 1, 1)[:3]


def _bytes(arg: Arg) -> bytes:
    """An argument as the driver reads it, at least as wide as any parameter of its kind."""
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, float):
        return struct.pack("<f", arg)
    return struct.pack("<q" if arg < 1 << 63 else "<Q", arg)


class Prepared:
    """A launch with everything in place: calling it costs one call of the driver."""

    def __init__(self, launch: Launch, handle: int, gpu: Gpu) -> None:
        self._go, self._handle = gpu.library.cuLaunchKernelEx, ctypes.c_void_p(handle)
        data = [_bytes(arg) for arg in launch.args]
        self._values = [ctypes.create_string_buffer(d, max(8, len(d))) for d in data]
        addresses = [ctypes.addressof(v) for v in self._values]
        self._params = (ctypes.c_void_p * max(1, len(data)))(*addresses)
        self._attribute = _Attribute(_EARLY, 0)
        self._attribute.value[0] = 1
        early = launch.early and gpu.capability >= (9, 0)
        self._config = _Config(
            _three(launch.grid), _three(launch.block), launch.shared, gpu.stream.ptr,
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
            return no_room(what)
        return GraphllmError(f"CUDA error {status} at {what}")


class _LiveValues:
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
        self._gpu.prepared(launch)()


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

    def has(self, made: Module) -> bool:
        return made in self._modules

    def kept(self, made: Module) -> bool:
        """Whether the module need not be compiled."""
        return kept(made, self.arch)

    def load(self, made: Module) -> Loaded:
        if made not in self._modules:
            code, loaded = image(made, self.arch), Loaded()
            with room(f"the kernels of {made}", len(code)):
                loaded.load(code)
            self._modules[made] = loaded
        return self._modules[made]

    def function(self, wanted: Function) -> Any:
        if wanted not in self._functions:
            loaded = self.load(wanted.module)
            with room(f"the kernel {wanted.name} of {wanted.module}"):
                self._functions[wanted] = loaded.get_function(wanted.name)
        return self._functions[wanted]

    def prepared(self, launch: Launch) -> Callable[[], None]:
        """The launch, ready to be called again and again."""
        function = self.function(launch.function)
        if launch.shared > _MAX_DYNAMIC_SHARED:
            what = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            have = driver.funcGetAttribute(what, function.ptr)
            if have < launch.shared:
                driver.funcSetAttribute(function.ptr, what, launch.shared)
        return Prepared(launch, function.ptr, self)

    def transfer(self, source: int, target: int, nbytes: int, to_host: bool) -> None:
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)
        if to_host:
            self.stream.synchronize()

    def seconds(self, work: Callable[[], None], rounds: int) -> list[float]:
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

    def paced(self, run: Callable[[], None]) -> None:
        """A run that takes the GPU long, once the one before the last is over: what is on the
        stream cannot be taken back, Ctrl-C waits for it, and progress is told too early."""
        end = self._ends[self._long % len(self._ends)]
        end.synchronize()
        run()
        end.record(self.stream)
        self._long += 1

    def header(self, buffer: Buffer, header: Header) -> _LiveValues:
        return _LiveValues(buffer, header, self)


class _Sequence:
    """Launches and calls in order. From the second run on, launches that stand together are one
    CUDA graph, if ``captured``; the first run launches them, since functions may still be loaded
    then."""

    def __init__(self, gpu: Gpu, work: Sequence[Work], captured: bool) -> None:
        self._gpu, self._capture_next, self.runs = gpu, captured, 0
        self.captured = False
        self._pieces: list[list[Callable[[], None]] | Callable[[], None]] = []
        for each in work:
            if isinstance(each, Call):
                self._pieces.append(each.run)
                continue
            if 0 in each.grid:
                continue
            if not self._pieces or not isinstance(self._pieces[-1], list):
                self._pieces.append([])
                each = replace(each, early=False)  # counts and inputs are there before it begins
            self._pieces[-1].append(gpu.prepared(each))  # type: ignore[union-attr]

    def __call__(self) -> None:
        if self._capture_next and self.runs == 1:
            self._pieces = [self._capture(p) if isinstance(p, list) else p for p in self._pieces]
            self.captured = True
        for piece in self._pieces:
            if isinstance(piece, list):
                for launch in piece:
                    launch()
            else:
                piece()
        self.runs += 1

    @property
    def pieces(self) -> int:
        return sum(len(p) if isinstance(p, list) else 1 for p in self._pieces)

    def _capture(self, launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        stream = self._gpu.stream
        with room(f"a CUDA graph of {len(launches)} launches"):
            stream.begin_capture()
            try:
                for launch in launches:
                    launch()
            finally:
                graph = stream.end_capture()
            graph.upload(stream)  # takes its memory now, not at the first launch
        return lambda: graph.launch(stream)


class Segment:
    """Consecutive steps: a list of launches and calls for each. ``keep``: what they point at."""

    def __init__(
        self,
        gpu: Gpu,
        work: Sequence[Sequence[Work]],
        live: Callable[[], _LiveValues | None],
        captured: bool,
        keep: object,
    ) -> None:
        self._gpu, self._work, self._live, self._captured = gpu, work, live, captured
        self._keep = keep
        self._plain = _Sequence(gpu, [w for part in work for w in part], captured)
        self._stamped: tuple[_Sequence, Buffer] | None = None

    @property
    def pieces(self) -> int:
        """How often the host puts something on the stream in a run: graphs, launches, calls."""
        return self._plain.pieces

    @property
    def replays(self) -> bool:
        """Whether launches are replayed from CUDA graphs by now."""
        return self._plain.captured

    def run(self, times: np.ndarray | None) -> None:
        """Put all steps on the stream; with ``times``, wait for them and read the GPU's clock."""
        self._gpu.use()
        values = self._live()
        if values is not None:
            values.update()
        if times is None:
            if self._captured:
                self._plain()
            else:
                self._gpu.paced(self._plain)
            return
        if self._stamped is None:
            self._stamped = self._with_stamps()
        sequence, stamps = self._stamped
        sequence()
        read = stamps[:].view(np.int64)
        times[:] = read + (time.perf_counter_ns() - int(read[-1]))  # ends now, on the host's clock

    def _with_stamps(self) -> tuple[_Sequence, Buffer]:
        """The same steps with a kernel of one thread after each that notes the time."""
        stamps = Buffer(8 * (len(self._work) + 1), self._gpu.stream)

        def stamp(index: int) -> Launch:
            return Launch(_SUPPORT["stamp"], (1,), (1,), (stamps.address + 8 * index,), early=False)

        work: list[Work] = [stamp(0)]
        for index, part in enumerate(self._work, 1):
            work += [*(replace(w, early=False) if isinstance(w, Launch) else w for w in part)]
            work.append(stamp(index))
        sequence = _Sequence(self._gpu, work, self._captured)
        if self._plain.runs:  # then all functions are loaded, and a graph can be made at once
            self._gpu.prepared(stamp(0))()
            sequence.runs = 1
        return sequence, stamps
