"""Rows of a weight table, dequantised where they lie (in the mapped file).

Arithmetic rounds exactly as `graphllm.formats.quantization` writes it, hence `exact_helper`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, int32

from ....formats.iq4 import IQ4_VALUES
from ....formats.mxfp4 import MXFP4_VALUES
from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (  # fmt: skip
    Kernel,
    args,
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
from ..runtime.thread_pool import STATUS_ID
from .elementwise import thread_range

_PIECE = 256  # elements, a whole number of blocks of every format
_IQ4, _MXFP4 = np.array(IQ4_VALUES, np.float32), np.array(MXFP4_VALUES, np.float32)


@exact_helper
def _half(address):
    return f16_to_f32(u16s(address)[0])


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


@exact_helper
def _q8_0(at, y, n):
    for b in range(n // 32):
        d, q, out = _half(at + 34 * b), i8s(at + 34 * b + 2), f32s(y + 128 * b)
        for i in range(32):
            out[i] = d * float32(q[i])


@exact_helper
def _q4_0(at, y, n):
    for b in range(n // 32):
        d, q, out = _half(at + 18 * b), u8s(at + 18 * b + 2), f32s(y + 128 * b)
        for i in range(16):
            out[i] = d * float32(int32(q[i] & 15) - int32(8))
            out[i + 16] = d * float32(int32(q[i] >> 4) - int32(8))


@exact_helper
def _q4_1(at, y, n):
    for b in range(n // 32):
        block, out = at + 20 * b, f32s(y + 128 * b)
        d, m, q = _half(block), _half(block + 2), u8s(block + 4)
        for i in range(16):
            out[i] = d * float32(q[i] & 15) + m
            out[i + 16] = d * float32(q[i] >> 4) + m


@exact_helper
def _fives(high, q, i):
    """Elements i and i + 16 of 32: nibbles of ``q`` below the fifth bits at ``high``."""
    bits = int32(u16s(high)[0]) | (int32(u16s(high + 2)[0]) << int32(16))
    low = int32(q[i] & 15) | (((bits >> int32(i)) & int32(1)) << int32(4))
    top = int32(q[i] >> 4) | (((bits >> int32(i + 16)) & int32(1)) << int32(4))
    return low, top


@exact_helper
def _q5_0(at, y, n):
    for b in range(n // 32):
        block, out = at + 22 * b, f32s(y + 128 * b)
        d, q = _half(block), u8s(block + 6)
        for i in range(16):
            low, top = _fives(block + 2, q, i)
            out[i] = d * float32(low - int32(16))
            out[i + 16] = d * float32(top - int32(16))


@exact_helper
def _q5_1(at, y, n):
    for b in range(n // 32):
        block, out = at + 24 * b, f32s(y + 128 * b)
        d, m, q = _half(block), _half(block + 2), u8s(block + 8)
        for i in range(16):
            low, top = _fives(block + 4, q, i)
            out[i] = d * float32(low) + m
            out[i + 16] = d * float32(top) + m


@exact_helper
def _k_scales(at, j):
    """Scale and minimum of sub-block j of q4_k and q5_k: see `graphllm.formats.quantization`."""
    d, dmin, s = _half(at), _half(at + 2), u8s(at + 4)
    if j < 4:
        scale, least = s[j] & 63, s[j + 4] & 63
    else:
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6 << 4)
        least = (s[j + 4] >> 4) | (s[j] >> 6 << 4)
    return d * float32(scale), dmin * float32(least)


@exact_helper
def _q4_k(at, y, n):
    q, out = u8s(at + 16), f32s(y)
    for j in range(8):
        a, m = _k_scales(at, j)
        shift = 4 * (j % 2)
        for i in range(32):
            out[32 * j + i] = a * float32((q[32 * (j // 2) + i] >> shift) & 15) - m


@exact_helper
def _q5_k(at, y, n):
    high, q, out = u8s(at + 16), u8s(at + 48), f32s(y)
    for j in range(8):
        a, m = _k_scales(at, j)
        shift = 4 * (j % 2)
        for i in range(32):
            low = (q[32 * (j // 2) + i] >> shift) & 15
            out[32 * j + i] = a * float32(low | (((high[i] >> j) & 1) << 4)) - m


@exact_helper
def _q6_k(at, y, n):
    low, top, scale, out = u8s(at), u8s(at + 128), i8s(at + 192), f32s(y)
    d = _half(at + 208)
    for run in range(8):  # four runs of 32 in each half
        half, r = run // 4, run % 4
        for i in range(32):
            nibble = (low[64 * half + 32 * (r % 2) + i] >> (4 * (r // 2))) & 15
            bits = (top[32 * half + i] >> (2 * r)) & 3
            value = int32(nibble | (bits << 4)) - int32(32)
            a = d * float32(scale[2 * run + i // 16])
            out[32 * run + i] = a * float32(value)


@exact_helper
def _q2_k(at, y, n):
    both, q, out = u8s(at), u8s(at + 16), f32s(y)
    d, dmin = _half(at + 80), _half(at + 82)
    for run in range(8):  # four runs of 32 in each half
        for i in range(32):
            factors = both[2 * run + i // 16]
            bits = (q[32 * (run // 4) + i] >> (2 * (run % 4))) & 3
            least = dmin * float32(factors >> 4)
            out[32 * run + i] = d * float32(factors & 15) * float32(bits) - least


@exact_helper
def _q3_k(at, y, n):
    third, q, scales, out = u8s(at), u8s(at + 32), u8s(at + 96), f32s(y)
    d = _half(at + 108)
    for k in range(16):
        top = (scales[8 + k % 4] >> (2 * (k // 4))) & 3
        scale = ((scales[k % 8] >> (4 * (k // 8))) & 15) | (top << 4)
        a, run = d * float32(int32(scale) - int32(32)), k // 2
        for i in range(16 * (k % 2), 16 * (k % 2) + 16):
            low = (q[32 * (run // 4) + i] >> (2 * (run % 4))) & 3
            value = int32(low | (((third[i] >> run) & 1) << 2)) - int32(4)
            out[32 * run + i] = a * float32(value)


@exact_helper
def _coded(table, d, q, out):
    """Elements of 32 whose nibbles number values of ``table``."""
    for i in range(16):
        out[i] = d * table[q[i] & 15]
        out[i + 16] = d * table[q[i] >> 4]


@exact_helper
def _iq4_nl(at, y, n):
    for b in range(n // 32):
        block = at + 18 * b
        _coded(_IQ4, _half(block), u8s(block + 2), f32s(y + 128 * b))


@exact_helper
def _iq4_xs(at, y, n):
    d, top, low = _half(at), int32(u16s(at + 2)[0]), u8s(at + 4)
    for k in range(8):
        scale = int32((low[k // 2] >> (4 * (k % 2))) & 15) | (((top >> (2 * k)) & 3) << 4)
        a = d * float32(scale - 32)
        _coded(_IQ4, a, u8s(at + 8 + 16 * k), f32s(y + 128 * k))


@exact_helper
def _mxfp4(at, y, n):
    for b in range(n // 32):
        block = at + 17 * b
        e = int32(u8s(block)[0])
        # 2 ** (e - 128) as a bfloat16, which is subnormal where e is 0 or 1.
        bits = (e - 1) << 7 if e > 1 else 0x20 << e
        _coded(_MXFP4, bf16_to_f32(bits), u8s(block + 1), f32s(y + 128 * b))


def _table(name: str, decode: Any, block: int, size: int) -> Kernel:
    """A kernel for one format; ``size`` bytes a block."""

    @kernel(key=(name,))
    def rows(p, thread, threads):
        ids, count_at, w, stride, total, y, width = args(p, 7)
        index = i32s(ids)
        pieces = (width + _PIECE - 1) // _PIECE
        first, last = thread_range(load_i64(count_at) * pieces, thread, threads)
        for item in range(first, last):
            line, column = item // pieces, item % pieces * _PIECE
            row = index[line]
            if row < 0 or row >= total:
                set_status(p, STATUS_ID)
                continue
            source = w + row * stride + column // block * size
            decode(source, y + (line * width + column) * 4, min(_PIECE, width - column))

    return rows


_FORMATS = {
    "f32": _table("f32", _f32, 1, 4),
    "f16": _table("f16", _f16, 1, 2),
    "bf16": _table("bf16", _bf16, 1, 2),
    "q8_0": _table("q8_0", _q8_0, 32, 34),
    "q4_0": _table("q4_0", _q4_0, 32, 18),
    "q4_1": _table("q4_1", _q4_1, 32, 20),
    "q5_0": _table("q5_0", _q5_0, 32, 22),
    "q5_1": _table("q5_1", _q5_1, 32, 24),
    "q4_k": _table("q4_k", _q4_k, 256, 144),
    "q5_k": _table("q5_k", _q5_k, 256, 176),
    "q6_k": _table("q6_k", _q6_k, 256, 210),
    "q2_k": _table("q2_k", _q2_k, 256, 84),
    "q3_k": _table("q3_k", _q3_k, 256, 110),
    "iq4_nl": _table("iq4_nl", _iq4_nl, 32, 18),
    "iq4_xs": _table("iq4_xs", _iq4_xs, 256, 136),
    "mxfp4": _table("mxfp4", _mxfp4, 32, 17),
}


@BACKEND.kernel("embedding", dtypes={"w": tuple(_FORMATS)}, layout={"w": "rows"})
def embedding(ctx: KernelContext) -> Launch:
    ids, w = ctx.ids, ctx.w
    total, width = w.meta.shape
    words = [ids.address, ctx.live(ids.meta.rows), w.address, w.row_stride, total]
    return Launch(_FORMATS[w.dtype.name], [*words, ctx.out.address, width])
