"""Pack weights into tiles of 16 rows; `graphllm.backends.cpu.formats` describes tiles.

Weights are packed at load. Those that are used as they are stored, or packed while they are
multiplied, are only checked then.

The pages of a mapped file are mapped before a chunk of rows is packed and released after it, so a
weight is never in memory twice. Page faults would map neighbouring pages as well, which then stay.
"""

from __future__ import annotations

import mmap
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....errors import ModelFileError
from ....formats import ROW_FORMATS, quantization
from ....graph.dtype import DType
from ....graph.tensor import Meta
from ..formats import BLOCK_FORMATS, FORMATS, by_code
from ..formats.row_formats import STEP
from ..runtime.argument_block import argument_reader
from ..runtime.atomics import advise_pages
from ..runtime.cores import usable_cores
from ..runtime.host_memory import SLABS
from ..runtime.jit import Kernel, helper, i32s, i64s, kernel, next_chunk
from ..runtime.lazy_numba import intrinsic, types
from ..runtime.program import CompiledProgram, Launch
from ..runtime.step_interpreter import BARRIER
from ..simd.emitter import LANES, Emitter, Value

_CHUNK = 1 << 20  # stored bytes that a thread packs at a time
_PAGE = mmap.PAGESIZE
_POPULATE_READ = 22  # Linux 5.14; an older one ignores it
_DONTNEED = 4
_PACKERS = 8  # threads at most: packing is bound by memory bandwidth


@intrinsic(prefer_literal=True)
def pack_block(typingctx, fmt, source, stride, rows, target):
    """Pack the stored blocks of ``rows`` rows, at most 16, into the tile's block at ``target``; see
    `PackedFormat.pack`. ``fmt``: the code of the format, a literal."""
    form = by_code(fmt.literal_value)

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        from ..simd.stored_rows import StoredRows

        _, source, stride, rows, target = given
        return form.pack(StoredRows(Emitter(builder), source, stride, rows), target)

    return types.int64(fmt, *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def check_block(typingctx, fmt, source, stride, rows, target):
    """As `pack_block`, but only find bad scales; ``target`` is not used."""
    form = by_code(fmt.literal_value)

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        from ..simd.stored_rows import StoredRows

        return form.bad_scales(StoredRows(Emitter(builder), *given[1:4]))

    return types.int64(fmt, *[types.int64] * 4), generate


class PackArgs(NamedTuple):
    """Argument block of a packer."""

    source: int
    stride: int  # bytes from a row to the next
    row_bytes: int
    target: int
    matrices: int
    rows: int  # of a matrix
    blocks: int  # of a row
    group_bytes: int  # of 16 packed rows
    mapped: int  # whether the rows are in a file that is mapped read-only
    report: int  # int64 per thread, the first row with a bad scale


_read = argument_reader(PackArgs)


@helper
def _advise(start, end, advice):
    """Advise the pages that hold the bytes from ``start`` to ``end``, shared ones included: another
    thread that still reads one of those maps it again."""
    first = start // _PAGE * _PAGE
    advise_pages(first, end - first, advice)


@helper
def _no_scales(source, stride, rows, columns, group):
    """Stands for the packing of scales that are not apart from the blocks."""
    return 0


def _scale_packer(form: Any) -> Any:
    """A helper that packs the scales of the rows of a group of a row format, if it is one; returns
    bits of rows of which a scale is infinite or NaN."""
    if form.name not in ROW_FORMATS:
        return _no_scales
    per = form.scale_columns

    @helper
    def pack_scales(source, stride, rows, columns, group):
        bad, target = 0, i32s(group + (columns + STEP - 1) // STEP * STEP * LANES)
        for r in range(LANES):
            scales = i32s(source + min(r, rows - 1) * stride + columns)
            for i in range(columns // per if per != 0 else 1):
                target[i * LANES + r] = scales[i]
                if scales[i] & 0x7F800000 == 0x7F800000:
                    bad |= 1 << r
        return bad

    return pack_scales


def group_packer(name: str, packs: bool = True) -> Any:
    """A helper that packs ``rows`` rows, at most 16, of ``blocks`` blocks each to a group; returns
    bits of rows of which a scale is infinite or NaN. Without ``packs`` it only checks scales."""
    form = FORMATS[name]
    code, nbytes, block = form.code, form.nbytes, form.block
    stored, run_block = nbytes // LANES, pack_block if packs else check_block
    pack_scales = _scale_packer(form)

    @helper
    def pack_group(source, stride, rows, blocks, group):
        bad = pack_scales(source, stride, rows, blocks * block, group)
        for b in range(blocks):
            bad |= run_block(code, source + b * stored, stride, rows, group + b * nbytes)
        return bad

    return pack_group


@cache
def _packer(name: str, packs: bool) -> Kernel:
    """The kernel that packs matrices, or only checks their scales."""
    form, pack_group = FORMATS[name], group_packer(name, packs)

    @kernel(key=(form.cache_key, packs))
    def packer(p, thread, threads):
        a = _read(p)
        groups = (a.rows + LANES - 1) // LANES
        each, total = max(1, _CHUNK // (LANES * a.stride)), a.matrices * groups
        c = next_chunk(p)
        while c * each < total:
            first = c * each
            last = min(total, first + each) - 1
            start = a.source + (first // groups * a.rows + first % groups * LANES) * a.stride
            row_end = last // groups * a.rows + min(a.rows, last % groups * LANES + LANES)
            end = a.source + (row_end - 1) * a.stride + a.row_bytes
            if a.mapped != 0:
                _advise(start, end, _POPULATE_READ)
            for g in range(first, last + 1):
                row = g // groups * a.rows + g % groups * LANES
                rows = min(LANES, a.rows - g % groups * LANES)
                source, target = a.source + row * a.stride, a.target + g * a.group_bytes
                bad = pack_group(source, a.stride, rows, a.blocks, target)
                if bad != 0:
                    while bad & 1 == 0:
                        bad, row = bad >> 1, row + 1
                    i64s(a.report)[thread] = row
                    return
            if a.mapped != 0:
                _advise(start, end, _DONTNEED)
            c = next_chunk(p)

    return packer


def packed_bytes(meta: Meta) -> int:
    """Bytes of a packed weight [..., N, K], with N rounded up to 16."""
    matrices, rows, columns = _sizes(meta)
    return matrices * -(-rows // LANES) * FORMATS[meta.dtype.name].group_nbytes(columns)


def _sizes(meta: Meta) -> tuple[int, int, int]:
    """(matrices, rows of each, columns) of a weight [..., N, K]."""
    *matrices, rows, columns = meta.bound().shape
    assert isinstance(rows, int) and isinstance(columns, int)
    return prod(matrices), rows, columns  # type: ignore[arg-type]


def _in_mapped_file(array: np.ndarray) -> bool:
    """Whether the bytes are in a read-only mapping, whose pages can be read again at any time."""
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return isinstance(owner, mmap.mmap) and memoryview(owner).readonly


def pack(raw: np.ndarray, meta: Meta) -> np.ndarray:
    """Pack uint8 [rows, row_bytes] of a weight [N, K] or [E, N, K]; returns uint8 [bytes].

    The last tile of a matrix is padded with copies of its last row, whose results are not used.
    ModelFileError if a block has an infinite or NaN scale.
    """
    matrices, rows, columns = _sizes(meta)
    assert len(raw) == matrices * rows
    packed = SLABS.cut(packed_bytes(meta))
    _run_packer(raw, meta.dtype, packed, rows, columns)
    return packed


def keep_mapped(raw: np.ndarray, meta: Meta) -> np.ndarray:
    """Check the scales of a weight and return ``raw`` itself, which must be in a mapped file.

    ModelFileError if it is not, or if a block has an infinite or NaN scale.
    """
    if not _in_mapped_file(raw):
        raise ModelFileError(
            "low_mem reads experts from the file, but the file does not hold these as they are "
            "used; `graphllm quantize` writes a GGUF file that does"
        )
    check_scales(raw, meta.dtype)
    return raw


def check_scales(raw: np.ndarray, dtype: DType) -> None:
    """As `graphllm.formats.quantization.check_scales`, at the rate of the memory."""
    if raw.nbytes < _CHUNK or dtype.name not in BLOCK_FORMATS or raw.strides[1] != 1:
        quantization.check_scales(raw, dtype)
    else:
        _run_packer(raw, dtype, None, len(raw), raw.shape[1] // dtype.nbytes * dtype.block)


def _run_packer(
    raw: np.ndarray, dtype: DType, packed: np.ndarray | None, rows: int, columns: int
) -> None:
    """Pack uint8 [n * ``rows``, row_bytes] to ``packed``, or check the scales if it is None."""
    assert raw.dtype == np.uint8 and raw.strides[1] == 1 and raw.strides[0] >= raw.shape[1]
    form = FORMATS[dtype.name]
    threads = max(1, min(_PACKERS, usable_cores(), raw.nbytes // _CHUNK))
    report = np.full(threads, -1, np.int64)
    block = PackArgs(
        source=raw.ctypes.data,
        stride=raw.strides[0],
        row_bytes=raw.shape[1],
        target=0 if packed is None else packed.ctypes.data,
        matrices=len(raw) // rows,
        rows=rows,
        blocks=columns // form.block,
        group_bytes=form.group_nbytes(columns),
        mapped=_in_mapped_file(raw),
        report=report.ctypes.data,
    )
    launch = Launch(_packer(dtype.name, packed is not None), block)
    CompiledProgram(threads, [[launch]], [BARRIER], (raw, packed, report)).run(None)
    if report.max() >= 0:
        raise quantization.bad_scale(int(report[report >= 0].min()), dtype)
