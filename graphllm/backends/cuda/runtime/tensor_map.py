"""Tensor maps, which describe a matrix of bytes to the copy engine of capability 9.0."""

from __future__ import annotations

import ctypes
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
    room = ctypes.create_string_buffer(_SIZE + _ALIGNMENT)
    start = -ctypes.addressof(room) % _ALIGNMENT
    status = gpu.library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start), _UINT8, 2, ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(row_nbytes, rows), (ctypes.c_uint64 * 1)(stride),
        (ctypes.c_uint32 * 2)(TILE_BYTES, tile_rows), (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _FILL_ZEROS,
    )  # fmt: skip
    if status:
        raise GraphllmError(
            f"CUDA error {status} at the tensor map of {rows} rows of {row_nbytes} bytes"
        )
    return room.raw[start : start + _SIZE]
