"""GGUF's formats with blocks of 32 elements and one scale: q4_0, q4_1, q5_0, q5_1 and q8_0.

x = d * (q - offset), or x = d * q + m. Layouts and the order of the float32 operations follow ggml,
`ggml-common.h` and `ggml-quants.c`; the encoders are bit-equal to ggml's reference quantisers.
"""

from __future__ import annotations

import numpy as np

from .bit_packing import fifth_bits, nibbles, pack_fifth_bits, pack_nibbles
from .block_format import declare
from .scale_fitting import F32, BlockScales, inverse, largest, round_away, span_steps
from .scale_search import ScaleSearch

Array = np.ndarray


def _q4_0(b: Array) -> Array:
    return b["d"].astype(F32) * (nibbles(b["q"]).astype(np.int8) - 8).astype(F32)


def _to_q4_0(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    d = given.d.astype(F32) if given else largest(x) / F32(-8)
    q = np.clip(x * inverse(d) + F32(8.5), 0, 15).astype(np.uint8)
    return {"d": d, "q": pack_nibbles(q)}


Q4_0 = declare(
    "q4_0", 32, (("d", "f2", 1), ("q", "u1", 16)),
    scales=("d",), planes=(("q",), ("d",)), decode=_q4_0, encode=_to_q4_0,
    weighted_search=ScaleSearch(32, -8, 7, variance=1.0),
    gguf_type=2, file_types={2: "Q4_0"},
)  # fmt: skip


def _q4_1(b: Array) -> Array:
    return b["d"].astype(F32) * nibbles(b["q"]).astype(F32) + b["m"].astype(F32)


def _to_q4_1(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    q, d, m = span_steps(x, 15, given)
    return {"d": d, "m": m, "q": pack_nibbles(q)}


Q4_1 = declare(
    "q4_1", 32, (("d", "f2", 1), ("m", "f2", 1), ("q", "u1", 16)),
    scales=("d", "m"), planes=(("q",), ("d", "m")), decode=_q4_1, encode=_to_q4_1,
    weighted_search=ScaleSearch(32, 0, 15, minimum=True, variance=1.0),
    gguf_type=3, file_types={3: "Q4_1"},
)  # fmt: skip


def _q5_0(b: Array) -> Array:
    q = nibbles(b["q"]) | fifth_bits(b["high"])
    return b["d"].astype(F32) * (q.astype(np.int8) - 16).astype(F32)


def _to_q5_0(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    d = given.d.astype(F32) if given else largest(x) / F32(-16)
    q = np.clip(x * inverse(d) + F32(16.5), 0, 31).astype(np.uint8)
    return {"d": d, "high": pack_fifth_bits(q), "q": pack_nibbles(q & 15)}


Q5_0 = declare(
    "q5_0", 32, (("d", "f2", 1), ("high", "u1", 4), ("q", "u1", 16)),
    scales=("d",), planes=(("q",), ("high",), ("d",)), decode=_q5_0, encode=_to_q5_0,
    weighted_search=ScaleSearch(32, -16, 15, variance=1.0),
    gguf_type=6, file_types={8: "Q5_0"}, common=True,
)  # fmt: skip


def _q5_1(b: Array) -> Array:
    q = nibbles(b["q"]) | fifth_bits(b["high"])
    return b["d"].astype(F32) * q.astype(F32) + b["m"].astype(F32)


def _to_q5_1(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    q, d, m = span_steps(x, 31, given)
    return {"d": d, "m": m, "high": pack_fifth_bits(q), "q": pack_nibbles(q & 15)}


Q5_1 = declare(
    "q5_1", 32, (("d", "f2", 1), ("m", "f2", 1), ("high", "u1", 4), ("q", "u1", 16)),
    scales=("d", "m"), planes=(("q",), ("high",), ("d", "m")), decode=_q5_1, encode=_to_q5_1,
    weighted_search=ScaleSearch(32, 0, 31, minimum=True, variance=1.0),
    gguf_type=7, file_types={9: "Q5_1"},
)  # fmt: skip


def _q8_0(b: Array) -> Array:
    return b["d"].astype(F32) * b["q"].astype(F32)


def _to_q8_0(x: Array, given: BlockScales | None = None) -> dict[str, Array]:
    d = np.abs(x).max(axis=-1, keepdims=True) / F32(127)
    return {"d": d, "q": round_away(x * inverse(d)).astype(np.int8)}


Q8_0 = declare(
    "q8_0", 32, (("d", "f2", 1), ("q", "i1", 32)),
    scales=("d",), planes=(("q",), ("d",)), decode=_q8_0, encode=_to_q8_0,
    gguf_type=8, file_types={7: "Q8_0"}, common=True,
)  # fmt: skip
