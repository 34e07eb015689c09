"""Matrix products with weights, and quantisation of their activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..formats import (
    A8_32,
    A8_256,
    ACTIVATIONS,
    BLOCK_FORMATS,
    ROW_FORMATS,
    activation_of,
    blocks_of,
)
from ..formats import activations as activation_formats
from ..formats.activations import A8_ROW, ROTATED, rotate_blocks
from ..formats.legacy import Q8_0
from ..formats.quantization import Blocks
from ..formats.row_format import FP8, W8A8
from ..graph.dtype import BF16, F16, F32, DType
from ..graph.dtype import dtype as dtype_of
from ..graph.op import (
    MATMUL,
    Arg,
    Cost,
    Rng,
    Sample,
    Samples,
    Shape,
    expect,
    grid,
    op,
    out,
    require,
    same,
)
from ..graph.tensor import Env, Meta
from .embedding import expect_weight

_TILE_BYTES = 16 << 20  # maximum size of the weights that are dequantised at a time
# Dtypes of `quantise_act`.
ACTIVATION_DTYPES = (*(kind.name for kind in ACTIVATIONS), "f16", "bf16")


def _infer(x: Meta, w: Meta, bias: Meta | None = None) -> Meta:
    expect("x", x, 2, "f32", *ACTIVATION_DTYPES)
    expect_weight(w)
    require(x.shape[1] == w.shape[1], f"w {w.shape} does not fit rows of {x.shape[1]}")
    if bias is not None:
        expect("bias", bias, 1, "f32")
        require(bias.shape == w.shape[:1], f"bias {bias.shape} does not fit {w.shape[0]} columns")
    return out((x.shape[0], w.shape[0]))


def _cost(out: Meta, x: Meta, w: Meta, bias: Meta | None = None, *, env: Env) -> Cost:
    if not out.size:
        return Cost(0, 0)
    extra = bias.nbytes if bias is not None else 0
    return Cost(2 * out.size * w.inner[-1], x.nbytes + w.nbytes + extra + out.nbytes)


def unit_variance(rng: Rng, shape: Shape) -> np.ndarray:
    """Return weights for results of unit variance, as the tolerances assume."""
    return rng.standard_normal(shape) / np.sqrt(shape[-1])


def _sample(
    rows: int, shape: Shape, kind: DType, x: DType = F32, layout: str = "contiguous",
    bias: bool = False,
) -> Sample:  # fmt: skip
    args = (
        Arg(("T", shape[1]), x, layout),
        Arg(shape, kind, leaf="weight", make=unit_variance),
        Arg(shape[:1], leaf="weight") if bias else None,
    )
    return Sample(args, {}, {"T": rows})


# A backend may quantise float activations that meet a quantised format (`Options.linear`): then
# each element is off by up to amax / 254 of its block, in e4m3 by 1 / 16 of itself. With quantised
# x only the order of sums varies. For formats that only floats are multiplied with, x and products
# of scales may be rounded to float16.
_QUANTISING = {
    "f16": 4e-3,
    "a8_32": 4e-2,
    "a8_256": 5e-2,
    "a8_row": 6e-2,
    "f8_row": 0.15,
    "f8_128": 0.15,
}


def _activation_name(weights: str) -> str:
    found = activation_of(dtype_of(weights))
    return found.name if found else "f16"


TOL = {
    **dict.fromkeys(("f32", "bf16", *_QUANTISING), 1e-5),
    **{n: _QUANTISING[_activation_name(n)] for n in (*BLOCK_FORMATS, *ROW_FORMATS)},
}
COMMON_32, COMMON_256 = blocks_of(32, common=True), blocks_of(256, common=True)
RARE_32, RARE_256 = blocks_of(32, common=False), blocks_of(256, common=False)

BY_ROW = tuple(form.dtype for form in ROW_FORMATS.values())


def pairs(*weights: DType) -> tuple[tuple[DType, DType], ...]:
    """(activations, weights) that `linear` is given: floats, and quantised as the weights want."""
    return tuple((x, w) for w in weights for x in (F32, activation_of(w)) if x is not None)


_ROWS = (0, 1, 2, 5, 33)
_PLAIN = ((1, 1), (3, 63), (65, 100), (48, 256))
_BY_32 = ((1, 32), (13, 96), (64, 320))
_BY_256 = ((1, 256), (13, 768), (80, 512))
_STRIDED = {"rows": (1, 5), "layout": ("strided",), "bias": (True,)}


@op(
    "linear",
    infer=_infer,
    cost=_cost,
    arithmetic=MATMUL,
    tol=TOL,
    samples=Samples(lambda: [
        *grid(_sample, rows=_ROWS, shape=_PLAIN, kind=(F32, F16, BF16), bias=(False, True)),
        *grid(_sample, rows=_ROWS, shape=_BY_32, kind=COMMON_32, x=(F32, A8_32)),
        *grid(_sample, rows=_ROWS, shape=_BY_256, kind=COMMON_256, x=(F32, A8_256)),
        *(sample for x, kind in pairs(*RARE_32) for sample in grid(
            _sample, rows=(1, 33), shape=((13, 96), (64, 320)), kind=(kind,), x=(x,))),
        *grid(_sample, rows=(1, 33), shape=((13, 768),), kind=RARE_256,
              x=(F32, A8_256)),
        *grid(_sample, rows=(1, 7), shape=((300, 1024),),
              kind=(F32, F16, *COMMON_32, *COMMON_256)),
        *grid(_sample, shape=((65, 100),), kind=(F32, F16), **_STRIDED),
        *grid(_sample, shape=((64, 256),), kind=(*COMMON_32, *COMMON_256), **_STRIDED),
        *grid(_sample, rows=(5,), shape=((64, 320),), kind=(Q8_0,), x=(A8_32,), bias=(True,)),
        *(sample for x, kind in pairs(*BY_ROW) for sample in grid(
            _sample, rows=_ROWS, shape=((1, 128), (45, 384)), kind=(kind,), x=(x,),
            bias=(False, True))),
        *grid(_sample, rows=(1, 33), shape=((33, 32), (100, 352)), kind=(W8A8, FP8)),
        *grid(_sample, rows=(1, 7, 40), shape=((300, 1024),), kind=(W8A8,), x=(A8_ROW,)),
        *grid(_sample, shape=((64, 256),), kind=BY_ROW, **_STRIDED),
    ]),
)  # fmt: skip
def linear(x: Any, w: Any, bias: np.ndarray | None = None) -> np.ndarray:
    """x w^T + bias. x [T, K] f32 or a result of `quantise_act`; w [N, K] any weight format;
    bias [N] f32 -> f32 [T, N].

    Both operands are dequantised (weights in tiles), and products are summed in float32. Backends
    may sum quantised numbers first, and then multiply by the scales.
    """
    result = matmul(to_float32(x), w)
    return result if bias is None else result + bias


def to_float32(x: Any) -> np.ndarray:
    """Return activations [T, ..., K], f32 or a result of `quantise_act`, as float32."""
    if isinstance(x, Blocks):
        return activation_formats.dequantise_act(x.raw, x.dtype, x.elements)
    return np.ascontiguousarray(x, np.float32)


def matmul(x: np.ndarray, w: Any) -> np.ndarray:
    """x w^T in float32. x [T, K] f32; w [N, K] any weight format, dequantised in tiles."""
    result = np.empty((x.shape[0], w.shape[0]), np.float32)
    for start, tile in _tiles(w):
        np.matmul(x, tile.T, out=result[:, start : start + len(tile)])
    return result


def _tiles(w: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, float32 rows) of ``w`` in tiles of about `_TILE_BYTES` bytes."""
    if isinstance(w, Blocks):
        yield from w.tiles(_TILE_BYTES)
        return
    step = max(1, _TILE_BYTES // (4 * max(1, w.shape[1])))
    for start in range(0, w.shape[0], step):
        yield start, w[start : start + step].astype(np.float32, copy=False)


def _heads_infer(x: Meta, w: Meta) -> Meta:
    expect("x", x, 3, "f32", *ACTIVATION_DTYPES)
    expect_weight(w, 3)
    fits = (x.shape[1], x.shape[2]) == (w.shape[0], w.shape[2])
    require(fits, f"w {w.shape} does not fit heads {x.shape}")
    return out((x.shape[0], w.shape[0], w.shape[1]))


def _heads_sample(
    rows: int, shape: Shape, kind: DType, x: DType = F32, layout: str = "contiguous",
) -> Sample:  # fmt: skip
    heads, _, k = shape
    args = (Arg(("T", heads, k), x, layout), Arg(shape, kind, leaf="weight", make=unit_variance))
    return Sample(args, {}, {"T": rows})


@op(
    "head_linear",
    infer=_heads_infer,
    cost=_cost,
    arithmetic=MATMUL,
    tol=TOL,
    samples=Samples(lambda: [
        *grid(_heads_sample, rows=(0, 1, 5, 33), shape=((1, 1, 1), (3, 33, 63), (4, 48, 100)),
              kind=(F32, F16, BF16)),
        *grid(_heads_sample, rows=(0, 1, 5), shape=((3, 33, 64), (2, 16, 320)), kind=COMMON_32,
              x=(F32, A8_32)),
        *grid(_heads_sample, rows=(1, 33), shape=((2, 20, 512),), kind=COMMON_256,
              x=(F32, A8_256)),
        *grid(_heads_sample, rows=(1, 5), shape=((3, 33, 64),), kind=(F32, F16, Q8_0),
              layout=("strided", "permuted")),
        *grid(_heads_sample, rows=(1, 5), shape=((3, 33, 128),), kind=BY_ROW),
    ]),
)  # fmt: skip
def head_linear(x: Any, w: Any) -> np.ndarray:
    """Multiply each head by its own matrix. x [T, H, K] f32 or a result of `quantise_act`;
    w [H, N, K] any weight format -> f32 [T, H, N].

    DeepSeek-AI 2024 (DeepSeek V2), section 2.1.2: MLA with absorbed up projections. With w in a
    row format, x stays f32: such checkpoints state how inputs of whole linears are quantised, and
    the inputs of absorbed projections are others. DeepSeek's own code keeps them as floats, too.
    """
    x = to_float32(x)
    result = np.empty((*x.shape[:2], w.shape[1]), np.float32)
    for head in range(w.shape[0]):
        result[:, head] = matmul(x[:, head], w[head])
    return result


def _quantise_infer(x: Meta, *, dtype: str) -> Meta:
    expect("x", x, None, "f32")
    require(x.ndim > 1, f"x has {x.ndim} axes, not 2 or more")
    kind = dtype_of(dtype)
    require(
        kind.name in ACTIVATION_DTYPES, f"dtype is {kind}, not {' or '.join(ACTIVATION_DTYPES)}"
    )
    kind.row_nbytes(x.inner[-1])
    return out(x.shape, kind)


def _delicate(rng: Rng, shape: Shape) -> np.ndarray:
    """Return rows of very different magnitude, with ties, zeros, subnormals, NaN and infinity."""
    x = rng.standard_normal(shape).astype(np.float32)
    x *= (10.0 ** rng.integers(-6, 6, (*shape[:-1], 1))).astype(np.float32)
    if shape[0] > 4:
        x[1] = 0
        x[2] = rng.integers(-254, 255, shape[1:]) * 0.5
        x[2, ..., 0] = 127
        x[3] *= np.float32(1e-38)
        x[4, ..., 3] = np.nan
        x[4, ..., -1] = np.inf
    return x


def _quantise_sample(
    rows: int, elements: int, layout: str, kind: str, between: Shape = (),
) -> Sample:  # fmt: skip
    arg = Arg(("T", *between, elements), layout=layout, make=_delicate)
    return Sample((arg,), {"dtype": kind}, {"T": rows})


_LAYOUTS = ("contiguous", "strided")


@op(
    "quantise_act",
    infer=_quantise_infer,
    cost=lambda out, x, *, env, dtype: Cost(5 * x.size, x.nbytes + out.nbytes),
    tol={},
    samples=Samples(lambda: [
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(32, 96, 640), layout=_LAYOUTS,
              kind=("a8_32",)),
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(256, 768), layout=_LAYOUTS,
              kind=("a8_256",)),
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(512,), layout=_LAYOUTS,
              kind=("a8_32", "a8_256"), between=((3,), (2, 3))),
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(32, 96, 640), layout=_LAYOUTS,
              kind=("a8_row", "f8_row")),
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(128, 640), layout=_LAYOUTS,
              kind=("f8_128",)),
        *grid(_quantise_sample, rows=(0, 1, 7), elements=(512,), layout=_LAYOUTS,
              kind=("a8_row", "f8_row", "f8_128"), between=((3,), (2, 3))),
    ]),
)  # fmt: skip
def quantise_act(x: np.ndarray, *, dtype: str) -> Any:
    """Quantise activations to int8 or FP8 along the last axis, or round them to f16 or bf16.

    x [T, ..., K] f32 -> [T, ..., K] in ``dtype``. Bit-exact on every backend; int8 and FP8 as by
    `graphllm.formats.activations.quantise_act`. f16 and bf16 round to nearest even; values
    beyond the range of f16 become its largest number.
    """
    kind = dtype_of(dtype)
    if kind.numpy is not None:
        most = np.float32(65504 if kind == F16 else np.inf)
        return np.clip(x, -most, most).astype(kind.numpy)
    return Blocks(activation_formats.quantise_act(x, kind), kind, x.shape[-1])


# --------------------------------------------------------------------------------------- rotation


def _hadamard_infer(x: Meta) -> Meta:
    expect("x", x, None, "f32")
    require(x.ndim > 1, f"x has {x.ndim} axes, not 2 or more")
    require(x.inner[-1] % ROTATED == 0, f"rows of {x.inner[-1]} are not whole blocks of {ROTATED}")
    return same(x)


def _hadamard_sample(rows: int, inner: Shape, layout: str) -> Sample:
    return Sample((Arg(("T", *inner), layout=layout),), {}, {"T": rows})


@op(
    "hadamard",
    infer=_hadamard_infer,
    cost=lambda out, x, *, env: Cost(5 * x.size, x.nbytes + out.nbytes),
    tol={},
    samples=grid(
        _hadamard_sample,
        rows=(0, 1, 7),
        inner=((16,), (96,), (640,), (3, 32)),
        layout=("contiguous", "strided"),
    ),
)
def hadamard(x: np.ndarray) -> np.ndarray:
    """Rotate blocks of 16 elements by the normalised Hadamard matrix. x [T, ..., K] f32, K a
    multiple of 16 -> [T, ..., K].

    A linear whose weight is rotated as well has the same results, but an outlier is spread over its
    block, so that both are quantised more exactly (Ashkboos et al. 2024, QuaRot).
    """
    return rotate_blocks(x)
