"""Host memory in huge pages, for buffers and packed weights."""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from ..simd.vectors import VECTOR

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 64 << 20  # bytes that are mapped at a time for small buffers


class _Slabs:
    """Allocator of zeroed memory in huge pages, which cuts small buffers from larger mappings.

    With a mapping of its own, each buffer would end in a huge page that it hardly uses: 200 MB for
    a model of 200 matrices. A mapping is freed when all buffers cut from it are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.zeros(0, np.uint8)

    def cut(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], aligned to 64 bytes."""
        if nbytes > _SLAB // 2:
            return _map(nbytes)[:nbytes]
        with self._lock:
            if self._rest.nbytes < nbytes:
                self._rest = _map(_SLAB)
            found, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // VECTOR) * VECTOR :]
        return found


SLABS = _Slabs()


def _map(nbytes: int) -> np.ndarray:
    """Map memory aligned to a huge page, in huge pages if the system has them. MemoryError."""
    try:  # private, because shared memory does not get huge pages
        area = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(area, np.uint8)
    return room[-int(room.ctypes.data) % _HUGE :]


def allocate(nbytes: int) -> np.ndarray:
    """Allocate zeroed uint8 [nbytes], aligned to 64 bytes; in huge pages if the system has them."""
    if nbytes >= _HUGE:
        return _map(nbytes)[:nbytes]
    room = np.zeros(nbytes + VECTOR, np.uint8)
    skip = -int(room.ctypes.data) % VECTOR
    return room[skip : skip + nbytes]
