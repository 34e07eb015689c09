"""NormalFloat (Dettmers et al. 2023, QLoRA, appendix E): nf4, 32 elements of 4 bits with a scale.

The values are quantiles of the normal distribution, scaled to -1..1, rounded to float16: so the
product with a float16 scale is exact in float32. Since they are no integers, there are no integer
kernels.
"""

from __future__ import annotations

import numpy as np

from .bit_packing import nibbles, pack_nibbles
from .block_format import declare
from .scale_fitting import F32, BlockScales, inverse

Array = np.ndarray

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
