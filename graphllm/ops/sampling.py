"""Sampling: argmax, random sampling, penalties, and the random number generator."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32, I64
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, expect, grid, op, out, require, same
from ..graph.tensor import Env, Meta, Var

# --------------------------------------------------------------------------------- random numbers

_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: np.ndarray, rounds: int = 10) -> np.ndarray:
    """Return four random words for each counter, uint32 [..., 4].

    counter [..., 4], key [..., 2], unsigned 32-bit. Salmon et al. 2011 (Random123), section 3.3.
    """
    c0, c1, c2, c3 = (np.asarray(counter[..., i], np.uint64) for i in range(4))
    k0, k1 = (np.asarray(key[..., i], np.uint64) for i in range(2))
    for _ in range(rounds):
        even, odd = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]  # 64-bit products of 32-bit words
        c0, c1 = (odd >> np.uint64(32)) ^ c1 ^ k0, odd & _LOW
        c2, c3 = (even >> np.uint64(32)) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k + np.uint64(w) & _LOW for k, w in zip((k0, k1), _WEYL, strict=True))
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(seed: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each request: seed [N] i64, count [N] i32 -> float64 [N].

    Philox4x32-10 with key (low, high half of the seed) and counter (output position, sample index
    0, purpose 0 = token, 0); the number is the first word's upper 24 bits times 2^-24.
    """
    seed = np.asarray(seed, np.int64).view(np.uint64)
    key = np.stack([seed & _LOW, seed >> np.uint64(32)], axis=-1)
    counter = np.zeros((len(seed), 4), np.uint64)
    counter[:, 0] = np.asarray(count, np.int32).view(np.uint32)
    return (philox4x32(counter, key)[:, 0] >> 8) * 2.0**-24


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

_SETTINGS = {
    "temperature": "f32", "top_k": "i32", "top_p": "f32", "min_p": "f32", "seed": "i64",
    "count": "i32",
}  # fmt: skip


def _sample_infer(logits: Meta, *settings: Meta) -> Meta:
    expect("logits", logits, 2, "f32")
    require(logits.inner[0] > 0, "logits has no columns")
    for (name, kind), x in zip(_SETTINGS.items(), settings, strict=True):
        expect(name, x, 1, kind)
        _fit(name, x, logits)
    return out(logits.shape[:1], I32)


def _fit(name: str, x: Meta, logits: Meta) -> None:
    """Raise GraphError unless ``x`` can have a row for each row of logits."""
    rows = {x.shape[0], logits.shape[0]}
    # Vars of different names (sequences, rows of logits) may have the same live value.
    varies = any(isinstance(row, Var) for row in rows)
    require(varies or len(rows) == 1, f"{name} {x.shape} for logits {logits.shape}")


def _sample_cost(out: Meta, logits: Meta, *settings: Meta, env: Env) -> Cost:
    small = sum(m.nbytes for m in settings)
    return Cost(8 * logits.size, logits.nbytes + small + out.nbytes)


def _logits(rng: Rng, shape: Shape) -> np.ndarray:
    """Return peaked rows, flat rows with ties, rows with masked ids, and rows of one value."""
    x = (rng.standard_normal(shape) * 3).astype(np.float32)
    x[1::4] = np.round(x[1::4])
    x[2::4, : shape[1] // 2] = -np.inf
    x[3::4] = 1.5
    return x


def _logits_and_faults(rng: Rng, shape: Shape) -> np.ndarray:
    """Return `_logits` with rows that contain NaN of either sign, +inf, or only -inf."""
    x = _logits(rng, shape)
    places = rng.integers(0, shape[1], shape[0])
    for first, value in ((5, np.nan), (11, np.inf), (17, -np.float32(np.nan))):
        rows = np.arange(first, shape[0], 19)
        x[rows, places[rows]] = value
    x[8::19] = -np.inf
    return x


def _cycle(*values: float) -> Maker:
    """Return a maker that repeats ``values``; the periods of the settings differ."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        return np.array([values[i % len(values)] for i in range(shape[0])])

    return make


def _seeds(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.integers(-(2**63), 2**63 - 1, shape)


def _sample_sample(rows: int, width: int, layout: str) -> Sample:
    n = ("N",)
    args = (
        Arg(("N", width), layout=layout, make=_logits_and_faults),
        Arg(n, make=_cycle(0.8, 1.0, 0.0, 2.5, 0.01, 0.8, -1.0)),
        Arg(n, I32, make=_cycle(40, 0, 1, 3, 10**6)),
        Arg(n, make=_cycle(0.95, 1.0, 0.5, 0.0, 0.9, 1.0, 0.3, 0.99, 0.8)),
        Arg(n, make=_cycle(0.0, 0.05, 0.0, 1.0, 0.2, 0.0, 0.001, 0.0, 0.1, 0.5, 0.0)),
        Arg(n, I64, make=_seeds),
        Arg(n, I32, make=_cycle(0, 1, 2, 77, 2**31 - 1)),
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
    )
    + grid(_sample_sample, rows=(3,), width=(40001,), layout=("contiguous",)),
)
def sample(
    logits: np.ndarray, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray,
    min_p: np.ndarray, seed: np.ndarray, count: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Sample one id for each row of logits [N, V] f32, with settings [N] each -> i32 [N].

    The id is -1 for a row with NaN or +inf, or with only -inf, from which no token can be sampled.
    A single -inf is valid and excludes its id.

    temperature f32 (<= 0: argmax), top_k i32 (0: off), top_p f32 (1: off), min_p f32 (0: off), seed
    i64, count i32 (output position). Filters apply in this order, each to the ids that the previous
    one kept: top_k keeps the k largest; top_p the smallest set of largest ids whose probabilities
    at temperature 1 reach top_p; min_p the ids with at least min_p times the largest probability.
    Ties go to the lowest index. Then the cumulative distribution of softmax(logits / temperature),
    in order of ids, is inverted at `uniform`; all sums are float64 and sequential.

    top_k: Fan et al. 2018; top_p: Holtzman et al. 2019; min_p: Nguyen et al. 2024; the order of the
    filters is that of llama.cpp's default chain.
    """
    chosen, numbers = _first_largest(logits), uniform(seed, count)
    chosen[~np.isfinite(logits.max(axis=-1))] = -1  # the maximum of a row with NaN is NaN
    for n in range(len(logits)):
        if temperature[n] > 0 and chosen[n] >= 0:
            row = logits[n].astype(np.float64)
            chosen[n] = _sample_row(
                row, float(temperature[n]), int(top_k[n]), top_p[n], min_p[n], numbers[n]
            )
    return chosen


def _sample_row(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, number: float,
) -> int:  # fmt: skip
    """Sample one id from row [V] float64 with ``number`` in [0, 1)."""
    ids = np.arange(len(row))
    if 0 < top_k < len(row):
        least = np.partition(row, len(row) - top_k)[len(row) - top_k]
        above, level = np.flatnonzero(row > least), np.flatnonzero(row == least)
        ids = np.sort(np.concatenate([above, level[: top_k - len(above)]]))
    if top_p < 1:
        ids = ids[np.argsort(-row[ids], kind="stable")]
        reached = np.cumsum(_weights(row[ids]))
        ids = np.sort(ids[: np.searchsorted(reached, np.float64(top_p) * reached[-1]) + 1])
    if min_p > 0:
        ids = ids[_weights(row[ids]) >= np.float64(min_p)]
    reached = np.cumsum(_weights(row[ids], temperature))
    at = np.searchsorted(reached, number * reached[-1], side="right")
    return ids[min(at, len(ids) - 1)]


def _weights(row: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return exp((row - max) / temperature) for a row with a finite maximum."""
    return np.exp((row - row.max()) / temperature)


# --------------------------------------------------------------------------------------- penalties

_PENALTIES = {
    "count": "i32", "repeat": "f32", "presence": "f32", "frequency": "f32", "min_tokens": "i32",
}  # fmt: skip


def _penalise_infer(logits: Meta, history: Meta, count: Meta, stop: Meta, *settings: Meta) -> Meta:
    expect("logits", logits, 2, "f32")
    require(logits.inner[0] > 0, "logits has no columns")
    expect("history", history, 2, "i32")
    expect("stop", stop, 1, "i32")
    _fit("history", history, logits)
    for (name, kind), x in zip(_PENALTIES.items(), (count, *settings), strict=True):
        expect(name, x, 1, kind)
        _fit(name, x, logits)
    return same(logits)


def _penalise_cost(out: Meta, logits: Meta, *rest: Meta, env: Env) -> Cost:
    return Cost(4 * rest[0].size, logits.nbytes + out.nbytes + sum(m.nbytes for m in rest))


def _past(width: int) -> Maker:
    """Return a maker of histories: few distinct ids, random, half empty, empty, out of range."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        past = rng.integers(0, width, shape)
        past[::5] = rng.integers(0, min(width, 3), past[::5].shape)
        past[1::5, ::2] = -1
        past[2::5] = -1
        past[3::5, :1] = width
        return past

    return make


def _penalise_sample(rows: int, width: int, ring: int, layout: str) -> Sample:
    n = ("N",)
    args = (
        Arg(("N", width), layout=layout, make=_logits_and_faults),
        Arg(("N", ring), I32, make=_past(width)),
        Arg(n, I32, make=_cycle(0, 3, 2**31 - 1, 5)),
        Arg((4,), I32, make=lambda rng, shape: np.array([0, -1, width - 1, width])),
        Arg(n, make=_cycle(1.0, 1.1, 1.5, 0.5, 2.0, 1.0)),
        Arg(n, make=_cycle(0.0, 0.5, -0.25, 0.0)),
        Arg(n, make=_cycle(0.0, 0.3, 0.0, -0.1, 0.7)),
        Arg(n, I32, make=_cycle(0, 4, 2**31 - 1)),
    )
    return Sample(args, {}, {"N": rows})


@op(
    "penalise",
    infer=_penalise_infer,
    cost=_penalise_cost,
    tol={"f32": 1e-5},
    samples=grid(
        _penalise_sample,
        rows=(0, 1, 23),
        width=(1, 5, 1000),
        ring=(1, 64),
        layout=("contiguous", "strided"),
    )
    + grid(_penalise_sample, rows=(2,), width=(40001,), ring=(64,), layout=("contiguous",)),
)
def penalise(
    logits: np.ndarray, history: np.ndarray, count: np.ndarray, stop: np.ndarray,
    repeat: np.ndarray, presence: np.ndarray, frequency: np.ndarray, min_tokens: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Penalise recently generated ids and early stop tokens. logits [N, V] f32 -> [N, V].

    history [N, W] i32: the last ids of each sequence, in any order; stop [E] i32; and for each
    sequence count i32 (number of its ids), repeat, presence, frequency f32, min_tokens i32. Entries
    outside 0..V-1 are ignored. The logit of an id that occurs c > 0 times in the history is divided
    by ``repeat`` (multiplied if it is not positive) and reduced by presence + c * frequency. While
    count < min_tokens, infinity is subtracted from the logits of ``stop``: a finite logit becomes
    -inf, and NaN or +inf becomes NaN, so that faulty logits are not hidden.

    repeat: Keskar et al. 2019 (CTRL), section 4.1; presence and frequency: as OpenAI's API defines
    them; all three together as in llama.cpp's penalties.
    """
    result, width = logits.copy(), logits.shape[1]
    stop = stop[(stop >= 0) & (stop < width)]
    for n, row in enumerate(result):
        known = history[n][(history[n] >= 0) & (history[n] < width)]
        ids, times = np.unique(known, return_counts=True)
        value = row[ids]
        value = np.where(value > 0, value / repeat[n], value * repeat[n])
        row[ids] = value - (presence[n] + times.astype(np.float32) * frequency[n])
        if count[n] < min_tokens[n]:
            with np.errstate(invalid="ignore"):  # +inf - inf
                row[stop] -= np.float32(np.inf)
    return result
