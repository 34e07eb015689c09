"""The weight formats of GGUF as NumPy formulas, a block at a time.

Source: ggml, `ggml-common.h` for the layouts and `ggml-quants.c` for the order of the float32
operations. A block is a run of bytes; the letters in the comments are d (scale), m (offset) and q
(the small integer), all little-endian. Formulas take and give all blocks at once: uint8
[n, block bytes] and float32 [n, block elements]. `graphllm.formats.quantization` calls them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

F32 = np.float32
Array = np.ndarray

# What the four bits of iq4_nl and iq4_xs stand for, and, twice as large, those of mxfp4 (e2m1).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Where a block keeps the scales and offsets that must be finite: (offset, bytes) of each. Those of
# two bytes are float16; mxfp4's is an exponent, of which 255 is NaN.
SCALES: dict[str, tuple[tuple[int, int], ...]] = {
    "q4_0": ((0, 2),), "q4_1": ((0, 2), (2, 2)), "q5_0": ((0, 2),), "q5_1": ((0, 2), (2, 2)),
    "q8_0": ((0, 2),), "q2_k": ((80, 2), (82, 2)), "q3_k": ((108, 2),), "q4_k": ((0, 2), (2, 2)),
    "q5_k": ((0, 2), (2, 2)), "q6_k": ((208, 2),), "iq4_nl": ((0, 2),), "iq4_xs": ((0, 2),),
    "mxfp4": ((0, 1),),
}  # fmt: skip

# ------------------------------------------------------------------------------------- dequantise


def _f16(raw: Array) -> Array:
    """[n, 2k] bytes as float32 [n, k]."""
    return raw.view("<f2").astype(F32)


def _nibbles(qs: Array) -> Array:
    """[n, k] bytes as uint8 [n, 2k]: all low halves, then all high halves."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(qh: Array) -> Array:
    """Four bytes a block as the 32 values 0 or 16 that extend nibbles to five bits."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _bits(raw: Array) -> Array:
    """[n, k] bytes as uint8 [n, 8, k]: all lowest bits, then the bits above them, and so on."""
    return raw[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1


def _bit_pairs(raw: Array) -> Array:
    """[n, 64] bytes as uint8 [n, 2, 4, 32]: of each half all lowest bit pairs, then the next."""
    return raw.reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3


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
    q = q | _bits(b[:, 16:48]) << 4
    return (scale * q.astype(F32) - least).reshape(-1, 256)


def _q6_k(b: Array) -> Array:
    """128 bytes of low nibbles, 64 of top bit pairs, 16 int8 scales, d:f16.

    Each half of the block (128 elements) is four runs of 32: the low halves of 64 bytes, then the
    high halves; run r takes bits 2r, 2r+1 of the half's 32 top bytes.
    """
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    q = (low | _bit_pairs(b[:, 128:192]) << 4).astype(np.int8).reshape(-1, 16, 16) - 32
    scale = _f16(b[:, 208:210]) * b[:, 192:208].view(np.int8).astype(F32)
    return (scale[..., None] * q.astype(F32)).reshape(-1, 256)


def _q2_k(b: Array) -> Array:  # 16 bytes: a scale below a min each; 64 of bit pairs; d, dmin:f16
    scale = _f16(b[:, 80:82]) * (b[:, :16] & 15).astype(F32)
    least = _f16(b[:, 82:84]) * (b[:, :16] >> 4).astype(F32)
    q = _bit_pairs(b[:, 16:80]).reshape(-1, 16, 16).astype(F32)
    return (scale[..., None] * q - least[..., None]).reshape(-1, 256)


def _q3_k(b: Array) -> Array:
    """32 bytes of third bits, 64 of bit pairs, sixteen 6-bit scales in 12 bytes, d:f16.

    The scales' low halves are nibbles (`_nibbles`), their top bits pairs: four bytes of each.
    """
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    top = (b[:, None, 104:108] >> shift & 3).reshape(-1, 16)
    scale = (_nibbles(b[:, 96:104]) | top << 4).astype(np.int8) - 32
    third = _bits(b[:, :32]).reshape(-1, 2, 4, 32)
    q = (_bit_pairs(b[:, 32:96]) | third << 2).astype(np.int8).reshape(-1, 16, 16) - 4
    d = _f16(b[:, 108:110]) * scale.astype(F32)
    return (d[..., None] * q.astype(F32)).reshape(-1, 256)


def _iq4_nl(b: Array) -> Array:  # d:f16, 16 bytes of nibbles
    return _f16(b[:, :2]) * np.array(IQ4_VALUES, F32)[_nibbles(b[:, 2:])]


def _iq4_xs(b: Array) -> Array:
    """d:f16, eight scales (the top two bits of all in 2 bytes, then nibbles in 4), 128 nibbles."""
    pair = np.arange(0, 16, 2, dtype=np.uint16)
    top = (b[:, 2:4].view("<u2") >> pair & 3).astype(np.uint8)
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    d = _f16(b[:, :2]) * ((low | top << 4).astype(np.int8) - 32).astype(F32)
    q = _nibbles(b[:, 8:].reshape(-1, 8, 16))
    return (d[..., None] * np.array(IQ4_VALUES, F32)[q]).reshape(-1, 256)


def _e8m0(e: Array) -> Array:
    """2 ** (e - 128) for each byte: half of what it stands for, as `MXFP4_VALUES` are doubled."""
    bits = e.astype(np.uint32)
    small = np.uint32(0x00200000) << np.minimum(bits, 1)  # subnormal
    return np.where(bits < 2, small, (bits - 1) << 23).astype(np.uint32).view(F32)


def _mxfp4(b: Array) -> Array:  # a byte of exponent, 16 bytes of nibbles
    return _e8m0(b[:, :1]) * np.array(MXFP4_VALUES, F32)[_nibbles(b[:, 1:])]


DEQUANTISE: dict[str, Callable[[Array], Array]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4,
}  # fmt: skip

# --------------------------------------------------------------------------------------- quantise


def _inverse(d: Array) -> Array:
    """1 / d; 0 where that is not a finite number, so that what is next to nothing becomes zero."""
    inverse = F32(1) / d
    return np.where(np.isfinite(inverse), inverse, F32(0))


def _half_bytes(d: Array) -> Array:
    """Scales [n, 1] as the two bytes of their float16."""
    return np.ascontiguousarray(d.astype("<f2")).view(np.uint8)


def _pack_nibbles(q: Array) -> Array:
    """Inverse of `_nibbles`: uint8 [..., 2k] below 16 as [..., k] bytes."""
    low, high = np.split(q, 2, axis=-1)
    return low | high << 4


def _pack_bits(q: Array) -> Array:
    """Inverse of `_bits`."""
    return np.bitwise_or.reduce(q << np.arange(8, dtype=np.uint8)[:, None], axis=1)


def _pack_bit_pairs(q: Array) -> Array:
    """Inverse of `_bit_pairs`, from any shape of as many elements: uint8 [n, 64]."""
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(q.reshape(-1, 2, 4, 32) << shift, axis=2).reshape(-1, 64)


def _largest(x: Array) -> Array:
    """The value of largest magnitude with its sign, of several the first, [..., 1]."""
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
    least = np.take_along_axis(x, x.argmin(axis=-1)[..., None], axis=-1)  # the first zero's sign
    d = np.abs(x.max(axis=-1, keepdims=True) - least) / F32(most)
    q = np.minimum((x - least) * _inverse(d) + F32(0.5), most).astype(np.uint8)
    return q, np.concatenate([_half_bytes(d), _half_bytes(least)], axis=-1)


def _to_q4_1(x: Array) -> Array:
    q, factors = _from_least(x, 15)
    return np.concatenate([factors, _pack_nibbles(q)], axis=-1)


def _to_q5_1(x: Array) -> Array:
    q, factors = _from_least(x, 31)
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    return np.concatenate([factors, fifth, _pack_nibbles(q & 15)], axis=-1)


def _fit_span(sub: Array, most: int, top: int) -> tuple[Array, Array, Array, Array, Array]:
    """q in 0..most, scales and mins in 0..top, d and dmin as float16: see `_k_scales`.

    Each sub-block, sub [n, count, elements], spans [min(x, 0), max(x, 0)]; ggml searches for a
    better fit.
    """
    least, highest = sub.min(axis=-1), sub.max(axis=-1)
    least = -np.where(least < 0, least, F32(0))  # never the zero with the other sign
    span = (np.where(highest > 0, highest, F32(0)) + least) / F32(most)
    d = (span.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    dmin = (least.max(axis=-1, keepdims=True) / F32(top)).astype("<f2")
    scale = np.clip(np.rint(span * _inverse(d.astype(F32))), 0, top).astype(np.uint8)
    low = np.clip(np.rint(least * _inverse(dmin.astype(F32))), 0, top).astype(np.uint8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    base = (dmin.astype(F32) * low.astype(F32))[..., None]
    q = np.clip(np.rint((sub + base) * _inverse(step)), 0, most).astype(np.uint8)
    return q, scale, low, d, dmin


def _to_q2_k(x: Array) -> Array:
    q, scale, low, d, dmin = _fit_span(x.reshape(-1, 16, 16), 3, 15)
    packed = [scale | low << 4, _pack_bit_pairs(q), _half_bytes(d), _half_bytes(dmin)]
    return np.concatenate(packed, axis=-1)


def _to_k_scales(x: Array, most: int) -> tuple[Array, Array]:
    """q in 0..most, [n, 8, 32], and the 16 bytes that `_k_scales` reads."""
    q, scale, low, d, dmin = _fit_span(x.reshape(-1, 8, 32), most, 63)
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
    fifth = _pack_bits(q >> 4)
    nibbles = _pack_nibbles((q & 15).reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate([scales, fifth, nibbles], axis=-1)


def _fit_largest(sub: Array, lowest: int, top: int) -> tuple[Array, Array, Array]:
    """sub in steps of its scales, the scales in -top..top - 1, and d as float16.

    In each sub-block, sub [n, count, elements], the value of largest magnitude becomes about
    ``lowest``, which is negative; ggml searches further.
    """
    span = _largest(sub)[..., 0] / F32(lowest)
    d = (_largest(span) / F32(-top)).astype("<f2")
    scale = np.clip(np.rint(span * _inverse(d.astype(F32))), -top, top - 1).astype(np.int8)
    step = (d.astype(F32) * scale.astype(F32))[..., None]
    return sub * _inverse(step), scale, d


def _to_q3_k(x: Array) -> Array:
    steps, scale, d = _fit_largest(x.reshape(-1, 16, 16), -4, 32)
    q = (np.clip(np.rint(steps), -4, 3) + 4).astype(np.uint8)
    six = (scale + 32).astype(np.uint8)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    scales = [
        _pack_nibbles(six & 15),
        np.bitwise_or.reduce((six >> 4).reshape(-1, 4, 4) << shift, 1),
    ]
    third = _pack_bits((q >> 2).reshape(-1, 8, 32))
    return np.concatenate([third, _pack_bit_pairs(q & 3), *scales, _half_bytes(d)], axis=-1)


def _to_q6_k(x: Array) -> Array:
    steps, scale, d = _fit_largest(x.reshape(-1, 16, 16), -32, 128)
    q = (np.clip(np.rint(steps), -32, 31) + 32).astype(np.uint8)
    low = _pack_nibbles((q & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    top = _pack_bit_pairs(q >> 4)
    return np.concatenate([low, top, scale.view(np.uint8), _half_bytes(d)], axis=-1)


def _nearest(x: Array, values: tuple[int, ...]) -> Array:
    """The index of the nearest of ``values``, which ascend; of two, the first."""
    table = np.array(values, F32)
    return np.searchsorted((table[1:] + table[:-1]) / 2, x).astype(np.uint8)


def _to_iq4_nl(x: Array) -> Array:
    d = _largest(x) / F32(-127)
    q = _nearest(x * _inverse(d), IQ4_VALUES)
    return np.concatenate([_half_bytes(d), _pack_nibbles(q)], axis=-1)


def _to_iq4_xs(x: Array) -> Array:
    steps, scale, d = _fit_largest(x.reshape(-1, 8, 32), -127, 32)
    six = (scale + 32).astype(np.uint8)
    top = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << np.arange(0, 16, 2), axis=-1)
    low = six[:, ::2] & 15 | six[:, 1::2] << 4
    packed = [
        _half_bytes(d),
        top.astype("<u2")[:, None].view(np.uint8),
        low,
        _pack_nibbles(_nearest(steps, IQ4_VALUES)).reshape(-1, 128),
    ]
    return np.concatenate(packed, axis=-1)


def _to_mxfp4(x: Array) -> Array:
    """The largest magnitude becomes 8 to 16 steps, of which there are 12."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    exponent = np.clip(np.frexp(amax)[1] + 124, 0, 254)
    e = np.where(amax > 0, exponent, 0).astype(np.uint8)
    q = _nearest(np.abs(x) / _e8m0(e), MXFP4_VALUES[:8])
    q |= ((x < 0) & (q > 0)).astype(np.uint8) << 3
    return np.concatenate([e, _pack_nibbles(q)], axis=-1)


QUANTISE: dict[str, Callable[[Array], Array]] = {
    "q4_0": _to_q4_0, "q4_1": _to_q4_1, "q5_0": _to_q5_0, "q5_1": _to_q5_1, "q8_0": _to_q8_0,
    "q2_k": _to_q2_k, "q3_k": _to_q3_k, "q4_k": _to_q4_k, "q5_k": _to_q5_k, "q6_k": _to_q6_k,
    "iq4_nl": _to_iq4_nl, "iq4_xs": _to_iq4_xs, "mxfp4": _to_mxfp4,
}  # fmt: skip
