"""Random and extreme blocks of every format."""

from __future__ import annotations

import numpy as np
from linear_cases import SCALES
from oracles import dequantised_blocks

from graphllm.graph.dtype import DType

ROWS, MOST = 21, 5  # of the weight, not a multiple of 16; tokens
# Stored scales as float16 bits and as exponents of one byte, and a factor for the activations. The
# largest exponents are those whose values float32 can hold; the factor keeps results in the range
# of float32, and normal if possible.
EXTREMES = {
    "zero": ((0x0000, 0x8000), (0, 0), 1.0),
    "largest": ((0x7BFF, 0xFBFF), (251, 252), 2.0**-20),
    "denormal": ((0x0001, 0x83FF), (0, 1), 2.0**60),
    "all": ((0x0000, 0x7BFF, 0x0001, 0x8400, 0x3C00), (0, 1, 64, 127, 200), 2.0**-10),
}
KINDS = ("random", *EXTREMES)


def stored_scales(kind: str, size: int, shape: tuple[int, ...], rng: np.random.Generator):
    """Random scales of ``size`` bytes, uint8 [..., size]."""
    if kind == "random":
        halves = (rng.standard_normal(shape) / 64).astype(np.float16).view(np.uint16)
        found = halves if size == 2 else rng.integers(100, 140, shape)
    else:
        found = rng.choice(EXTREMES[kind][size == 1], shape)
    return found.astype("<u2" if size == 2 else np.uint8)[..., None].view(np.uint8)


def make_blocks(form: DType, kind: str, blocks: int) -> np.ndarray:
    """uint8 [ROWS, row_bytes]: rows of zero bits, of ones, and random; scales by ``kind``."""
    rng = np.random.default_rng([blocks, KINDS.index(kind)])
    raw = rng.integers(0, 256, (ROWS, blocks, form.nbytes), dtype=np.uint8)
    raw[0], raw[1] = 0, 255
    first, end = SCALES[form.name]
    size = min(2, end - first)
    for at in range(first, end, size):
        raw[..., at : at + size] = stored_scales(kind, size, raw.shape[:2], rng)
    return raw.reshape(ROWS, -1)


def dequantised(form: DType, raw: np.ndarray) -> np.ndarray:
    values = dequantised_blocks(raw, form)
    assert np.isfinite(values).all()
    return values
