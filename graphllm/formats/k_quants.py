"""GGUF's k-quants: blocks of 256 elements in sub-blocks of 16 or 32 that have integer scales.

x = d * scale * q - dmin * minimum (q2_k, q4_k, q5_k), or x = d * scale * (q - offset) (q3_k, q6_k).
Layouts and the order of the float32 operations follow ggml, `ggml-common.h` and `ggml-quants.c`.
The encoders fit the scales to the extreme values, unless scales are given.
"""

from __future__ import annotations

import numpy as np

from .bit_packing import (
    bit_pairs,
    bits,
    byte_pairs,
    nibbles,
    pack_bit_pairs,
    pack_bits,
    pack_byte_pairs,
    pack_nibbles,
)
from .block_format import declare
from .scale_fitting import F32, BlockScales, fit_largest, fit_span
from .scale_search import ScaleSearch

Array = np.ndarray


# Scales: a byte for each of 16 sub-blocks, the scale in the low half and the minimum in the high.


def _q2_k(b: Array) -> Array:
    scale = b["d"].astype(F32) * (b["scales"] & 15).astype(F32)
    least = b["dmin"].astype(F32) * (b["scales"] >> 4).astype(F32)
    q = bit_pairs(b["q"]).reshape(-1, 16, 16).astype(F32)
    return (scale[..., None] * q - least[..., None]).reshape(-1, 256)


def _to_q2_k(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    sub = x.reshape(-1, 16, 16)
    found = given or fit_span(sub, 3, 15)
    q = found.levels(sub, 0, 3).astype(np.uint8)
    scales = found.scale | found.low << 4
    return {"scales": scales, "q": pack_bit_pairs(q), "d": found.d, "dmin": found.dmin}


Q2_K = declare(
    "q2_k", 256, (("scales", "u1", 16), ("q", "u1", 64), ("d", "f2", 1), ("dmin", "f2", 1)),
    scales=("d", "dmin"), planes=(("q",), ("scales",), ("d", "dmin")),
    decode=_q2_k, encode=_to_q2_k,
    search=ScaleSearch(16, 0, 3, 15, minimum=True, weighting="absolute", variance=1.0),
    gguf_type=10, file_types={10: "Q2_K"}, fallback="iq4_nl",
)  # fmt: skip


# Scales: sixteen six-bit numbers in 12 bytes: eight bytes of nibbles, four of their top bit pairs.


def _q3_k(b: Array) -> Array:
    top = byte_pairs(b["scales"][:, 8:]).reshape(-1, 16)
    scale = (nibbles(b["scales"][:, :8]) | top << 4).astype(np.int8) - 32
    third = bits(b["high"]).reshape(-1, 2, 4, 32)
    q = (bit_pairs(b["q"]) | third << 2).astype(np.int8).reshape(-1, 16, 16) - 4
    d = b["d"].astype(F32) * scale.astype(F32)
    return (d[..., None] * q.astype(F32)).reshape(-1, 256)


def _to_q3_k(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    sub = x.reshape(-1, 16, 16)
    found = given or fit_largest(sub, -4, 32)
    q = (found.levels(sub, -4, 3) + 4).astype(np.uint8)
    six = (found.scale + 32).astype(np.uint8)
    scales = [pack_nibbles(six & 15), pack_byte_pairs((six >> 4).reshape(-1, 4, 4))]
    return {
        "high": pack_bits((q >> 2).reshape(-1, 8, 32)),
        "q": pack_bit_pairs(q & 3),
        "scales": np.concatenate(scales, axis=-1),
        "d": found.d,
    }


Q3_K = declare(
    "q3_k", 256, (("high", "u1", 32), ("q", "u1", 64), ("scales", "u1", 12), ("d", "f2", 1)),
    scales=("d",), planes=(("q",), ("high",), ("scales",), ("d",)), decode=_q3_k, encode=_to_q3_k,
    search=ScaleSearch(16, -4, 3, 32, signed=True, weighting="absolute"),
    gguf_type=11, file_types={11: "Q3_K - Small", 12: "Q3_K - Medium", 13: "Q3_K - Large"},
    fallback="iq4_nl",
)  # fmt: skip


def _k_scales(b: Array) -> tuple[Array, Array]:
    """The float32 scales and minima [n, 8, 1] of q4_k and q5_k: six bits each, in 12 bytes.

    The low six bits of bytes 0..3 and 4..7 are the first four scales and minima. The last four have
    their low halves in bytes 8..11, and their top two bits above the first four.
    """
    low, high, mixed = np.split(b["scales"], 3, axis=-1)
    scale = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=-1)
    least = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=-1)
    d, dmin = b["d"].astype(F32), b["dmin"].astype(F32)
    return (d * scale.astype(F32))[..., None], (dmin * least.astype(F32))[..., None]


def _to_k_scales(x: Array, most: int, given: BlockScales | None) -> tuple[Array, dict[str, Array]]:
    """q in 0..most, [n, 8, 32], and the fields that `_k_scales` reads."""
    sub = x.reshape(-1, 8, 32)
    found = given or fit_span(sub, most, 63)
    q, scale, low = found.levels(sub, 0, most).astype(np.uint8), found.scale, found.low
    packed = [
        scale[:, :4] | scale[:, 4:] >> 4 << 6,
        low[:, :4] | low[:, 4:] >> 4 << 6,
        (scale[:, 4:] & 15) | low[:, 4:] << 4,
    ]
    return q, {"d": found.d, "dmin": found.dmin, "scales": np.concatenate(packed, axis=-1)}


def _runs(raw: Array) -> Array:
    """128 bytes of nibbles as uint8 [n, 8, 32]: of each 32 bytes the low halves, then the high."""
    return nibbles(raw.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _pack_runs(q: Array) -> Array:
    return pack_nibbles(q.reshape(-1, 4, 64)).reshape(-1, 128)


def _q4_k(b: Array) -> Array:
    scale, least = _k_scales(b)
    return (scale * _runs(b["q"]).astype(F32) - least).reshape(-1, 256)


def _to_q4_k(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    q, scales = _to_k_scales(x, 15, given)
    return {**scales, "q": _pack_runs(q)}


Q4_K = declare(
    "q4_k", 256, (("d", "f2", 1), ("dmin", "f2", 1), ("scales", "u1", 12), ("q", "u1", 128)),
    scales=("d", "dmin"), planes=(("q",), ("d", "dmin", "scales")), decode=_q4_k, encode=_to_q4_k,
    search=ScaleSearch(32, 0, 15, 63, minimum=True, weighting="mean"),
    gguf_type=12, file_types={14: "Q4_K - Small", 15: "Q4_K - Medium"}, fallback="q5_0",
    common=True,
)  # fmt: skip


def _q5_k(b: Array) -> Array:
    scale, least = _k_scales(b)
    q = _runs(b["q"]) | bits(b["high"]) << 4  # bit j of each byte belongs to sub-block j
    return (scale * q.astype(F32) - least).reshape(-1, 256)


def _to_q5_k(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    q, scales = _to_k_scales(x, 31, given)
    return {**scales, "high": pack_bits(q >> 4), "q": _pack_runs(q & 15)}


Q5_K = declare(
    "q5_k", 256,
    (("d", "f2", 1), ("dmin", "f2", 1), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)),
    scales=("d", "dmin"), planes=(("q",), ("high",), ("d", "dmin", "scales")),
    decode=_q5_k, encode=_to_q5_k,
    search=ScaleSearch(32, 0, 31, 63, minimum=True, weighting="mean"),
    gguf_type=13, file_types={16: "Q5_K - Small", 17: "Q5_K - Medium"}, fallback="q5_1",
)  # fmt: skip


# Each half of the block (128 elements) is four runs of 32: the low halves of its 64 bytes of
# nibbles, then the high halves. Run r takes bits 2r and 2r + 1 of the half's 32 bytes of "high".


def _q6_k(b: Array) -> Array:
    low = nibbles(b["q"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    q = (low | bit_pairs(b["high"]) << 4).astype(np.int8).reshape(-1, 16, 16) - 32
    scale = b["d"].astype(F32) * b["scales"].astype(F32)
    return (scale[..., None] * q.astype(F32)).reshape(-1, 256)


def _to_q6_k(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    sub = x.reshape(-1, 16, 16)
    found = given or fit_largest(sub, -32, 128)
    q = (found.levels(sub, -32, 31) + 32).astype(np.uint8)
    low = pack_nibbles((q & 15).reshape(-1, 2, 128)).reshape(-1, 128)
    return {"q": low, "high": pack_bit_pairs(q >> 4), "scales": found.scale, "d": found.d}


Q6_K = declare(
    "q6_k", 256, (("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "f2", 1)),
    scales=("d",), planes=(("q",), ("high",), ("scales",), ("d",)), decode=_q6_k, encode=_to_q6_k,
    search=ScaleSearch(16, -32, 31, 128, signed=True, variance=0.0),
    gguf_type=14, file_types={18: "Q6_K"}, fallback="q8_0", common=True,
)  # fmt: skip
