"""Tensor maps, which describe a matrix of bytes to the copy engine of capability 9.0."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....errors import GraphllmError

if TYPE_CHECKING:
    from .launch import Gpu

# Values of enumerations of cuda.h: data type, interleave, swizzle, promotion in L2, fill.
_UINT8, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS = 0, 0, 3, 3, 0
_SIZE, _ALIGNMENT = 128, 64  # CUtensorMap
TILE_BYTES = 128  # of a row of a tile


def tensor_map(
    gpu: Gpu, address: int, rows: int, row_nbytes: int, stride: int, tile_rows: int
) -> bytes:
    """Return the map of a matrix for tiles of ``tile_rows`` rows of 128 bytes.

    Args:
        gpu: the GPU.
        address: of the first row, a multiple of 16.
        rows: number of rows; tiles read zeros beyond them, and beyond the ends of rows.
        row_nbytes: bytes of a row.
        stride: bytes from one row to the next, a multiple of 16.
        tile_rows: rows of a tile, at most 256.

    Raises:
        GraphllmError: the driver refuses the matrix.
    """
    return _encode(gpu, address, (row_nbytes, rows), (stride,), (TILE_BYTES, tile_rows))


def interleaved_map(gpu: Gpu, address: int, rows: int, row_nbytes: int, tile_rows: int) -> bytes:
    """Return the map of a dense matrix for `copy_interleaved` of tensor_copies.cuh.

    Arguments and errors as for `tensor_map`; ``rows`` and ``tile_rows`` are multiples of 32.
    """
    sizes = (row_nbytes, 2, 4, 4, rows // 32)
    strides = tuple(row_nbytes * count for count in (1, 8, 2, 32))
    return _encode(gpu, address, sizes, strides, (TILE_BYTES, 2, 4, 4, tile_rows // 32))


def _encode(
    gpu: Gpu, address: int, sizes: Sequence[int], strides: Sequence[int], tile: Sequence[int]
) -> bytes:
    """Return a map of bytes: sizes of the axes, strides of all but the first, sizes of a tile."""
    room = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start, rank = -ctypes.addressof(room) % _ALIGNMENT, len(sizes)
    status = gpu.library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start), _UINT8, rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*tile), (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS,
    )  # fmt: skip
    if status:
        axes = " x ".join(map(str, sizes[::-1]))
        raise GraphllmError(f"CUDA error {status} at the tensor map of {axes} bytes")
    return room.raw[start : start + _SIZE]
