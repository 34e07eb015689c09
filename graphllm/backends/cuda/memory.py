"""Device memory, and the way of data from the host to it. Imported when a device is opened."""

from __future__ import annotations

import numpy as np
from cupy.cuda import Event, Memory, Stream, alloc_pinned_memory, runtime
from cupy.cuda.runtime import CUDARuntimeError

from ...errors import OutOfMemory

_STAGE = 32 << 20  # bytes of each of the two pinned halves
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


def free_bytes() -> int:
    """What the driver would give now on this thread's GPU."""
    return int(runtime.memGetInfo()[0])


class Buffer:
    """Bytes on the GPU, all zero at first. A slice can be filled with one byte's value, or read.

    The memory is the driver's own allocation, not a pool's, so that its address is its own for as
    long as the buffer lives. OutOfMemory where there is no room.
    """

    def __init__(self, nbytes: int, stream: Stream) -> None:
        self.nbytes = nbytes
        try:
            self._memory = Memory(max(nbytes, 1))
        except CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            hint = "other programs may hold some"
            raise OutOfMemory("a buffer", "the GPU", nbytes, free_bytes(), hint) from None
        self.address = int(self._memory.ptr)
        self._stream = stream
        self[:] = 0

    def __setitem__(self, where: slice, byte: int) -> None:
        start, stop, _ = where.indices(self.nbytes)
        if stop > start:
            runtime.memsetAsync(self.address + start, byte, stop - start, self._stream.ptr)

    def __getitem__(self, where: slice) -> np.ndarray:
        """A copy of the bytes, uint8, once all work before is done."""
        start, stop, _ = where.indices(self.nbytes)
        data = np.empty(max(0, stop - start), np.uint8)
        if data.size:
            runtime.memcpyAsync(
                data.ctypes.data, self.address + start, data.nbytes,
                runtime.memcpyDeviceToHost, self._stream.ptr,
            )  # fmt: skip
        self._stream.synchronize()
        return data


class Stager:
    """Sends host bytes to the GPU through pinned memory, so that copying into one half goes on
    while the other is on its way, and small pieces are not waited for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._halves: list[np.ndarray] = []
        self._sent = [Event(disable_timing=True), Event(disable_timing=True)]
        self._half = self._used = 0

    def send(self, data: np.ndarray, address: int) -> None:
        """Put uint8 ``data`` at ``address``, in order with all work on the stream."""
        if not self._halves:
            for _ in range(2):
                memory = alloc_pinned_memory(_STAGE)
                self._halves.append(np.frombuffer(memory, np.uint8, _STAGE))
        at = 0
        while at < data.nbytes:
            if self._used == _STAGE:
                self._swap()
            count = min(data.nbytes - at, _STAGE - self._used)
            stage = self._halves[self._half][self._used : self._used + count]
            stage[:] = data[at : at + count]
            runtime.memcpyAsync(
                address + at, stage.ctypes.data, count,
                runtime.memcpyHostToDevice, self._stream.ptr,
            )  # fmt: skip
            at, self._used = at + count, self._used + count

    def _swap(self) -> None:
        """Go on in the other half, once what was sent from it has arrived."""
        self._sent[self._half].record(self._stream)
        self._half, self._used = 1 - self._half, 0
        self._sent[self._half].synchronize()
