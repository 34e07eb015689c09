"""Microscaling formats (OCP, 2023): mxfp4, 32 elements of e2m1 with an e8m0 scale.

The layout is that of GGUF (ggml, `ggml-common.h`); the encoder is bit-equal to ggml's reference
quantiser.
"""

from __future__ import annotations

import numpy as np

from .bit_packing import nibbles, pack_nibbles
from .block_format import declare
from .scale_fitting import F32, BlockScales, nearest

Array = np.ndarray

# Twice the values of e2m1, so that they are integers.
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half_scale(e: Array) -> Array:
    """2 ** (e - 128) for each byte: half of the scale, because `MXFP4_VALUES` are doubled."""
    exponent = e.astype(np.uint32)
    subnormal = np.uint32(0x00200000) << np.minimum(exponent, 1)
    return np.where(exponent < 2, subnormal, (exponent - 1) << 23).astype(np.uint32).view(F32)


def _mxfp4(b: Array) -> Array:
    return _half_scale(b["e"]) * np.array(MXFP4_VALUES, F32)[nibbles(b["q"])]


def _to_mxfp4(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    """The largest magnitude of a block becomes 8 to 16 steps, and 12 is the largest value."""
    amax = np.abs(x).max(axis=-1, keepdims=True)
    exponent = np.clip(np.frexp(amax)[1] + 124, 0, 254)
    e = np.where(amax > 0, exponent, 0).astype(np.uint8)
    q = nearest(np.abs(x) / _half_scale(e), MXFP4_VALUES[:8])
    q |= ((x < 0) & (q > 0)).astype(np.uint8) << 3
    return {"e": e, "q": pack_nibbles(q)}


MXFP4 = declare(
    "mxfp4", 32, (("e", "u1", 1), ("q", "u1", 16)),
    scales=("e",), planes=(("q",), ("e",)), decode=_mxfp4, encode=_to_mxfp4,
    gguf_type=39, file_types={38: "MXFP4"},
)  # fmt: skip
