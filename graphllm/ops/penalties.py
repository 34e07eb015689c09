"""Penalties: changes of logits by the tokens so far."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, grid, op, require, same
from ..graph.tensor import Env, Meta
from .sampling import expect_logits, expect_per_row, logits_and_faults

# Columns of the operands `factors` (f32) and `windows` (i32) of `penalise`.
FACTORS = ("repeat", "presence", "frequency", "dry_multiplier", "dry_base")
WINDOWS = ("penalty_last_n", "dry_allowed_length", "dry_penalty_last_n")


def _infer(
    logits: Meta, history: Meta, length: Meta, breakers: Meta, factors: Meta, windows: Meta
) -> Meta:
    expect_logits(logits)
    expect_per_row(logits, 1, "i32", length=length)
    expect_per_row(logits, 2, "i32", history=history, breakers=breakers, windows=windows)
    expect_per_row(logits, 2, "f32", factors=factors)
    require(history.inner[0] > 0, "history has no columns")
    for name, x, columns in (("factors", factors, FACTORS), ("windows", windows, WINDOWS)):
        require(x.inner[0] == len(columns), f"{name} {x.shape} has not {len(columns)} columns")
    return same(logits)


def _cost(out: Meta, logits: Meta, *rest: Meta, env: Env) -> Cost:
    return Cost(4 * rest[0].size, logits.nbytes + out.nbytes + sum(m.nbytes for m in rest))


def _past(width: int) -> Maker:
    """Return a maker of histories: few distinct ids, random, periodic, out of range, constant."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        past = rng.integers(0, width, shape)
        past[::5] = rng.integers(0, min(width, 3), past[::5].shape)
        past[1::5] = np.arange(shape[1]) % min(width, 7)
        past[2::5, ::3] = -1
        past[3::5, :1] = width
        past[4::5] = width - 1
        return past

    return make


def _sample(rows: int, width: int, ring: int, layout: str) -> Sample:
    def table(*columns: tuple[float, ...]) -> Maker:
        """Return a maker that repeats each column's values; their periods differ."""

        def make(rng: Rng, shape: Shape) -> np.ndarray:
            return np.stack([np.resize(column, shape[0]) for column in columns], axis=-1)

        return make

    def lengths(rng: Rng, shape: Shape) -> np.ndarray:
        """Lengths of the history, more than it, less, and none."""
        return np.resize([ring, 3 * ring + 1, max(1, ring // 2), 0, 10**6], shape)

    def breakers(rng: Rng, shape: Shape) -> np.ndarray:
        return np.resize([-1, 2, -1, width, -1, -1, 0], shape)

    factors = table(
        (1.0, 1.1, 1.5, 0.5, 2.0, 1.0), (0.0, 0.5, -0.25, 0.0), (0.0, 0.3, 0.0, -0.1, 0.7),
        (0.0, 0.8, 1.5), (1.75, 1.0, 1.1, 2.0),
    )  # fmt: skip
    windows = table((64, 0, -1, 3, 10**6), (2, 1, 3, 0), (-1, 1000, 5, 0, -1, 64, 20))
    args = (
        Arg(("N", width), layout=layout, make=logits_and_faults),
        Arg(("N", ring), I32, make=_past(width)),
        Arg(("N",), I32, make=lengths),
        Arg(("N", 2), I32, make=breakers),
        Arg(("N", len(FACTORS)), make=factors),
        Arg(("N", len(WINDOWS)), I32, make=windows),
    )
    return Sample(args, {}, {"N": rows})


@op(
    "penalise",
    infer=_infer,
    cost=_cost,
    tol={"f32": 1e-5},
    samples=grid(
        _sample, rows=(0, 1, 43), width=(1, 5, 1000), ring=(1, 64, 300),
        layout=("contiguous", "strided"),
    )
    + grid(_sample, rows=(2,), width=(40001,), ring=(64,), layout=("contiguous",)),
)  # fmt: skip
def penalise(
    logits: np.ndarray, history: np.ndarray, length: np.ndarray, breakers: np.ndarray,
    factors: np.ndarray, windows: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Penalise tokens that the sequence has already. logits [N, V] f32 -> [N, V].

    history [N, W] i32 is a ring of the last tokens of each sequence of length [N] i32: position p
    is in column p % W. factors [N, 5] f32 and windows [N, 3] i32 have the columns `FACTORS` and
    `WINDOWS`; breakers [N, B] i32 are sequence breakers of DRY. Ids outside 0..V-1 are ignored.

    A window is a number of last tokens, at most W; -1 stands for W. The logit of an id that occurs
    c > 0 times in the last penalty_last_n tokens is divided by repeat (multiplied if it is not
    positive) and reduced by presence + c * frequency.

    Then DRY: if a token would continue a sequence that the last n >= dry_allowed_length tokens
    repeat, within the last dry_penalty_last_n tokens and after the last sequence breaker, its logit
    is reduced by dry_multiplier * dry_base^(n - dry_allowed_length), with the largest such n; the
    power is at most the largest float32. A dry_multiplier of 0 or a dry_base below 1 disables it.

    repeat: Keskar et al. 2019 (CTRL), section 4.1; presence and frequency: as OpenAI's API defines
    them; DRY: p-e-w 2024 (text-generation-webui #5677). All as in llama.cpp.
    """
    result, width = logits.copy(), logits.shape[1]
    for n, row in enumerate(result):
        last_n, allowed_length, dry_last_n = map(int, windows[n])
        repeat, presence, frequency, multiplier, base = factors[n]
        past = _recent(history[n], int(length[n]), last_n)
        ids, times = np.unique(past[(past >= 0) & (past < width)], return_counts=True)
        value = row[ids]
        value = np.where(value > 0, value / repeat, value * repeat)
        row[ids] = value - (presence + times.astype(np.float32) * frequency)
        if multiplier != 0 and base >= 1:
            past = _recent(history[n], int(length[n]), dry_last_n)
            for token, repeated in _repetitions(past, breakers[n], allowed_length).items():
                if 0 <= token < width:
                    row[token] -= dry_penalty(multiplier, base, repeated - allowed_length)
    return result


def _recent(history: np.ndarray, length: int, window: int) -> np.ndarray:
    """Return the last ``window`` (-1: all) tokens of a ring, the latest first."""
    count = min(length, len(history), length if window < 0 else window)
    return history[np.arange(length - 1, length - 1 - count, -1) % len(history)]


def _repetitions(past: np.ndarray, breakers: np.ndarray, least: int) -> dict[int, int]:
    """Return for each token how many of the last tokens it would repeat, if at least ``least``.

    past [n] i32: tokens, the latest first. After the last k tokens, past[k - 1] came; as many of
    the last tokens as agree with those before it would be repeated.
    """
    at = np.flatnonzero(np.isin(past, breakers[breakers >= 0]))
    limit = int(at[0]) if len(at) else len(past)
    found: dict[int, int] = {}
    if limit < least:
        return found
    for k in range(1, len(past)):
        differs = np.flatnonzero(past[k:] != past[: len(past) - k])
        repeated = min(limit, int(differs[0]) if len(differs) else len(past) - k)
        if repeated >= least:
            token = int(past[k - 1])
            found[token] = max(found.get(token, 0), repeated)
    return found


def dry_penalty(multiplier: np.float32, base: np.float32, excess: int) -> np.float32:
    """Return multiplier * base^excess as float32, the power at most 2^127."""
    with np.errstate(over="ignore"):
        power = min(np.float64(base) ** excess, 2.0**127)
        return np.float32(np.clip(np.float64(multiplier) * power, -3.4e38, 3.4e38))
