"""Block formats as NumPy formulas: dequantise, quantise, and quantised activations.

This is the definition that every kernel is tested against, so it favours plainness over speed. The
weight formats are GGUF's, bit for bit (source: ggml, `ggml-common.h` for the layouts and
`ggml-quants.c` for the order of the float32 operations). A block is a run of bytes; the letters in
the comments are d (scale), m (offset), q (the small integer), all little-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .dtype import A8_32, A8_256, DType
from .errors import GraphError

F32 = np.float32
Array = np.ndarray

# Blocks whose largest magnitude is below this are stored as zero: above it neither d nor 127 / amax
# leaves the normal float32 range, so flush-to-zero hardware computes the same bits.
ACT_TINY = F32(2.0**-100)


def _f16(raw: Array) -> Array:
    """[n, 2k] bytes as float32 [n, k]."""
    return raw.view("<f2").astype(F32)


def _nibbles(qs: Array) -> Array:
    """[n, k] bytes as uint8 [n, 2k]: all low halves, then all high halves."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(qh: Array) -> Array:
    """Four bytes a block as the 32 values 0 or 16 that extend nibbles to five bits."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _q4_0(b: Array) -> Array:  # d:f16, 16 bytes of nibbles
    return _f16(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.int8) - 8).astype(F32)


def _q4_1(b: Array) -> Array:  # d:f16, m:f16, 16 bytes of nibbles
    return _f16(b[:, :2]) * _nibbles(b[:, 4:]).astype(F32) + _f16(b[:, 2:4])


def _q5_0(b: Array) -> Array:  # d:f16, 32 fifth bits, 16 bytes of nibbles
    q = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _f16(b[:, :2]) * (q.astype(np.int8) - 16).astype(F32)


def _q5_1(b: Array) -> Array:  # d:f16, m:f16, 32 fifth bits, 16 bytes of nibbles
    q = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _f16(b[:, :2]) * q.astype(F32) + _f16(b[:, 2:4])


def _q8_0(b: Array) -> Array:  # d:f16, 32 int8
    return _f16(b[:, :2]) * b[:, 2:].view(np.int8).astype(F32)


def _k_scales(b: Array) -> tuple[Array, Array]:
    """q4_k and q5_k: d:f16, dmin:f16, then eight 6-bit scales and eight 6-bit mins in 12 bytes.

    Returns float32 scale and min, [n, 8, 1]. The first four of each are the low six bits of a byte;
    the last four have their low half in bytes 8..11 and their top two bits above the first four.
    """
    low, high, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=-1)
    least = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=-1)
    d, dmin = _f16(b[:, :2]), _f16(b[:, 2:4])
    return (d * scale.astype(F32))[..., None], (dmin * least.astype(F32))[..., None]


def _q4_k(b: Array) -> Array:  # scales as above, 128 bytes of nibbles: 32 low, 32 high, four times
    scale, least = _k_scales(b)
    q = _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (scale * q.astype(F32) - least).reshape(-1, 256)


def _q5_k(b: Array) -> Array:  # scales, 32 bytes: bit j for sub-block j, nibbles as q4_k
    scale, least = _k_scales(b)
    q = _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    q = q | ((b[:, None, 16:48] >> bit & 1) << 4)
    return (scale * q.astype(F32) - least).reshape(-1, 256)


def _q6_k(b: Array) -> Array:
    """128 bytes of low nibbles, 64 of top bit pairs, 16 int8 scales, d:f16.

    Each half of the block (128 elements) is four runs of 32: the low halves of 64 bytes, then the
    high halves; run r takes bits 2r, 2r+1 of the half's 32 top bytes.
    """
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = b[:, 128:192].reshape(-1, 2, 1, 32) >> shift & 3
    q = (low | top << 4).astype(np.int8).reshape(-1, 16, 16) - 32
    scale = _f16(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(F32)
    return (scale[..., None] * q.astype(F32)).reshape(-1, 256)


_DEQUANTISE: dict[str, Callable[[Array], Array]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip


FORMATS = tuple(_DEQUANTISE)  # the block formats of weights that can be read


def dequantise(raw: Array, dtype: DType) -> Array:
    """uint8 [..., row_bytes] of ``dtype`` as float32 [..., elements].

    Bit-equal to ggml's scalar code. GraphError when the bytes are not whole blocks or the format
    has no formula here.
    """
    if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % dtype.nbytes:
        raise GraphError(f"{raw.dtype} {raw.shape} is not whole {dtype} blocks of {dtype.nbytes} B")
    if dtype.name == "bf16":  # bit shift instead of ml_dtypes: keeps NaN payloads, and is faster
        return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << 16).view(F32)
    if dtype.numpy is not None:
        return np.ascontiguousarray(raw).view(dtype.numpy.newbyteorder("<")).astype(F32)
    if dtype.name not in _DEQUANTISE:
        known = ", ".join(_DEQUANTISE)
        raise GraphError(f"no dequantise formula for {dtype}; known: {known}")
    blocks = np.ascontiguousarray(raw).reshape(-1, dtype.nbytes)
    count = raw.shape[-1] // dtype.nbytes * dtype.block
    with np.errstate(all="ignore"):  # any bit pattern is a valid input, inf and NaN scales too
        return _DEQUANTISE[dtype.name](blocks).reshape(*raw.shape[:-1], count)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix in a file's own bytes: ``raw`` uint8 [rows, row_bytes], ``elements`` a row.

    Works for plain dtypes too. GraphError when the bytes do not fit the elements.
    """

    raw: Array
    dtype: DType
    elements: int

    def __post_init__(self) -> None:
        want = self.dtype.row_nbytes(self.elements)
        if self.raw.dtype != np.uint8 or self.raw.ndim != 2 or self.raw.shape[1] != want:
            raise GraphError(
                f"{self.elements} {self.dtype} elements a row need uint8 [rows, {want}], "
                f"got {self.raw.dtype} {list(self.raw.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, elements)."""
        return self.raw.shape[0], self.elements

    def __len__(self) -> int:
        return self.raw.shape[0]

    def __getitem__(self, rows: slice | Array | list[int]) -> Blocks:
        """The chosen rows: a view for a slice, a copy for an array of row numbers or a mask."""
        return Blocks(self.raw[rows], self.dtype, self.elements)

    def dequantise(self) -> Array:
        """float32 [rows, elements]."""
        return dequantise(self.raw, self.dtype)

    def tiles(self, max_bytes: int = 16 << 20) -> Iterator[tuple[int, Array]]:
        """Yield (first row, float32 [n, elements]), each at most ``max_bytes`` or one row."""
        step = max(1, max_bytes // (4 * max(1, self.elements)))
        for start in range(0, len(self), step):
            yield start, self[start : start + step].dequantise()


def _act_check(dtype: DType, elements: int) -> int:
    """Elements a sum: 32 or 16. GraphError for another dtype or a ragged row."""
    if dtype not in (A8_32, A8_256):
        raise GraphError(f"{dtype} is not an activation format; known: a8_32, a8_256")
    dtype.row_nbytes(elements)
    return 32 if dtype == A8_32 else 16


def quantise_act(x: Array, dtype: DType) -> Array:
    """float32 [T, K] as quantised activations, uint8 [T, row_bytes]; GraphError if K is ragged.

    For each block of 32 (a8_32) or 256 (a8_256), every operation rounding once to float32, with no
    fused multiply-add and no reciprocal estimates::

        amax    = max |x|
        inverse = 127 / amax
        d       = amax / 127
        q       = int8(clip(round_half_even(x * inverse), -127, 127))
        sum     = exact integer sum of q over each 32 (int32, a8_32) or each 16 (int16, a8_256)

    When amax < 2**-100 (zero included): d = 0 and q = 0. When any x is NaN or infinite: d = NaN and
    q = 0, so that the block reads back as NaN. Both cases can be told from the maximum, as an
    unsigned integer, of the bits of |x|. Layout of a row: K int8, K/block float32 d, the sums.
    """
    x = np.ascontiguousarray(x, dtype=F32)
    rows, elements = x.shape
    per_sum = _act_check(dtype, elements)
    blocks = x.reshape(rows, elements // dtype.block, dtype.block)
    amax = np.abs(blocks).max(axis=-1, initial=0, keepdims=True)
    finite, live = np.isfinite(amax), amax >= ACT_TINY
    safe = np.where(finite & live, amax, F32(1))
    scaled = np.where(finite & live, blocks, F32(0)) * (F32(127) / safe)
    q = np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    d = np.where(finite, np.where(live, safe / F32(127), F32(0)), F32(np.nan))
    kind = "<i4" if dtype == A8_32 else "<i2"
    sums = q.reshape(rows, elements // per_sum, per_sum).sum(axis=-1, dtype=kind)
    planes = (q.reshape(rows, elements), d.astype("<f4")[..., 0], sums)
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in planes], axis=1)


def split_act(raw: Array, dtype: DType, elements: int) -> tuple[Array, Array, Array]:
    """The three planes of quantised activations, as views where possible.

    Returns q int8 [T, K], d float32 [T, K/block] and the sums (a8_32: int32 [T, K/32]; a8_256:
    int16 [T, K/16]). GraphError when ``raw`` is not uint8 [T, row_bytes].
    """
    _act_check(dtype, elements)
    if raw.dtype != np.uint8 or raw.ndim != 2 or raw.shape[1] != dtype.row_nbytes(elements):
        raise GraphError(f"{raw.dtype} {list(raw.shape)} does not hold {elements} {dtype} elements")
    scales_end = elements + elements // dtype.block * 4
    q = raw[:, :elements].view(np.int8)
    d = raw[:, elements:scales_end].view("<f4")
    return q, d, raw[:, scales_end:].view("<i4" if dtype == A8_32 else "<i2")


def dequantise_act(raw: Array, dtype: DType, elements: int) -> Array:
    """Quantised activations as float32 [T, K]: d * q, rounded once."""
    q, d, _ = split_act(raw, dtype, elements)
    blocks = q.reshape(*d.shape, dtype.block).astype(F32)
    return (d[..., None] * blocks).reshape(q.shape)


def _inverse(d: Array) -> Array:
    return np.divide(F32(1), d, out=np.zeros_like(d), where=d != 0)


def _half_bytes(d: Array) -> Array:
    """Scales [n, 1] as the two bytes of their float16."""
    return np.ascontiguousarray(d.astype("<f2")).view(np.uint8)


def _pack_nibbles(q: Array) -> Array:
    """Inverse of `_nibbles`: uint8 [..., 2k] below 16 as [..., k] bytes."""
    low, high = np.split(q, 2, axis=-1)
    return low | high << 4


def _largest(x: Array) -> Array:
    """The value of largest magnitude with its sign, [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)


def _round_away(x: Array) -> Array:
    """Halves away from zero, as C's roundf."""
    return np.trunc(x + np.copysign(F32(0.5), x))


def _to_q8_0(x: Array) -> Array:
    d = np.abs(x).max(axis=-1, keepdims=True) / F32(127)
    q = _round_away(x * _inverse(d)).astype(np.int8)
    return np.concatenate([_half_bytes(d), q.view(np.uint8)], axis=-1)


def _to_q4_0(x: Array) -> Array:
    d = _largest(x) / F32(-8)
    q = np.minimum(x * _inverse(d) + F32(8.5), 15).astype(np.uint8)
    return np.concatenate([_half_bytes(d), _pack_nibbles(q)], axis=-1)


def _to_q5_0(x: Array) -> Array:
    d = _largest(x) / F32(-16)
    q = np.minimum(x * _inverse(d) + F32(16.5), 31).astype(np.uint8)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    return np.concatenate([_half_bytes(d), fifth, _pack_nibbles(q & 15)], axis=-1)


def _from_least(x: Array, most: int) -> tuple[Array, Array]:
    """q in 0..most and the bytes of d and m: each block spans [min(x), max(x)]."""
    least = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - least) / F32(most)
    q = np.minimum((x - least) * _inverse(d) + F32(0.5), most).astype(np.uint8)
    return q, np.concatenate([_half_bytes(d), _half_bytes(least)], axis=-1)


def _to_q4_1(x: Array) -> Array:
    q, factors = _from_least(x, 15)
    return np.concatenate([factors, _pack_nibbles(q)], axis=-1)


def _to_q5_1(x: Array) -> Array:
    q, factors = _from_least(x, 31)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    return np.concatenate([factors, fifth, _pack_nibbles(q & 15)], axis=-1)


def _to_k_scales(x: Array, most: int) -> tuple[Array, Array]:
    """q in 0..most, [n, 8, 32], and the 16 bytes that `_k_scales` reads.

    Each sub-block of 32 spans [min(x, 0), max(x, 0)]; ggml searches for a better fit.
    """
    sub = x.reshape(-1, 8, 32)
    least = -np.minimum(sub.min(axis=-1), 0)
    span = (np.maximum(sub.max(axis=-1), 0) + least) / F32(most)
    d = (span.max(axis=-1, keepdims=True) / F32(63)).astype("<f2")
    dmin = (least.max(axis=-1, keepdims=True) / F32(63)).astype("<f2")
    scale = np.clip(np.rint(span * _inverse(d.astype(F32))), 0, 63).astype(np.uint8)
    low = np.clip(np.rint(least * _inverse(dmin.astype(F32))), 0, 63).astype(np.uint8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    base = (dmin.astype(F32) * low.astype(F32))[..., None]
    q = np.clip(np.rint((sub + base) * _inverse(step)), 0, most).astype(np.uint8)
    packed = [
        _half_bytes(d),
        _half_bytes(dmin),
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        low[:, :4] | low[:, 4:] >> 4 << 6,
        (scale[:, 4:] & 15) | low[:, 4:] << 4,
    ]
    return q, np.concatenate(packed, axis=-1)


def _to_q4_k(x: Array) -> Array:
    q, scales = _to_k_scales(x, 15)
    return np.concatenate([scales, _pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)], axis=-1)


def _to_q5_k(x: Array) -> Array:
    q, scales = _to_k_scales(x, 31)
    bit = np.arange(8, dtype=np.uint8)[:, None]
    fifth = np.bitwise_or.reduce(q >> 4 << bit, axis=1)
    nibbles = _pack_nibbles((q & 15).reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate([scales, fifth, nibbles], axis=-1)


def _to_q6_k(x: Array) -> Array:
    """Each sub-block of 16 is scaled by its value of largest magnitude; ggml searches further."""
    sub = x.reshape(-1, 16, 16)
    span = _largest(sub)[..., 0] / F32(-32)
    d = (_largest(span) / F32(-128)).astype("<f2")
    scale = np.clip(np.rint(span * _inverse(d.astype(F32))), -128, 127).astype(np.int8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    q = (np.clip(np.rint(sub * _inverse(step)), -32, 31) + 32).astype(np.uint8)
    runs = q.reshape(-1, 2, 4, 32)
    low = _pack_nibbles((runs & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = np.bitwise_or.reduce(runs >> 4 << shift, axis=-2).reshape(-1, 64)
    return np.concatenate([low, top, scale.view(np.uint8), _half_bytes(d)], axis=-1)


_QUANTISE: dict[str, Callable[[Array], Array]] = {
    "q4_0": _to_q4_0, "q4_1": _to_q4_1, "q5_0": _to_q5_0, "q5_1": _to_q5_1, "q8_0": _to_q8_0,
    "q4_k": _to_q4_k, "q5_k": _to_q5_k, "q6_k": _to_q6_k,
}  # fmt: skip


def quantise(x: Array, dtype: DType) -> Array:
    """Finite float32 [rows, K] in ``dtype``'s bytes, uint8 [rows, row_bytes].

    Blocks of 32 follow ggml's reference quantisers; q4_k, q5_k and q6_k are valid but plainer than
    ggml's, which search for the best scales. f32, f16 and bf16 round to nearest even. GraphError
    for other formats, ragged rows, and values that are not finite.
    """
    x = np.ascontiguousarray(x, dtype=F32)
    if x.ndim != 2 or not np.isfinite(x).all():
        raise GraphError(f"quantise needs a finite matrix [rows, K], got shape {list(x.shape)}")
    want = dtype.row_nbytes(x.shape[1])
    if dtype.name in ("f32", "f16", "bf16"):
        return x.astype(dtype.numpy).view(np.uint8)
    if dtype.name not in _QUANTISE:
        raise GraphError(f"no quantiser for {dtype}; known: {', '.join(_QUANTISE)}")
    return _QUANTISE[dtype.name](x.reshape(-1, dtype.block)).reshape(x.shape[0], want)
