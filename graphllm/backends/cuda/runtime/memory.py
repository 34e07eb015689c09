"""Device buffers.

Imported when a device is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from cupy.cuda import Memory, Stream, runtime
from cupy.cuda.runtime import CUDARuntimeError
from cupy_backends.cuda.api.driver import CUDADriverError

from ....errors import OutOfMemory

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
