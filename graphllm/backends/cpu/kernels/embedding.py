"""embedding: rows of a weight table, dequantised from the stored bytes (in the mapped file).

Values round exactly as the decoders of `graphllm.formats` do.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ....formats import ROW_FORMATS
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (  # fmt: skip
    Kernel,
    bf16_to_f32,
    exact_helper,
    f16_to_f32,
    f32s,
    i8s,
    i32s,
    kernel,
    load_i64,
    set_status,
    u8s,
    u16s,
)
from ..runtime.lazy_numba import types
from ..runtime.thread_pool import STATUS_ID
from ..simd.emitter import LANES, VECTOR
from .elementwise import thread_range
from .linear_microkernels import unpack_float, workspace
from .weight_packing import pack_block

_CHUNK = 256  # elements of a float row that a thread takes at a time


@exact_helper
def _f32(at, y, n):
    for i in range(n):
        f32s(y)[i] = f32s(at)[i]


@exact_helper
def _f16(at, y, n):
    for i in range(n):
        f32s(y)[i] = f16_to_f32(u16s(at)[i])


@exact_helper
def _bf16(at, y, n):
    for i in range(n):
        f32s(y)[i] = bf16_to_f32(u16s(at)[i])


def _float_decoder(decode: Any, size: int) -> tuple[Any, int]:
    """`_block_decoder` of elements of ``size`` bytes."""

    @exact_helper
    def run(row, first, y, width):
        decode(row + first * size, y + 4 * first, min(_CHUNK, width - first))

    return run, _CHUNK


def _block_decoder(name: str) -> tuple[Any, int]:
    """A helper ``run(row, first, y, width)`` that decodes elements of a row from ``first`` on, and
    how many it decodes.

    16 blocks of a row are packed as the blocks of 16 rows would be, so that the microkernel that
    unpacks a tile decodes them.
    """
    form = FORMATS[name]
    code, block, nbytes = form.code, form.block, form.nbytes
    size, room = nbytes // LANES, nbytes + VECTOR + block * VECTOR

    @exact_helper
    def run(row, first, y, width):
        packed = workspace(room)
        panel = packed + (nbytes + VECTOR - 1) // VECTOR * VECTOR
        count, source = min(LANES, (width - first) // block), row + first // block * size
        pack_block(code, source, size, count, packed)
        unpack_float(code, packed, panel, 1)
        values, out = f32s(panel), f32s(y + 4 * first)
        for b in range(count):
            for i in range(block):
                out[b * block + i] = values[i * LANES + b]

    return run, LANES * block


def _row_decoder(name: str) -> tuple[Any, int]:
    """`_block_decoder` of row formats, whose scales are at the end of a row."""
    form = ROW_FORMATS[name]
    per, float8 = 0 if form.scaled_by_row else form.dtype.block, form.element != np.int8

    @exact_helper
    def run(row, first, y, width):
        count, scales, out = min(_CHUNK, width - first), f32s(row + width), f32s(y + 4 * first)
        for i in range(count):
            d = scales[(first + i) // per] if per != 0 else scales[0]
            if float8:
                byte = types.uint16(u8s(row)[first + i])
                half = ((byte & types.uint16(0x7F)) << 7) | ((byte & types.uint16(0x80)) << 8)
                value = f16_to_f32(types.uint16(half)) * types.float32(256)
            else:
                value = types.float32(i8s(row)[first + i])
            out[i] = value * d

    return run, _CHUNK


def _decoder(name: str) -> tuple[Any, int]:
    if name in _FLOATS:
        return _float_decoder(*_FLOATS[name])
    return _row_decoder(name) if name in ROW_FORMATS else _block_decoder(name)


_FLOATS = {"f32": (_f32, 4), "f16": (_f16, 2), "bf16": (_bf16, 2)}


class EmbeddingArgs(NamedTuple):
    """Argument block of `embedding`."""

    ids: int
    id_count: int  # address of the live count
    w: int
    w_stride: int
    w_rows: int
    y: int
    width: int


_read_embedding = argument_reader(EmbeddingArgs)


@cache
def _rows(name: str) -> Kernel:
    """The kernel for a format."""
    decode, chunk = _decoder(name)

    @kernel(key=(FORMATS[name].cache_key,))
    def rows(p, thread, threads):
        a = _read_embedding(p)
        index, width = i32s(a.ids), a.width
        chunks = (width + chunk - 1) // chunk
        start, end = thread_range(load_i64(a.id_count) * chunks, thread, threads)
        for item in range(start, end):
            line, first = item // chunks, item % chunks * chunk
            row = index[line]
            if row < 0 or row >= a.w_rows:
                set_status(p, STATUS_ID)
                continue
            decode(a.w + row * a.w_stride, first, a.y + line * width * 4, width)

    return rows


@BACKEND.kernel("embedding", dtypes={"w": FORMATS}, layout={"w": "rows"})
def embedding(ctx: KernelContext) -> Launch:
    ids, w = ctx.ids, ctx.w
    total, width = w.meta.shape
    count, out = ctx.live(ids.meta.rows), ctx.out.address
    block = EmbeddingArgs(ids.address, count, w.address, w.row_stride, total, out, width)
    return Launch(_rows(w.dtype.name), block)
