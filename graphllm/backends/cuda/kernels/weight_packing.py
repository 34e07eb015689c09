"""Split quantised weights into planes, as kernels read them; see formats.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ....formats import BLOCK_FORMATS, ROW_FORMATS
from ....graph.dtype import DType
from ....graph.tensor import Meta
from ..runtime.device import DevicePack
from ..runtime.source import module
from ..runtime.work import Launch, ceil

_MODULE = module("weight_packing")
_THREADS, _ALIGN = 256, 256
_ROW_ITEM = 16  # bytes and elements of an item of a row format
_SCALE_ROWS = 128  # a plane of scales by group has a multiple of this many rows

# (offset, end) of the bytes of a block that go to each plane, by block format; see formats.cuh.
PLANES = {name: form.plane_spans() for name, form in BLOCK_FORMATS.items() if form.planes}
INTEGERS = tuple(name for name in PLANES if BLOCK_FORMATS[name].integers)
QUANTISED = (*PLANES, *ROW_FORMATS)  # weight formats that are packed


def item_elements(kind: DType) -> int:
    """Elements that a thread loads at a time: 16 bytes of a float format, or of the first plane of
    a quantised format."""
    if kind.name in ROW_FORMATS:
        return _ROW_ITEM
    if kind.name not in PLANES:
        return 16 // kind.nbytes
    start, end = PLANES[kind.name][0]
    return 16 * kind.block // (end - start)


def row_plane_nbytes(kind: DType, depth: int) -> list[int]:
    """Bytes of a row of ``depth`` elements in each plane, without scales of whole rows."""
    if kind.name not in PLANES:
        return [depth * (1 if kind.name in ROW_FORMATS else kind.nbytes)]
    return [depth // kind.block * (end - start) for start, end in PLANES[kind.name]]


def _rows(meta: Meta) -> tuple[int, int]:
    """Number of rows of [..., N, K], and K."""
    *lines, columns = meta.bound().shape
    return prod(lines), int(columns)  # type: ignore[arg-type]


def _scales(meta: Meta) -> int:
    """Scales of a row."""
    by_row = ROW_FORMATS[meta.dtype.name].scaled_by_row
    return 1 if by_row else _rows(meta)[1] // meta.dtype.block


def _next_group(meta: Meta) -> int:
    """Floats from the scales of 128 elements of all rows to those of the next 128 elements; 0 if
    there is a scale per row."""
    by_row = ROW_FORMATS[meta.dtype.name].scaled_by_row
    return 0 if by_row else ceil(_rows(meta)[0], _SCALE_ROWS) * _SCALE_ROWS


def _plane_nbytes(meta: Meta) -> list[int]:
    """Bytes of each plane of [..., N, K]."""
    rows, columns = _rows(meta)
    found = [rows * nbytes for nbytes in row_plane_nbytes(meta.dtype, columns)]
    if meta.dtype.name in ROW_FORMATS:
        found.append(4 * _scales(meta) * (_next_group(meta) or rows))
    return found


def _offsets(meta: Meta) -> list[int]:
    """The offset of each plane of [..., N, K] and the end of the last one, in bytes."""
    found = [0]
    for nbytes in _plane_nbytes(meta):
        found.append(found[-1] + ceil(nbytes, _ALIGN) * _ALIGN)
    return found


def planes(address: int, meta: Meta) -> tuple[int, int, int, int]:
    """The struct Planes of a matrix at ``address``; a float matrix is its own first plane.

    Of a row format, the last two fields are numbers: items of a row, and `_next_group`.
    """
    if meta.dtype.name not in QUANTISED:
        return address, 0, 0, 0
    starts = [address + offset for offset in _offsets(meta)[:-1]]
    if meta.dtype.name in ROW_FORMATS:
        starts += [_rows(meta)[1] // _ROW_ITEM, _next_group(meta)]
    return (*starts, 0, 0, 0)[:4]  # type: ignore[return-value]


def packed_nbytes(meta: Meta) -> int:
    """Bytes of packed [..., N, K], or of a float matrix, in whole alignments."""
    if meta.dtype.name in QUANTISED:
        return _offsets(meta)[-1]
    rows, columns = _rows(meta)
    return ceil(rows * meta.dtype.row_nbytes(columns), _ALIGN) * _ALIGN


def scales_offset(meta: Meta) -> int:
    """Bytes from the elements of a packed row format to its scales."""
    return _offsets(meta)[1]


def _split(raw: int, packed: int, meta: Meta) -> Sequence[Launch]:
    """Launches that copy each plane from stored rows at ``raw`` to ``packed``."""
    if meta.dtype.name in ROW_FORMATS:
        return _split_rows(raw, packed, meta)
    rows, columns = _rows(meta)
    count = rows * (columns // meta.dtype.block)
    return [
        _copy(raw + first, meta.dtype.nbytes, packed + offset, last - first, count)
        for (first, last), offset in zip(PLANES[meta.dtype.name], _offsets(meta))
    ]


def _split_rows(raw: int, packed: int, meta: Meta) -> Sequence[Launch]:
    """`_split` of a row format."""
    rows, columns = _rows(meta)
    scales = packed + _offsets(meta)[1]
    stride, following = meta.dtype.row_nbytes(columns), _next_group(meta)
    elements = _copy(raw, stride, packed, columns, rows)
    if not following:
        return [elements, _copy(raw + columns, stride, scales, 4, rows)]
    count = _scales(meta)
    args = (raw + columns, stride, scales, count, following, rows * count)
    grid = (ceil(rows * count, _THREADS),)
    return [elements, Launch(_MODULE["transpose_scales"], grid, (_THREADS,), args)]


def _copy(source: int, stride: int, to: int, size: int, count: int) -> Launch:
    """Copy ``count`` times ``size`` bytes that are ``stride`` apart."""
    grid = (ceil(count * size, _THREADS),)
    return Launch(_MODULE["split"], grid, (_THREADS,), (source, stride, to, size, count))


def copy_rows(raw: int, to: int, meta: Meta) -> Launch:
    """Copy the rows of a float matrix."""
    rows, columns = _rows(meta)
    nbytes = meta.dtype.row_nbytes(columns)
    return _copy(raw, nbytes, to, nbytes, rows)


PACK = DevicePack(packed_nbytes, _split)
