"""Sampling of token ids: argmax, and random sampling by the Gumbel-max rule."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32, I64
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, expect, grid, op, out, require
from ..graph.tensor import Env, Meta, Var
from .random_numbers import gumbel, uniform

# ----------------------------------------------------------------------------------------- argmax


def _argmax_infer(x: Meta) -> Meta:
    expect("x", x, 2, "f32")
    require(x.inner[0] > 0, "x has no columns")
    return out(x.shape[:1], I32)


def _rows_with_ties(rng: Rng, shape: Shape) -> np.ndarray:
    """Return rows with ties for the maximum, with NaN, only NaN, and -inf after NaN."""
    x = np.round(rng.standard_normal(shape) * 2).astype(np.float32)
    if shape[0] > 4:
        x[1, 0] = np.nan
        x[2] = np.nan
        x[3] = -np.inf
        x[3, 0] = np.nan
        x[4, -1] = np.inf
    return x


def _argmax_sample(rows: int, width: int, layout: str) -> Sample:
    return Sample((Arg(("N", width), layout=layout, make=_rows_with_ties),), {}, {"N": rows})


def _first_largest(x: np.ndarray) -> np.ndarray:
    """Return the index of each row's maximum, the lowest of ties; 0 if all values are NaN."""
    best = np.where(np.isnan(x), -np.inf, x).max(axis=-1, keepdims=True)
    return np.argmax(x == best, axis=-1).astype(np.int32)


@op(
    "argmax",
    infer=_argmax_infer,
    cost=lambda out, x, *, env: Cost(x.size, x.nbytes + out.nbytes),
    tol={},
    samples=grid(
        _argmax_sample,
        rows=(0, 1, 7),
        width=(1, 2, 63, 1000, 40001),
        layout=("contiguous", "strided"),
    ),
)
def argmax(x: np.ndarray) -> np.ndarray:
    """Index of the largest value of each row. x [N, V] f32 -> i32 [N].

    The lowest index wins ties; NaN never wins over a number, and a row of NaN gives 0.
    """
    return _first_largest(x)


# ----------------------------------------------------------------------------------------- sample


def _sample_infer(
    logits: Meta, temperature: Meta, top_k: Meta, top_p: Meta, min_p: Meta, seed: Meta,
    count: Meta, sample_index: Meta, mask: Meta | None = None,
) -> Meta:  # fmt: skip
    expect_logits(logits)
    expect_per_row(logits, 1, "f32", temperature=temperature, top_p=top_p, min_p=min_p)
    expect_per_row(logits, 1, "i32", top_k=top_k, count=count, sample_index=sample_index)
    expect_per_row(logits, 1, "i64", seed=seed)
    expect_mask(logits, mask)
    return out(logits.shape[:1], I32)


def expect_logits(logits: Meta) -> None:
    """Raise GraphError unless ``logits`` is [N, V] f32 with V > 0."""
    expect("logits", logits, 2, "f32")
    require(logits.inner[0] > 0, "logits has no columns")


def expect_per_row(logits: Meta, rank: int, dtype: str, **operands: Meta) -> None:
    """Raise GraphError unless the operands can have a row for each row of logits.

    Args:
        logits: the logits [N, V].
        rank: rank of the operands; the first axis has the rows.
        dtype: name of their dtype.
        **operands: operands by name.
    """
    for name, x in operands.items():
        expect(name, x, rank, dtype)
        rows = {x.shape[0], logits.shape[0]}
        # Vars of different names (sequences, rows of logits) may have the same live value.
        varies = any(isinstance(row, Var) for row in rows)
        require(varies or len(rows) == 1, f"{name} {x.shape} for logits {logits.shape}")


def expect_mask(logits: Meta, mask: Meta | None) -> None:
    """Raise GraphError unless ``mask`` is None or a bitmap [N, ceil(V / 32)] i32 of the ids."""
    if mask is not None:
        expect_per_row(logits, 2, "i32", mask=mask)
        words = mask_words(logits.inner[0])
        require(mask.inner == (words,), f"mask {mask.shape} has not {words} words for each row")


def mask_words(width: int) -> int:
    """Return the number of 32-bit words of a bitmap of ``width`` ids."""
    return -(-width // 32)


def allowed_ids(mask: np.ndarray, width: int) -> np.ndarray:
    """Return bool [N, width] of a bitmap i32 [N, W]: bit i % 32 of word i // 32 is that of id i."""
    words = np.ascontiguousarray(mask).view(np.uint8)
    return np.unpackbits(words, axis=1, count=width, bitorder="little").astype(bool)


def _sample_cost(out: Meta, logits: Meta, *settings: Meta | None, env: Env) -> Cost:
    small = sum(m.nbytes for m in settings if m is not None)
    return Cost(8 * logits.size, logits.nbytes + small + out.nbytes)


def _logits(rng: Rng, shape: Shape) -> np.ndarray:
    """Return peaked rows, flat rows with ties, rows with masked ids, and rows of one value."""
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    x[1::4] = np.round(x[1::4])
    x[2::4, : shape[1] // 2] = -np.inf
    x[3::4] = 1.5
    return x


def logits_and_faults(rng: Rng, shape: Shape) -> np.ndarray:
    """Return `_logits` with rows that contain NaN of either sign, +inf, or only -inf."""
    x = _logits(rng, shape)
    places = rng.integers(0, shape[1], shape[0])
    for first, value in ((5, np.nan), (11, np.inf), (17, -np.float32(np.nan))):
        rows = np.arange(first, shape[0], 19)
        x[rows, places[rows]] = value
    x[8::19] = -np.inf
    return x


def cycle(*values: float) -> Maker:
    """Return a maker that repeats ``values``; the periods of the settings differ."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        return np.array([values[i % len(values)] for i in range(shape[0])])

    return make


def seeds(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.integers(-(2**63), 2**63 - 1, shape)


def masks(width: int) -> Maker:
    """Return a maker of bitmaps: all ids, no id, one id, every other word, ids at random."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        allowed = rng.random((shape[0], width)) < rng.choice([0.02, 0.5, 0.98], (shape[0], 1))
        allowed[::5] = True
        allowed[3::9] = False
        allowed[1::7] = np.arange(width) == rng.integers(0, width)
        allowed[4::7] = np.arange(width) // 32 % 2
        bits = np.packbits(allowed, axis=1, bitorder="little")
        own = np.full((shape[0], 4 * shape[1]), 0xA5, np.uint8)  # bits after the last id are unused
        own[:, : bits.shape[1]] = bits
        return own.view(np.int32)

    return make


def _sample_sample(rows: int, width: int, layout: str, masked: bool) -> Sample:
    n = ("N",)
    args = (
        Arg(("N", width), layout=layout, make=logits_and_faults),
        Arg(n, make=cycle(0.8, 1.0, 0.0, 2.5, 0.01, 0.8, -1.0)),
        Arg(n, I32, make=cycle(40, 0, 1, 3, 10**6)),
        Arg(n, make=cycle(0.95, 1.0, 0.5, 0.0, 0.9, 1.0, 0.3, 0.99, 0.8)),
        Arg(n, make=cycle(0.0, 0.05, 0.0, 1.0, 0.2, 0.0, 0.001, 0.0, 0.1, 0.5, 0.0)),
        Arg(n, I64, make=seeds),
        Arg(n, I32, make=cycle(0, 1, 2, 77, 2**31 - 1)),
        Arg(n, I32, make=cycle(0, 0, 1, 3)),
        Arg(("N", mask_words(width)), I32, make=masks(width)) if masked else None,
    )
    return Sample(args, {}, {"N": rows})


@op(
    "sample",
    infer=_sample_infer,
    cost=_sample_cost,
    tol={},
    samples=grid(
        _sample_sample,
        rows=(0, 1, 64),
        width=(1, 5, 63, 1000),
        layout=("contiguous", "strided"),
        masked=(False, True),
    )
    + grid(
        _sample_sample, rows=(18,), width=(40001,), layout=("contiguous",), masked=(False, True)
    ),
)
def sample(
    logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray,
    min_p: np.ndarray, seed: np.ndarray, count: np.ndarray, sample_index: np.ndarray,
    mask: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Sample one id for each row of logits [N, V] f32, with settings [N] each -> i32 [N].

    mask [N, ceil(V / 32)] i32: bitmap of the ids that can be sampled, bit i % 32 of word i // 32
    for id i. The logit of any other id counts as -inf, whatever it is; it need not be read.

    The id is -1 for a row with NaN or +inf, or with only -inf, from which no token can be sampled.
    A single -inf is valid and excludes its id.

    temperature f32 (<= 0: argmax), top_k i32 (0: off), top_p f32 (1: off), min_p f32 (0: off), seed
    i64, count i32 (output position), sample_index i32 (index among the samples of a request).
    Filters apply in this order, each to the ids that the previous one kept: top_k keeps the k
    largest; top_p the smallest set of largest ids whose probabilities at temperature 1 reach top_p;
    min_p the ids with at least min_p times the largest probability. Ties go to the lowest index.

    Of the ids left, the one with the largest (logit - maximum) / temperature + g is sampled, where
    g is the Gumbel noise of the id (`random_numbers.gumbel` of `uniform`), in float64; this samples
    from softmax(logits / temperature). A change in the last bit of a logit changes the id only at a
    near tie of two such sums, and an id's noise does not depend on the other ids.

    Gumbel-max: Gumbel 1954, Maddison et al. 2014; top_k: Fan et al. 2018; top_p: Holtzman et al.
    2019; min_p: Nguyen et al. 2024; the order of the filters is that of llama.cpp's default chain.
    """
    if mask is not None:
        allowed = allowed_ids(mask[: len(logits)], logits.shape[1])
        logits = np.where(allowed, logits, np.float32(-np.inf))
    chosen = _first_largest(logits)
    chosen[~np.isfinite(logits.max(axis=-1))] = -1  # the maximum of a row with NaN is NaN
    for n in range(len(logits)):
        if temperature[n] > 0 and chosen[n] >= 0:
            row = logits[n].astype(np.float64)
            ids = kept_ids(row, int(top_k[n]), top_p[n], min_p[n])
            noise = gumbel(uniform(seed[n], count[n], sample_index[n], len(row))[ids])
            scores = (row[ids] - row.max()) / np.float64(temperature[n]) + noise
            chosen[n] = ids[np.argmax(scores)]
    return chosen


def kept_ids(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return the ids of row [V] float64 that top_k, top_p and min_p keep, ascending."""
    ids = np.arange(len(row))
    if 0 < top_k < len(row):
        least = np.partition(row, len(row) - top_k)[len(row) - top_k]
        above, level = np.flatnonzero(row > least), np.flatnonzero(row == least)
        ids = np.sort(np.concatenate([above, level[: top_k - len(above)]]))
    if top_p < 1:
        ids = ids[np.argsort(-row[ids], kind="stable")]
        reached = np.cumsum(np.exp(row[ids] - row.max()))
        ids = np.sort(ids[: np.searchsorted(reached, np.float64(top_p) * reached[-1]) + 1])
    if min_p > 0:
        ids = ids[np.exp(row[ids] - row.max()) >= np.float64(min_p)]
    return ids
