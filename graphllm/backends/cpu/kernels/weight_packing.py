"""Pack weights at load into tiles of 16 rows; `graphllm.backends.cpu.formats` describes tiles."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ....formats.quantization import bad_scale
from ....graph.tensor import Meta
from ..formats import FORMATS, by_code
from ..runtime.cores import usable_cores
from ..runtime.jit import Kernel, args, i64s, kernel
from ..runtime.lazy_numba import intrinsic, types
from ..simd.emitter import LANES, VECTOR, Emitter, Value

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 64 << 20  # bytes that are mapped at a time for small weights
_PACKERS = 8  # threads at most: packing is bound by memory bandwidth


@intrinsic(prefer_literal=True)
def pack_block(typingctx, fmt, source, target, row):
    """Pack the stored block at ``source`` into row ``row`` of the tile's block at ``target``; see
    `PackedFormat.pack`. ``fmt``: the code of the format, a literal."""
    form = by_code(fmt.literal_value)

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        return form.pack(Emitter(builder), *given[1:])

    return types.int64(fmt, types.int64, types.int64, types.int64), generate


@cache
def _packer(name: str) -> Kernel:
    """The kernel that packs matrices; it reports a row with a bad scale for each thread, or -1."""
    form = FORMATS[name]
    code, nbytes = form.code, form.nbytes
    stored = nbytes // LANES

    @kernel(key=(form.cache_key,))
    def packer(p, thread, threads):
        source, stride, target, matrices, rows, blocks, report = args(p, 7)
        found, groups = i64s(report), (rows + LANES - 1) // LANES
        for g in range(thread, matrices * groups, threads):
            first, group = g % groups * LANES, target + g * nbytes * blocks
            row = g // groups * rows + first
            for b in range(blocks):
                for r in range(min(LANES, rows - first)):
                    at = source + (row + r) * stride + b * stored
                    if pack_block(code, at, group + b * nbytes, r) != 0:
                        found[thread] = row + r
                        return

    return packer


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


_slabs = _Slabs()


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


def packed_bytes(meta: Meta) -> int:
    """Bytes of a packed weight [..., N, K]: those of its blocks, with N rounded up to 16."""
    matrices, rows, columns = _sizes(meta)
    form = FORMATS[meta.dtype.name]
    return matrices * -(-rows // LANES) * (columns // form.block) * form.nbytes


def _sizes(meta: Meta) -> tuple[int, int, int]:
    """(matrices, rows of each, columns) of a weight [..., N, K]."""
    *matrices, rows, columns = meta.bound().shape
    assert isinstance(rows, int) and isinstance(columns, int)
    return prod(matrices), rows, columns  # type: ignore[arg-type]


def pack(raw: np.ndarray, meta: Meta) -> np.ndarray:
    """Pack uint8 [rows, row_bytes] of a weight [N, K] or [E, N, K]; returns uint8 [bytes].

    The last tile of a matrix is padded with zero bytes: rows of scales of zero. ModelFileError if a
    block has an infinite or NaN scale.
    """
    matrices, rows, columns = _sizes(meta)
    assert raw.dtype == np.uint8 and raw.strides[1] == 1 and len(raw) == matrices * rows
    packed = _slabs.cut(packed_bytes(meta))
    threads = max(1, min(_PACKERS, usable_cores(), packed.nbytes // _HUGE))
    report = np.full(threads, -1, np.int64)
    block = np.array(
        [
            raw.ctypes.data, raw.strides[0], packed.ctypes.data, matrices, rows,
            columns // FORMATS[meta.dtype.name].block, report.ctypes.data,
        ],
        np.int64,
    )  # fmt: skip
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(_packer(meta.dtype.name).address)
    own = [
        threading.Thread(target=run, args=(block.ctypes.data, thread, threads))
        for thread in range(1, threads)
    ]
    for each in own:
        each.start()
    run(block.ctypes.data, 0, threads)  # native code: releases the GIL
    for each in own:
        each.join()
    if report.max() >= 0:
        raise bad_scale(int(report[report >= 0].min()), meta.dtype)
    return packed
