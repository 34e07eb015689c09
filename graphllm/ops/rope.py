"""Position ops: rotary embeddings, two-dimensional positions, sinusoidal embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Rng, Sample, Samples, Shape, expect, grid, op, out, require, same
from ..graph.tensor import Env, Meta

# ------------------------------------------------------------------------------------------- rope


def _infer(
    x: Meta, pos: Meta, factors: Meta | None = None, *, base: float, dims: int, style: str,
    scale: float, attention_factor: float,
) -> Meta:  # fmt: skip
    expect("x", x, 3, "f32")
    expect("pos", pos, 1, "i32")
    width = dims or x.inner[-1]
    require(pos.shape[0] == x.shape[0], f"pos {pos.shape} does not fit {x.shape[0]} rows")
    require(width % 2 == 0, f"dims {width} is odd and has no pairs")
    require(0 < width <= x.inner[-1], f"dims {width} is not within heads of {x.inner[-1]}")
    require(style in ("half", "interleaved"), f"style is {style!r}, not 'half' or 'interleaved'")
    require(base > 0, f"base is {base}, not above zero")
    require(attention_factor > 0, f"attention_factor is {attention_factor}, not above zero")
    if factors is not None:
        expect("factors", factors, 1, "f32")
        require(factors.shape[0] == width // 2, f"{factors.shape[0]} factors, not {width // 2}")
    return same(x)


def _cost(
    out: Meta, x: Meta, pos: Meta, factors: Meta | None = None, *, env: Env, dims: int, **_: Any,
) -> Cost:  # fmt: skip
    rotated = x.size // x.inner[-1] * (dims or x.inner[-1])
    extra = factors.nbytes if factors is not None else 0
    return Cost(3 * rotated, x.nbytes + pos.nbytes + extra + out.nbytes)


def _positions(rng: Rng, shape: Shape) -> np.ndarray:
    pos = rng.integers(0, 5000, shape)
    pos[:1] = 0
    return pos


def _factors(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.uniform(1, 40, shape)


def _sample(
    rows: int, heads: int, width: int, dims: int = 0, style: str = "half",
    layout: str = "contiguous", factors: bool = False, base: float = 10000.0, scale: float = 1,
    attention_factor: float = 1.0,
) -> Sample:  # fmt: skip
    pairs = (dims or width) // 2
    args = (
        Arg(("T", heads, width), layout=layout),
        Arg(("T",), I32, make=_positions),
        Arg((pairs,), leaf="weight", make=_factors) if factors else None,
    )
    attrs = {
        "base": base,
        "dims": dims,
        "style": style,
        "scale": scale,
        "attention_factor": attention_factor,
    }
    return Sample(args, attrs, {"T": rows})


_STYLES = ("half", "interleaved")


def inverse_frequencies(dims: int, base: float, scale: float = 1.0) -> np.ndarray:
    """Return radians per position, float32 [dims / 2]: scale * base^(-2i / dims).

    The power is computed in float64 and rounded once, so that all backends use the same bits.
    """
    power = np.float64(base) ** (-np.arange(0, dims, 2) / dims)
    return power.astype(np.float32) * np.float32(scale)


@op(
    "rope",
    infer=_infer,
    cost=_cost,
    tol={"f32": 2e-6},
    samples=Samples(
        lambda: [
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
            *grid(
                _sample,
                rows=(1, 5),
                heads=(3,),
                width=(64,),
                dims=(0, 50),
                style=_STYLES,
                attention_factor=(1.2079441541679836,),
            ),
        ]
    ),
)
def rope(
    x: np.ndarray, pos: np.ndarray, factors: np.ndarray | None = None, *, base: float,
    dims: int = 0, style: str = "half", scale: float = 1.0, attention_factor: float = 1.0,
) -> np.ndarray:  # fmt: skip
    """Rotary position embedding: rotate pairs of each head by an angle proportional to position.

    x [T, H, D], pos [T] i32, factors [dims / 2] f32 -> [T, H, D].
    Su et al. 2021 (RoFormer), eq. 15.

    angle(i) = pos * scale * base^(-2i / dims) / factors[i] in radians, computed in float32 in the
    order (((base^..) * scale) / factors) * pos. Its cosine and sine are rounded to float32 and then
    multiplied by ``attention_factor`` (YaRN: Peng et al. 2023, section 3.4). Style "half" pairs
    columns (i, i + dims/2), as GPT-NeoX; "interleaved" pairs (2i, 2i + 1), as the paper. The first
    ``dims`` of D columns are rotated (0: all), the others copied.
    """
    width = dims or x.shape[-1]
    inverse = inverse_frequencies(width, base, scale)
    if factors is not None:
        inverse = inverse / factors
    angle = (pos.astype(np.float32)[:, None] * inverse).astype(np.float64)
    rounded = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))  # [T, 1, dims/2]
    cos, sin = (each * np.float32(attention_factor) for each in rounded)
    half = width // 2
    first = np.s_[..., :half] if style == "half" else np.s_[..., 0:width:2]
    second = np.s_[..., half:width] if style == "half" else np.s_[..., 1:width:2]
    result = np.array(x, np.float32, order="C")
    result[first] = x[first] * cos - x[second] * sin
    result[second] = x[first] * sin + x[second] * cos
    return result


# ----------------------------------------------------------------------------------- two dimensions


def _positions_2d_infer(pos: Meta, q_start: Meta, prefix_len: Meta, *, part: int) -> Meta:
    for name, x in (("pos", pos), ("q_start", q_start), ("prefix_len", prefix_len)):
        expect(name, x, 1, "i32")
    require(part in (0, 1), f"part is {part!r}, not 0 or 1")
    return same(pos)


def _positions_2d_sample(part: int, step: tuple[Shape, Shape]) -> Sample:
    """``step``: number of tokens and prefix length of each sequence."""
    queries, prefix = step

    def starts(rng: Rng, shape: Shape) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(queries)])

    def positions(rng: Rng, shape: Shape) -> np.ndarray:
        before = rng.integers(0, 9, len(queries))
        return np.concatenate([[], *(b + np.arange(n) for b, n in zip(before, queries))])

    args = (
        Arg(("T",), I32, make=positions),
        Arg(("Q",), I32, make=starts),
        Arg(("S",), I32, make=lambda rng, shape: np.array(prefix)),
    )
    env = {"T": sum(queries), "S": len(queries), "Q": len(queries) + 1}
    return Sample(args, {"part": part}, env)


_STEPS = (
    ((), ()),
    ((1,), (1,)),
    ((1,), (0,)),
    ((12,), (5,)),
    ((3, 0, 7, 1, 9), (6, 2, 0, 40, 1)),
)


@op(
    "positions_2d",
    infer=_positions_2d_infer,
    cost=lambda out, *operands, env, **_: Cost(
        2 * out.size, out.nbytes + sum(m.nbytes for m in operands)
    ),
    tol={},
    samples=grid(_positions_2d_sample, part=(0, 1), step=_STEPS),
)
def positions_2d(
    pos: np.ndarray, q_start: np.ndarray, prefix_len: np.ndarray, *, part: int,
) -> np.ndarray:  # fmt: skip
    """One of the two positions of each token: in the prompt, or in the generated text.

    pos [T], q_start [S + 1], prefix_len [S] i32 -> [T] i32. Du et al. 2022 (GLM), section 2.1, as
    in ChatGLM-6B.

    Sequence s owns the tokens q_start[s]..q_start[s+1]. With C = prefix_len[s], part 0 is
    min(pos, C - 1) and part 1 is max(0, pos - C + 1). Without a prefix they are pos and 0.
    """
    prefix = np.repeat(prefix_len, np.diff(q_start))
    if part == 0:
        return np.where(prefix == 0, pos, np.minimum(pos, prefix - 1))
    return np.where(prefix == 0, np.int32(0), np.maximum(0, pos - prefix + 1))


# --------------------------------------------------------------------------------------- sinusoidal


def _sinusoids_infer(pos: Meta, *, width: int, offset: int) -> Meta:
    expect("pos", pos, 1, "i32")
    require(width >= 4, f"width is {width}; at least 4 is needed for two frequencies")
    return out((pos.shape[0], width))


def sinusoid_frequencies(width: int) -> np.ndarray:
    """Return radians per position, float32 [width // 2], from 1 down to 1 / 10000.

    They are computed in float64 and rounded once, so that all backends use the same bits.
    """
    half = width // 2
    return np.exp(-np.arange(half) * np.log(10000.0) / (half - 1)).astype(np.float32)


@op(
    "sinusoids",
    infer=_sinusoids_infer,
    cost=lambda out, pos, *, env, **_: Cost(out.size, pos.nbytes + out.nbytes),
    tol={"f32": 2e-6},
    samples=grid(
        lambda rows, width, offset: Sample(
            (Arg(("T",), I32, make=_positions),), {"width": width, "offset": offset}, {"T": rows}
        ),
        rows=(0, 1, 7),
        width=(4, 5, 64, 257),
        offset=(0, 2),
    ),
)
def sinusoids(pos: np.ndarray, *, width: int, offset: int = 0) -> np.ndarray:
    """Sinusoidal position embeddings. pos [T] i32 -> [T, width] f32.

    Vaswani et al. 2017, section 3.5, laid out as in fairseq (XGLM): with p = pos + offset, half =
    width // 2 and f(i) = exp(-i ln(10000) / (half - 1)), the first half of a row is sin(p f), the
    second cos(p f); an odd width ends in a zero. The angle is computed in float32.
    """
    at = (pos + np.int32(offset)).astype(np.float32)[:, None]
    angle = (at * sinusoid_frequencies(width)).astype(np.float64)
    result = np.zeros((len(pos), width), np.float32)
    half = width // 2
    result[:, :half], result[:, half : 2 * half] = np.sin(angle), np.cos(angle)
    return result
