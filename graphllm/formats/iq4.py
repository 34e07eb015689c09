"""Formats whose four bits index a table of values: GGUF's iq4_nl and iq4_xs, and nf4.

Layouts and the order of the float32 operations of the first two follow ggml, `ggml-common.h` and
`ggml-quants.c`. The encoders fit the scales to the extreme values, unless scales are given.
"""

from __future__ import annotations

import numpy as np

from .bit_packing import nibbles, pack_nibbles
from .block_format import declare
from .scale_fitting import F32, BlockScales, fit_largest, inverse, largest, nearest
from .scale_search import ScaleSearch

Array = np.ndarray

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(b: Array) -> Array:
    return b["d"].astype(F32) * np.array(IQ4_VALUES, F32)[nibbles(b["q"])]


_SHIFTS = (254.0, *map(float, range(-7, 8)))  # the first one makes the extreme value 127


def _to_iq4_nl(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    d = given.d.astype(F32) if given else largest(x) / F32(-127)
    return {"d": d, "q": pack_nibbles(nearest(x * inverse(d), IQ4_VALUES))}


IQ4_NL = declare(
    "iq4_nl", 32, (("d", "f2", 1), ("q", "u1", 16)),
    scales=("d",), planes=(("q",), ("d",)), decode=_iq4_nl, encode=_to_iq4_nl,
    search=ScaleSearch(32, 0, 15, values=IQ4_VALUES, shifts=_SHIFTS),
    gguf_type=20, file_types={25: "IQ4_NL"},
)  # fmt: skip


# Scales: eight six-bit numbers, the top bit pairs of all in "high" and the nibbles in "scales", two
# neighbours in a byte.


def _iq4_xs(b: Array) -> Array:
    pair = np.arange(0, 16, 2, dtype=np.uint16)
    top = (b["high"] >> pair & 3).astype(np.uint8)
    low = np.stack([b["scales"] & 15, b["scales"] >> 4], axis=-1).reshape(-1, 8)
    d = b["d"].astype(F32) * ((low | top << 4).astype(np.int8) - 32).astype(F32)
    q = nibbles(b["q"].reshape(-1, 8, 16))
    return (d[..., None] * np.array(IQ4_VALUES, F32)[q]).reshape(-1, 256)


def _to_iq4_xs(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    sub = x.reshape(-1, 8, 32)
    found = given or fit_largest(sub, -127, 32)
    six = (found.scale + 32).astype(np.uint8)
    top = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << np.arange(0, 16, 2), axis=-1)
    return {
        "d": found.d,
        "high": top[:, None],
        "scales": six[:, ::2] & 15 | six[:, 1::2] << 4,
        "q": pack_nibbles(nearest(sub * inverse(found.step), IQ4_VALUES)).reshape(-1, 128),
    }


IQ4_XS = declare(
    "iq4_xs", 256, (("d", "f2", 1), ("high", "u2", 1), ("scales", "u1", 4), ("q", "u1", 128)),
    scales=("d",), planes=(("q",), ("d", "high", "scales")), decode=_iq4_xs, encode=_to_iq4_xs,
    search=ScaleSearch(32, 0, 15, 32, signed=True, values=IQ4_VALUES, shifts=_SHIFTS),
    gguf_type=23, file_types={30: "IQ4_XS"}, fallback="iq4_nl",
)  # fmt: skip


# NormalFloat (Dettmers et al. 2023, QLoRA, appendix E): quantiles of the normal distribution,
# scaled to -1..1, rounded to float16, so that the product with a float16 scale is exact in float32.
# They are no integers, so there are no integer kernels.

NF4_VALUES = np.array([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
], np.float16)  # fmt: skip
_MIDPOINTS = (NF4_VALUES[1:].astype(F32) + NF4_VALUES[:-1].astype(F32)) / F32(2)


def _nf4(b: Array) -> Array:
    return b["d"].astype(F32) * NF4_VALUES.astype(F32)[nibbles(b["q"])]


def _to_nf4(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    """The largest magnitude of a block becomes 1 or -1."""
    d = np.abs(x).max(axis=-1, keepdims=True)
    q = np.searchsorted(_MIDPOINTS, x * inverse(d)).astype(np.uint8)
    return {"d": d, "q": pack_nibbles(q)}


NF4 = declare(
    "nf4", 32, (("d", "f2", 1), ("q", "u1", 16)),
    scales=("d",), planes=(("q",), ("d",)), decode=_nf4, encode=_to_nf4, integers=False,
)  # fmt: skip
