"""Transfers between host and GPU, in stream order.

Imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cupy.cuda import Event, alloc_pinned_memory, runtime

from ....graph.tensor import Meta
from ...kernel_context import numpy_layout, span
from .launch import Gpu, PreparedLaunch
from .source import SUPPORT
from .work import Launch, ceil

_STAGING_BYTES = 32 << 20  # bytes of each of the two pinned staging buffers
_COPY_THREADS, _MIN_CHUNK = 4, 1 << 20  # threads that copy; bytes that are worth a thread

# Arguments of the kernel `scatter` of support.cu.
_PART = np.dtype([("to", np.uint64), ("at", np.uint32), ("nbytes", np.uint32)])
_MAX_PARTS = 32
_MAX_PART_BYTES = 64 << 10  # of a part that the kernel reads or writes in the host's memory
_ALIGN, _THREADS, _BLOCKS = 16, 128, 8


class Stager:
    """Sends host bytes to the GPU through two pinned buffers, filled and sent alternately.

    Large data is copied by several threads, because one thread is slower than the bus, especially
    where pages of a file must be mapped. Several small arrays, such as the feeds of a step, are
    sent by one launch: its kernel reads them from the pinned buffer over the bus.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._stream = gpu, gpu.stream
        self._copy_pool = ThreadPoolExecutor(_COPY_THREADS)
        self._halves: list[np.ndarray] = []
        self._sent = [Event(disable_timing=True), Event(disable_timing=True)]
        self._half = self._used = 0
        self._scatter: _Scatter | None = None

    def sender(self, parts: Sequence[tuple[np.ndarray, int]]) -> Callable[[], None]:
        """The function that writes what uint8 arrays hold to their addresses, in stream order."""
        small, large = list[tuple[np.ndarray, int]](), list[tuple[np.ndarray, int]]()
        for data, address in parts:
            quick = data.nbytes <= _MAX_PART_BYTES and address % _ALIGN == 0
            (small if quick else large).append((data, address))
        if len(small) == 1:
            large, small = large + small, []
        groups = [small[at : at + _MAX_PARTS] for at in range(0, len(small), _MAX_PARTS)]
        scattered = [self._small_sender(group) for group in groups]

        def send() -> None:
            self._gpu.use()
            for data, address in large:
                self.send(data, address)
            for call in scattered:
                call()

        return send

    def _small_sender(self, parts: Sequence[tuple[np.ndarray, int]]) -> Callable[[], None]:
        """The same for arrays that one launch of `scatter` writes."""
        places, arrays, size = np.zeros(_MAX_PARTS, _PART), list[tuple[np.ndarray, int, int]](), 0
        for index, (data, address) in enumerate(parts):
            places[index] = address, size, data.nbytes
            arrays.append((data, size, size + data.nbytes))
            size += ceil(data.nbytes, _ALIGN) * _ALIGN

        def send() -> None:
            self._allocate()
            if self._used + size + _ALIGN > _STAGING_BYTES:
                self._swap()
            start = ceil(self._used, _ALIGN) * _ALIGN
            self._used = start + size
            stage = self._halves[self._half][start : self._used]
            for data, first, stop in arrays:
                stage[first:stop] = data
            if self._scatter is None:
                self._scatter = _Scatter(self._gpu)
            self._scatter(stage.ctypes.data, places)

        return send

    def send(self, data: np.ndarray, address: int) -> None:
        """Write uint8 ``data`` to ``address``, in stream order."""
        self._allocate()
        at = 0
        while at < data.nbytes:
            if self._used == _STAGING_BYTES:
                self._swap()
            count = min(data.nbytes - at, _STAGING_BYTES - self._used)
            stage = self._halves[self._half][self._used : self._used + count]
            self._copy(stage, data[at : at + count])
            runtime.memcpyAsync(
                address + at, stage.ctypes.data, count,
                runtime.memcpyHostToDevice, self._stream.ptr,
            )  # fmt: skip
            at, self._used = at + count, self._used + count

    def _allocate(self) -> None:
        while len(self._halves) < 2:
            memory = alloc_pinned_memory(_STAGING_BYTES)
            self._halves.append(np.frombuffer(memory, np.uint8, _STAGING_BYTES))

    def _copy(self, stage: np.ndarray, data: np.ndarray) -> None:
        share = data.nbytes // _COPY_THREADS + 1
        if share < _MIN_CHUNK:
            stage[:] = data
            return
        starts = range(0, data.nbytes, share)
        for _ in self._copy_pool.map(
            lambda at: np.copyto(stage[at : at + share], data[at : at + share]), starts
        ):
            pass

    def _swap(self) -> None:
        """Continue in the other buffer once its last transfer has completed."""
        self._sent[self._half].record(self._stream)
        self._sent[1 - self._half].synchronize()  # first: it may be interrupted
        self._half, self._used = 1 - self._half, 0


class _Scatter:
    """The launch of `scatter`, whose arguments are changed in place."""

    def __init__(self, gpu: Gpu) -> None:
        self._launch = _prepare_scatter(gpu, (_BLOCKS, _MAX_PARTS), 0, np.zeros(_MAX_PARTS, _PART))
        self._source = np.frombuffer(self._launch.argument(0), np.uint64)
        self._parts = np.frombuffer(self._launch.argument(1), _PART)

    def __call__(self, source: int, parts: np.ndarray) -> None:
        """Copy ``parts``: `_PART` [_MAX_PARTS], at offsets from ``source``, pinned host memory."""
        self._source[0], self._parts[:] = source, parts
        self._launch()


class Ring:
    """Copies of an operand to the host after each run; see `backends.Ring`.

    There is one pinned slot for each run that may be in progress, with an event for the end of its
    copy. A small operand is written to its slot by a kernel: between two steps, a transfer by the
    copy engine would leave the GPU idle for some microseconds.
    """

    lookahead = 1

    def __init__(self, address: int, meta: Meta, gpu: Gpu) -> None:
        shape, strides, kind = numpy_layout(meta)
        self._stream, nbytes = gpu.stream, span(meta)
        self._started = self._taken = 0  # copies
        memories = [alloc_pinned_memory(max(nbytes, 1)) for _ in range(self.lookahead + 1)]
        self._copies = [_copy_to_host(gpu, address, memory.ptr, nbytes) for memory in memories]
        self._values = [np.ndarray(shape, kind, memory, 0, strides) for memory in memories]
        self._arrived = [Event(disable_timing=True) for _ in memories]

    def put(self) -> None:
        slot = self._started % len(self._copies)
        self._copies[slot]()
        self._arrived[slot].record(self._stream)
        self._started += 1

    def take(self) -> np.ndarray:
        slot = self._taken % len(self._copies)
        self._arrived[slot].synchronize()
        self._taken += 1
        return self._values[slot].copy()

    def __del__(self) -> None:
        for arrived in self.__dict__.get("_arrived", ()):  # copies may be in flight
            arrived.synchronize()


def _copy_to_host(gpu: Gpu, source: int, target: int, nbytes: int) -> Callable[[], None]:
    """The function that copies bytes of the GPU to pinned memory, in stream order."""
    if nbytes > _MAX_PART_BYTES or source % _ALIGN:
        return lambda: runtime.memcpyAsync(
            target, source, nbytes, runtime.memcpyDeviceToHost, gpu.stream.ptr
        )
    parts = np.zeros(_MAX_PARTS, _PART)
    parts[0] = target, 0, nbytes
    blocks = min(_BLOCKS, max(1, ceil(nbytes, _ALIGN * _THREADS)))
    return _prepare_scatter(gpu, (blocks, 1), source, parts)


def _prepare_scatter(
    gpu: Gpu, grid: tuple[int, int], source: int, parts: np.ndarray
) -> PreparedLaunch:
    """The launch of `scatter`.

    Args:
        gpu: the GPU.
        grid: blocks of each part, and number of parts.
        source: address that the parts are relative to.
        parts: what to copy, `_PART` [_MAX_PARTS].
    """
    args = source, parts.tobytes()
    return gpu.prepare(Launch(SUPPORT["scatter"], grid, (_THREADS,), args, programmatic=False))
