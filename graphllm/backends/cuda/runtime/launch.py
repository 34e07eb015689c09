"""One GPU: loaded modules, and launches through the driver API.

Imported when a device is opened.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cupy.cuda import Device, Event, Stream, get_elapsed_time, runtime
from cupy.cuda.function import Module as Loaded
from cupy_backends.cuda.api import driver

from ....debug import debug
from ....errors import GraphllmError
from ... import Header
from .memory import OUT_OF_MEMORY, Buffer, allocating, out_of_memory
from .source import (
    SUPPORT,
    Function,
    Module,
    is_cached,
    load_or_compile,
    recompile,
    target,
)
from .work import Arg, Launch

_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


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
    """An argument as the driver reads it, at least as wide as any parameter of its type."""
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, float):
        return struct.pack("<f", arg)
    return struct.pack("<q" if arg < 1 << 63 else "<Q", arg)


class PreparedLaunch:
    """A launch with its arguments in place; calling it costs one driver call."""

    def __init__(self, launch: Launch, handle: int, gpu: Gpu) -> None:
        self._library, self._handle = gpu.library, ctypes.c_void_p(handle)
        self._go = self._library.cuLaunchKernelEx
        data = [_argument_bytes(arg) for arg in launch.args]
        self._values = [ctypes.create_string_buffer(d, max(8, len(d))) for d in data]
        addresses = [ctypes.addressof(v) for v in self._values]
        self._params = (ctypes.c_void_p * max(1, len(data)))(*addresses)
        values: dict[int, tuple[int, ...]] = {}
        if launch.programmatic and gpu.capability >= (9, 0):
            values[_PROGRAMMATIC] = (1,)
        if launch.cluster > 1:
            values[_CLUSTER] = (1, 1, launch.cluster)
        self._attributes = (_Attribute * 2)(*(_Attribute(k, 0, v) for k, v in values.items()))
        self._config = _Config(
            _dim3(launch.grid), _dim3(launch.block), launch.shared, gpu.stream.ptr,
            self._attributes, len(values),
        )  # fmt: skip
        self._reference = ctypes.byref(self._config)
        self._what = f"{launch.function.name} <<<{launch.grid}, {launch.block}, {launch.shared}>>>"

    def __call__(self) -> None:
        status = self._go(self._reference, self._handle, self._params, None)
        if status:
            raise self._failure(status)

    def argument(self, index: int) -> memoryview:
        """The bytes of an argument, which may be changed between calls."""
        return memoryview(self._values[index])

    def count_clusters(self, found: ctypes.c_int) -> int:
        """Store the number of clusters that the GPU runs at a time; return CUDA's status."""
        count = self._library.cuOccupancyMaxActiveClusters
        return int(count(ctypes.byref(found), self._handle, self._reference))

    def _failure(self, status: int) -> GraphllmError:
        what = f"the launch of {self._what}"
        if status == OUT_OF_MEMORY:
            return out_of_memory(what)
        return GraphllmError(f"CUDA error {status} at {what}")


class LiveHeader:
    """A header's live values in device memory.

    A kernel writes them, because its arguments are copied at the launch: the host may change the
    header for the next run at once.
    """

    def __init__(self, buffer: Buffer, header: Header, gpu: Gpu) -> None:
        self.address, self.header, self._buffer = buffer.address, header, buffer
        args = buffer.address, header.values.tobytes()
        launch = Launch(SUPPORT["set_header"], (1,), (1,), args, programmatic=False)
        self._send = gpu.prepare(launch)
        self._sent, self._stale = np.frombuffer(self._send.argument(1), np.int64), False
        self._send()

    def update(self) -> None:
        """Send the values to the device if they have changed."""
        values = self.header.values
        if self._stale or (values != self._sent).any():
            self._stale = True  # until they are sent, also if that is interrupted
            self._sent[:] = values
            self._send()
            self._stale = False


class Gpu:
    """One GPU: its stream and its loaded modules."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.use()
        number = int(Device(index).compute_capability)
        self.capability = divmod(number, 10)
        self.processors = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
        self.arch = target(self.capability)
        self.stream = Stream(non_blocking=True)
        # Calls hold the GIL, as a launch takes microseconds. If they released it, a busy event loop
        # would take it, and each of hundreds of launches would wait for it.
        self.library = ctypes.PyDLL("libcuda.so.1")
        # Launches that are `mostly_shared` have their own instance of a module and its kernels: the
        # share of shared memory is an attribute of the function, and plans differ.
        self._modules: dict[tuple[Module, bool], Loaded] = {}
        self._functions: dict[tuple[Function, bool], Any] = {}
        self._ends = [Event(disable_timing=True) for _ in range(2)]  # of long runs, alternating
        self._long = 0

    def use(self) -> None:
        """Make this GPU the current device of the calling thread."""
        runtime.setDevice(self.index)

    def is_loaded(self, made: Module, mostly_shared: bool = False) -> bool:
        return (made, mostly_shared) in self._modules

    def is_cached(self, made: Module) -> bool:
        """Whether the disk cache has the module's machine code."""
        return is_cached(made, self.arch)

    def load(self, made: Module, mostly_shared: bool = False) -> Loaded:
        """The module; ``mostly_shared``: the instance for launches that are."""
        if not self.is_loaded(made, mostly_shared):
            code, loaded = load_or_compile(made, self.arch), Loaded()
            with allocating(f"the kernels of {made}", len(code)):
                try:
                    loaded.load(code)
                except driver.CUDADriverError as error:
                    if error.status == OUT_OF_MEMORY:
                        raise
                    debug(1, f"{made}: the driver rejects the cached code: {error}")
                    loaded.load(recompile(made, self.arch))
            self._modules[made, mostly_shared] = loaded
        return self._modules[made, mostly_shared]

    def function(self, wanted: Function, mostly_shared: bool = False) -> Any:
        """The kernel; ``mostly_shared`` as in `load`."""
        if (wanted, mostly_shared) not in self._functions:
            loaded = self.load(wanted.module, mostly_shared)
            with allocating(f"the kernel {wanted.name} of {wanted.module}"):
                self._functions[wanted, mostly_shared] = loaded.get_function(wanted.name)
        return self._functions[wanted, mostly_shared]

    def prepare(self, launch: Launch) -> PreparedLaunch:
        """The launch as a function that can be called repeatedly."""
        return PreparedLaunch(launch, self.prepared(launch), self)

    def prepared(self, launch: Launch) -> int:
        """The handle of the launch's kernel, which may use the launch's shared memory."""
        function = self.function(launch.function, launch.mostly_shared)
        if launch.shared:  # 48 KB, static memory included, need no attribute
            what = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            have = driver.funcGetAttribute(what, function.ptr)
            if have < launch.shared:
                driver.funcSetAttribute(function.ptr, what, launch.shared)
        if launch.shared_percent >= 0:
            carveout = driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.funcSetAttribute(function.ptr, carveout, launch.shared_percent)
        return int(function.ptr)

    def max_clusters(self, launch: Launch) -> int:
        """Number of clusters of the launch that the GPU runs at a time.

        Raises:
            GraphllmError: the driver refuses the launch.
        """
        found, prepared = ctypes.c_int(), PreparedLaunch(launch, self.prepared(launch), self)
        status = prepared.count_clusters(found)
        if status:
            raise GraphllmError(f"CUDA error {status} at the clusters of {launch.function.name}")
        return found.value

    def transfer(self, source: int, target: int, nbytes: int, to_host: bool) -> None:
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        if nbytes:
            runtime.memcpyAsync(target, source, nbytes, kind, self.stream.ptr)
        if to_host:
            self.stream.synchronize()

    def time_runs(self, work: Callable[[], None], rounds: int) -> list[float]:
        """Seconds of ``rounds`` runs of ``work`` by CUDA events, after two warm-up runs."""
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
        """Offset in nanoseconds from the GPU's clock to `time.perf_counter_ns`.

        Of several readings of the GPU's clock, the one with the shortest round trip counts.
        """
        place = Buffer(8, self.stream)
        read = self.prepare(
            Launch(SUPPORT["read_clock"], (1,), (1,), (place.address,), programmatic=False)
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
        """Enqueue a long run once the last but one has completed.

        Enqueued work cannot be cancelled: Ctrl-C would wait for all of it, and progress would be
        reported too early.
        """
        end = self._ends[self._long % len(self._ends)]
        end.synchronize()
        run()
        end.record(self.stream)
        self._long += 1

    def header(self, buffer: Buffer, header: Header) -> LiveHeader:
        return LiveHeader(buffer, header, self)
