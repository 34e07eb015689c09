"""Quantisation of weights."""

from __future__ import annotations

import numpy as np

from ..formats import BLOCK_FORMATS, ROW_FORMATS, quantization
from ..formats.quantization import Blocks
from ..graph.dtype import BF16, F16, F32, DType
from ..graph.dtype import dtype as dtype_of
from ..graph.op import Arg, Cost, Rng, Sample, Samples, Shape, expect, grid, op, out, require
from ..graph.tensor import Meta

_TILE_ELEMENTS = 1 << 18  # quantised at a time; NumPy needs about 30 bytes for each


def _infer(x: Meta, *, dtype: str) -> Meta:
    expect("x", x, 2, "f32", "f16", "bf16")
    kind = dtype_of(dtype)
    known = (*BLOCK_FORMATS, *ROW_FORMATS)
    require(kind.name in known, f"dtype is {kind}, not {', '.join(known)}")
    kind.row_nbytes(x.inner[0])
    return out(x.shape, kind)


def _delicate(rng: Rng, shape: Shape) -> np.ndarray:
    """Return rows of very different magnitude, ties, zeros, subnormals, large values, one sign."""
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (*shape[:-1], 1))
    if shape[0] > 6:
        x[1] = rng.integers(-256, 257, shape[1:]) * 0.5
        x[2] = np.where(rng.random(shape[1:]) < 0.5, 0.0, -0.0)
        x[2, :16] = -0.0
        x[3] *= 10.0 ** rng.integers(-44, -34, shape[1:])
        x[4] = rng.choice([-60_000, 60_000], shape[1:])
        x[5] = np.abs(x[5])
        x[5, ::16] = 0
        x[6] = -np.abs(x[6])
    return x


def _sample(
    rows: int, elements: int, source: DType, target: str, layout: str = "contiguous",
) -> Sample:  # fmt: skip
    arg = Arg(("T", elements), source, layout, make=_delicate)
    return Sample((arg,), {"dtype": target}, {"T": rows})


_BY_32 = tuple(name for name, form in BLOCK_FORMATS.items() if form.dtype.block == 32)
_BY_256 = tuple(name for name, form in BLOCK_FORMATS.items() if form.dtype.block == 256)


@op(
    "quantise",
    infer=_infer,
    cost=lambda out, x, *, env, dtype: Cost(5 * x.size, x.nbytes + out.nbytes),
    tol={},
    samples=Samples(lambda: [
        *grid(_sample, rows=(0, 1, 9), elements=(32, 640), source=(F32,), target=_BY_32),
        *grid(_sample, rows=(0, 1, 9), elements=(256, 768), source=(F32,), target=_BY_256),
        *grid(_sample, rows=(0, 1, 9), elements=(128, 640), source=(F32,), target=ROW_FORMATS),
        *grid(_sample, rows=(9,), elements=(512,), source=(F16, BF16), target=ROW_FORMATS,
              layout=("contiguous", "strided")),
        *grid(_sample, rows=(9,), elements=(768,), source=(F16, BF16), target=("q8_0", "q4_k")),
        *grid(_sample, rows=(9,), elements=(512,), source=(F32, BF16), target=("q8_0", "q4_k"),
              layout=("strided",)),
    ]),
)  # fmt: skip
def quantise(x: np.ndarray, *, dtype: str) -> Blocks:
    """Quantise weights to a block or row format. x [T, K] f32, f16 or bf16 -> [T, K].

    Bit-exact on every backend; each format's encoder is in the module of its family in
    `graphllm.formats`. Raises GraphllmError for infinity and NaN.
    """
    kind = dtype_of(dtype)
    made = np.empty((x.shape[0], kind.row_nbytes(x.shape[1])), np.uint8)
    step = max(1, _TILE_ELEMENTS // max(1, x.shape[1]))
    for first in range(0, len(made), step):
        tile = slice(first, first + step)
        made[tile] = quantization.quantise(x[tile].astype(np.float32), kind)
    return Blocks(made, kind, x.shape[1])
