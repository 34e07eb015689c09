"""Device buffers, and copies of results to the host.

Imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from cupy.cuda import Event, Memory, Stream, alloc_pinned_memory, runtime
from cupy.cuda.runtime import CUDARuntimeError
from cupy_backends.cuda.api.driver import CUDADriverError

from ....errors import OutOfMemory
from ....graph.tensor import Meta
from ...kernel_context import numpy_layout, span

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY


def free_bytes() -> int:
    """Bytes that the driver can still allocate on this thread's GPU."""
    return int(runtime.memGetInfo()[0])


def out_of_memory(what: str, nbytes: int | None = None) -> OutOfMemory:
    """The error for an allocation of ``what`` that failed on this thread's GPU."""
    return OutOfMemory(what, "the GPU", nbytes, free_bytes(), "other programs may hold some")


@contextmanager
def allocating(what: str, nbytes: int | None = None) -> Iterator[None]:
    """Raise OutOfMemory, which names ``what``, if the driver runs out of memory inside."""
    try:
        yield
    except (CUDARuntimeError, CUDADriverError) as error:
        if error.status != OUT_OF_MEMORY:
            raise
        raise out_of_memory(what, nbytes) from None


class Buffer:
    """Zeroed bytes on the GPU. A slice can be filled with one byte value, or read.

    The driver allocates the memory itself, without a pool, so no other buffer gets the same address
    while this one lives.

    Raises:
        OutOfMemory: the GPU has less memory left.
    """

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.nbytes = nbytes
        with allocating("a buffer", nbytes):
            self._memory = Memory(max(nbytes, 1))
        self.address = int(self._memory.ptr)
        self._stream = stream
        self[:] = 0

    def __setitem__(self, where: slice, byte: int) -> None:
        start, stop, _ = where.indices(self.nbytes)
        if stop > start:
            runtime.memsetAsync(self.address + start, byte, stop - start, self._stream.ptr)

    def __getitem__(self, where: slice) -> np.ndarray:
        """A uint8 copy of the bytes, after all work enqueued before."""
        start, stop, _ = where.indices(self.nbytes)
        data = np.empty(max(0, stop - start), np.uint8)
        if data.size:
            runtime.memcpyAsync(
                data.ctypes.data, self.address + start, data.nbytes,
                runtime.memcpyDeviceToHost, self._stream.ptr,
            )  # fmt: skip
        self._stream.synchronize()
        return data


class Ring:
    """Copies of an operand to the host after each run; see `backends.Ring`.

    There is one pinned slot for each run that may be in progress, with an event for the end of its
    copy.
    """

    lookahead = 1

    def __init__(self, address: int, meta: Meta, stream: Stream) -> None:
        shape, strides, kind = numpy_layout(meta)
        self._source, self._nbytes, self._stream = address, span(meta), stream
        self._started = self._taken = 0  # copies
        memories = [alloc_pinned_memory(max(self._nbytes, 1)) for _ in range(self.lookahead + 1)]
        self._addresses = [memory.ptr for memory in memories]
        self._values = [np.ndarray(shape, kind, memory, 0, strides) for memory in memories]
        self._arrived = [Event(disable_timing=True) for _ in memories]

    def put(self) -> None:
        slot = self._started % len(self._addresses)
        runtime.memcpyAsync(
            self._addresses[slot], self._source, self._nbytes,
            runtime.memcpyDeviceToHost, self._stream.ptr,
        )  # fmt: skip
        self._arrived[slot].record(self._stream)
        self._started += 1

    def take(self) -> np.ndarray:
        slot = self._taken % len(self._addresses)
        self._arrived[slot].synchronize()
        self._taken += 1
        return self._values[slot].copy()

    def __del__(self) -> None:
        for arrived in self.__dict__.get("_arrived", ()):  # copies may be in flight
            arrived.synchronize()
