"""Weights from GGUF's rows to R16: see `formats.py` for what that is."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ....formats.quantization import bad_scale
from ....graph.tensor import Meta
from ..runtime.isa import usable_cores
from ..runtime.jit import Kernel, args, i64s, kernel
from ..simd.emitter import I8, I16, I32, I64, LANES, VECTOR, Emit, Value
from .block_unpacking_k import PLACE
from .packed_formats import BY_CODE, FORMATS

_HUGE = 2 << 20  # bytes of a huge page
_SLAB = 64 << 20  # bytes that are mapped at a time for weights
_PACKERS = 8  # threads at most: memory, not arithmetic, is what packing waits for

# One block of one row: (offset in GGUF's block, offset in R16's block, bytes, bytes from one row to
# the next in R16's). Scales that are float16, or mxfp4's bytes, come first and are checked.
Move = tuple[int, int, int, int]


def _quads(source: int, target: int, count: int, step: int = VECTOR) -> list[Move]:
    """``count`` chunks of four bytes to vectors that are ``step`` apart."""
    return [(source + 4 * j, target + step * j, 4, 4) for j in range(count)]


def _fours(source: int, target: int, count: int) -> list[Move]:
    """``count`` bytes of scales of 16 sub-blocks: in each four their order is 0 2 1 3."""
    return [(source + k, target + k // 4 * VECTOR + PLACE[k % 4], 1, 4) for k in range(count)]


def _q6_k() -> list[Move]:
    moves = []
    for h in range(2):
        at = 8 * h * 3 * VECTOR
        moves += _quads(128 + 32 * h, at, 8, 3 * VECTOR)
        for z in range(2):
            moves += _quads(64 * h + 32 * z, at + (1 + z) * VECTOR, 8, 3 * VECTOR)
    return moves + _fours(192, 48 * VECTOR, 16)


_SCALES: dict[str, list[Move]] = {
    "q8_0": [(0, 8 * VECTOR, 2, 2)],
    "q4_0": [(0, 4 * VECTOR, 2, 2)],
    "q4_1": [(0, 4 * VECTOR, 2, 2), (2, 4 * VECTOR + 32, 2, 2)],
    "q5_0": [(0, 5 * VECTOR, 2, 2)],
    "q5_1": [(0, 5 * VECTOR, 2, 2), (2, 5 * VECTOR + 32, 2, 2)],
    "q4_k": [(0, 0, 2, 2), (2, 32, 2, 2)],
    "q5_k": [(0, 0, 2, 2), (2, 32, 2, 2)],
    "q6_k": [(208, 52 * VECTOR, 2, 2)],
    "q2_k": [(80, 20 * VECTOR, 2, 2), (82, 20 * VECTOR + 32, 2, 2)],
    "q3_k": [(108, 27 * VECTOR, 2, 2)],
    "iq4_nl": [(0, 4 * VECTOR, 2, 2)],
    "iq4_xs": [(0, 0, 2, 2)],
    "mxfp4": [(0, 4 * VECTOR, 1, 1)],
}
_MOVES: dict[str, list[Move]] = {
    "q8_0": _quads(2, 0, 8),
    "q4_0": _quads(2, 0, 4),
    "q4_1": _quads(4, 0, 4),
    "q5_0": _quads(6, 0, 4),
    "q5_1": _quads(8, 0, 4),
    "q4_k": _quads(4, 64, 3) + _quads(16, 256, 32),
    "q5_k": _quads(4, 64, 3) + _quads(16, 256, 8 + 32),
    "q6_k": _q6_k(),
    "q2_k": _quads(16, 0, 16) + _fours(0, 16 * VECTOR, 16),
    "q3_k": _quads(0, 0, 8 + 16) + _fours(96, 24 * VECTOR, 12),
    "iq4_nl": _quads(2, 0, 4),
    "iq4_xs": [(2, 32, 2, 2), *_quads(4, 64, 1), *_quads(8, 128, 32)],
    "mxfp4": _quads(1, 0, 4),
    "f32": [(0, 0, 4, 4)],
    "f16": [(0, 0, 2, 2)],
    "bf16": [(0, 0, 2, 2)],
}
_FIFTH = {"q5_0": 2, "q5_1": 4}  # where a block of 32 has fifth bits
_INTEGERS = {1: I8, 2: I16, 4: I32}
_ENDLESS = {1: 0xFF, 2: 0x7C00}  # bits that are all set in an infinite or NaN scale, by its bytes


def _spread(b: Any, fifth: Value) -> Value:
    """Bit 4 j + i of a block's fifth bits moved to bit 8 i + j."""
    result = None
    for j in range(8):
        four = b.and_(b.lshr(fifth, ir.Constant(I32, 4 * j)), ir.Constant(I32, 15))
        # The product puts bit i at 8 i, among others.
        apart = b.and_(b.mul(four, ir.Constant(I32, 0x00204081)), ir.Constant(I32, 0x01010101))
        moved = b.shl(apart, ir.Constant(I32, j))
        result = moved if result is None else b.or_(result, moved)
    return result


def _move_block(e: Emit, name: str, source: Value, target: Value, row: Value) -> Value:
    """Move one block of one row; 1 if a scale of it is infinite or NaN, else 0 (int64)."""
    b, bad = e.b, ir.Constant(ir.IntType(1), 0)
    places = {step: e.at(target, e.times(row, step)) for step in (1, 2, 4)}
    for move in _SCALES.get(name, []) + _MOVES[name]:
        start, to, size, step = move
        value = e.load(source, _INTEGERS[size], start)
        if move in _SCALES.get(name, []):
            endless = ir.Constant(value.type, _ENDLESS[size])
            bad = b.or_(bad, b.icmp_unsigned("==", b.and_(value, endless), endless))
        e.store(value, places[step], to)
    if name in _FIFTH:
        e.store(_spread(b, e.load(source, I32, _FIFTH[name])), places[4], 4 * VECTOR)
    return b.zext(bad, I64)


@intrinsic(prefer_literal=True)
def move_block(typingctx, fmt, source, target, row):
    """Move a block at ``source`` to row ``row`` of the R16 block at ``target``: `_move_block`."""
    name = BY_CODE[fmt.literal_value].name

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        return _move_block(Emit(builder), name, *given[1:])

    return types.int64(fmt, types.int64, types.int64, types.int64), generate


@cache
def _packer(name: str) -> Kernel:
    form = FORMATS[name]
    code, nbytes = form.code, form.nbytes
    stored = nbytes // LANES

    @kernel
    def packer(p, thread, threads):
        source, stride, target, matrices, rows, blocks, report = args(p, 7)
        found, groups = i64s(report), (rows + LANES - 1) // LANES
        for g in range(thread, matrices * groups, threads):
            first, group = g % groups * LANES, target + g * nbytes * blocks
            row = g // groups * rows + first
            for b in range(blocks):
                for r in range(min(LANES, rows - first)):
                    at = source + (row + r) * stride + b * stored
                    if move_block(code, at, group + b * nbytes, r) != 0:
                        found[thread] = row + r
                        return

    return packer


class _Slabs:
    """Zeroed memory for weights in huge pages, cut off larger pieces one after the other.

    With a mapping of its own each buffer would end in a huge page that it hardly uses: 200 MB for a
    model of 200 matrices. A piece goes back to the system when all buffers cut off it are gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = np.zeros(0, np.uint8)

    def cut(self, nbytes: int) -> np.ndarray:
        if nbytes > _SLAB // 2:
            return _map(nbytes)[:nbytes]
        with self._lock:
            if self._rest.nbytes < nbytes:
                self._rest = _map(_SLAB)
            found, self._rest = self._rest[:nbytes], self._rest[-(-nbytes // VECTOR) * VECTOR :]
        return found


_slabs = _Slabs()


def _map(nbytes: int) -> np.ndarray:
    """New memory, in huge pages where the system has them, and beginning with one. MemoryError."""
    try:  # private: memory that may be shared is not given huge pages
        area = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(area, np.uint8)
    return room[-int(room.ctypes.data) % _HUGE :]


def allocate(nbytes: int) -> np.ndarray:
    """Zeroed uint8 [nbytes], aligned to 64 bytes; in huge pages where the system has them."""
    if nbytes >= _HUGE:
        return _map(nbytes)[:nbytes]
    room = np.zeros(nbytes + VECTOR, np.uint8)
    skip = -int(room.ctypes.data) % VECTOR
    return room[skip : skip + nbytes]


def packed_bytes(meta: Meta) -> int:
    """The size of a weight [..., N, K] in R16 form: that of its blocks, for N rounded up to 16."""
    matrices, rows, columns = _sizes(meta)
    form = FORMATS[meta.dtype.name]
    return matrices * -(-rows // LANES) * (columns // form.block) * form.nbytes


def _sizes(meta: Meta) -> tuple[int, int, int]:
    """Matrices, their rows and their columns."""
    *matrices, rows, columns = meta.bound().shape
    assert isinstance(rows, int) and isinstance(columns, int)
    return prod(matrices), rows, columns  # type: ignore[arg-type]


def pack(raw: np.ndarray, meta: Meta) -> np.ndarray:
    """uint8 [rows, row_bytes] of a weight [N, K], or of several [E, N, K], as R16, uint8 [bytes].

    The last group of a matrix is filled up with zeros. ModelFileError if a block's scale is
    infinite or NaN.
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
    with ThreadPoolExecutor(threads) as pool:  # native code, without the interpreter's lock
        list(pool.map(lambda thread: run(block.ctypes.data, thread, threads), range(threads)))
    if report.max() >= 0:
        raise bad_scale(int(report[report >= 0].min()), meta.dtype)
    return packed
