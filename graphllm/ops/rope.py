"""Rotary position embedding."""

from __future__ import annotations

import numpy as np

from ..dtype import I32
from . import Arg, Cost, Sample, expect, grid, op, require, same


def _infer(x, pos, factors=None, *, base, dims, style, scale):
    expect("x", x, 3, "f32")
    expect("pos", pos, 1, "i32")
    width = dims or x.shape[-1]
    require(pos.shape[0] == x.shape[0], f"pos {pos.shape} does not fit {x.shape[0]} rows")
    require(width % 2 == 0, f"an odd count of dims, {width}, has no pairs")
    require(0 < width <= x.shape[-1], f"dims {width} is not within heads of {x.shape[-1]}")
    require(style in ("half", "interleaved"), f"style is {style!r}, not 'half' or 'interleaved'")
    require(base > 0, f"base is {base}, not above zero")
    if factors is not None:
        expect("factors", factors, 1, "f32")
        require(factors.shape[0] == width // 2, f"{factors.shape[0]} factors, not {width // 2}")
    return same(x)


def _cost(out, x, pos, factors=None, *, env, dims, **_):
    rotated = x.size // x.shape[-1] * (dims or x.shape[-1])
    extra = factors.nbytes if factors is not None else 0
    return Cost(3 * rotated, x.nbytes + pos.nbytes + extra + out.nbytes)


def _positions(rng, shape):
    pos = rng.integers(0, 5000, shape)
    pos[:1] = 0
    return pos


def _stretch(rng, shape):
    return rng.uniform(1, 40, shape)


def _sample(
    rows, heads, width, dims=0, style="half", layout="contiguous", factors=False, base=1e4, scale=1
):
    pairs = (dims or width) // 2
    args = (
        Arg(("T", heads, width), layout=layout),
        Arg(("T",), I32, make=_positions),
        Arg((pairs,), leaf="weight", make=_stretch) if factors else None,
    )
    return Sample(args, {"base": base, "dims": dims, "style": style, "scale": scale}, {"T": rows})


_STYLES = ("half", "interleaved")


def inverse_frequencies(dims, base, scale=1.0):
    """Radians a position, float32 [dims / 2]: scale * base^(-2i / dims), each factor rounded.

    The power is taken in float64 and rounded once, so that every backend holds the same bits.
    """
    power = np.float64(base) ** (-np.arange(0, dims, 2) / dims)
    return power.astype(np.float32) * np.float32(scale)


@op(
    "rope",
    infer=_infer,
    cost=_cost,
    tol={"f32": 2e-6},
    samples=[
        *grid(
            _sample,
            rows=(0, 1, 7),
            heads=(1, 3),
            width=(2, 64, 80),
            style=_STYLES,
            layout=("contiguous", "strided"),
        ),
        *grid(_sample, rows=(1, 7), heads=(3,), width=(64,), dims=(2, 32, 50), style=_STYLES),
        *grid(_sample, rows=(7,), heads=(2,), width=(64,), style=_STYLES, factors=(True,)),
        *grid(
            _sample,
            rows=(7,),
            heads=(2,),
            width=(96,),
            dims=(64,),
            style=_STYLES,
            factors=(False, True),
            layout=("contiguous", "strided"),
            base=(1e6,),
            scale=(0.125,),
        ),
        *grid(_sample, rows=(5,), heads=(4,), width=(32,), layout=("permuted",), style=_STYLES),
    ],
)
def rope(x, pos, factors=None, *, base, dims=0, style="half", scale=1.0):
    """Rotate pairs of each head by an angle that grows with the position.

    x [T, H, D], pos [T] i32, factors [dims / 2] f32 -> [T, H, D].
    Su et al. 2021 (RoFormer), eq. 15.

    angle(i) = pos * scale * base^(-2i / dims) / factors[i] in radians, computed in float32 in the
    order (((base^..) * scale) / factors) * pos. Pairs: style "half" (i, i + dims/2), as GPT-NeoX;
    "interleaved" (2i, 2i + 1), as the paper. The first ``dims`` of D rotate (0: all); the rest is
    copied.
    """
    width = dims or x.shape[-1]
    inverse = inverse_frequencies(width, base, scale)
    if factors is not None:
        inverse = inverse / factors
    angle = (pos.astype(np.float32)[:, None] * inverse).astype(np.float64)
    cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))  # [T, 1, dims/2]
    half = width // 2
    first = np.s_[..., :half] if style == "half" else np.s_[..., 0:width:2]
    second = np.s_[..., half:width] if style == "half" else np.s_[..., 1:width:2]
    result = np.array(x, np.float32, order="C")
    result[first] = x[first] * cos - x[second] * sin
    result[second] = x[first] * sin + x[second] * cos
    return result
