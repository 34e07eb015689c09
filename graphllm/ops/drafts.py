"""Draft tokens of one sequence, accepted and predicted on the device between two decode steps.

Row r of a step is the sequence with its first r draft tokens. `accept_drafts` ends a step: it
appends the sampled tokens, and predicts draft tokens by prompt look-up (Saxena 2023).
`place_drafts` begins the next one, with as many of them as the step has rows for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, expect, grid, op, require
from ..graph.tensor import Env, Meta
from .step import check_groups, random_table, slots_at

SHORTEST, LONGEST = 2, 32  # tokens of a match: at least, and most that are compared


def _infer_accept(sampled: Meta, drafts: Meta, tokens: Meta, progress: Meta) -> Meta:
    for name, x in zip(("sampled", "drafts", "tokens"), (sampled, drafts, tokens)):
        expect(name, x, 1, "i32")
    _expect_progress(progress)
    return drafts


def _infer_place(
    progress: Meta, drafts: Meta, tokens: Meta, ids: Meta, pos: Meta, kv_len: Meta, count: Meta,
    *groups: Meta, block: int,
) -> Meta:  # fmt: skip
    _expect_progress(progress)
    for name, x in (("drafts", drafts), ("tokens", tokens), ("ids", ids), ("kv_len", kv_len)):
        expect(name, x, 1, "i32")
    for name, x, like in (("pos", pos, ids), ("count", count, kv_len)):
        expect(name, x, 1, "i32")
        require(x.shape == like.shape, f"{name} {x.shape} does not fit {like.shape}")
    check_groups(ids, kv_len, groups, block)
    return ids


def _expect_progress(progress: Meta) -> None:
    expect("progress", progress, 1, "i32")
    require(progress.shape == (2,), f"progress is {progress.shape}, not (2,)")


def _accept_cost(
    out: Meta, sampled: Meta, drafts: Meta, tokens: Meta, progress: Meta, *, env: Env
) -> Cost:
    return Cost(0, 4 * (tokens.size + sampled.size + 2 * drafts.size))


def _place_cost(
    out: Meta, progress: Meta, drafts: Meta, tokens: Meta, ids: Meta, pos: Meta, kv_len: Meta,
    count: Meta, *groups: Meta, env: Env, **_: Any,
) -> Cost:  # fmt: skip
    return Cost(kv_len.size * (3 + 2 * len(groups)), 4 * kv_len.size * (5 + len(groups)))


# ------------------------------------------------------------------------------------- test inputs


def _few_ids(rng: Rng, shape: Shape) -> np.ndarray:
    """Return ids of which most are equal, and some below zero: no prediction, or no sample."""
    return np.where(rng.random(shape) < 0.9, 3, rng.integers(-1, 5, shape))


def _periodic(period: int) -> Maker:
    def make(rng: Rng, shape: Shape) -> np.ndarray:
        known = np.arange(shape[0]) % period
        return np.where(rng.random(shape) < 0.02, rng.integers(0, period, shape), known)

    return make


def _progress(length: int) -> Maker:
    return lambda rng, shape: np.array([length, min(length, 3)])


def _accept_sample(rows: int, drafts: int, length: int, period: int) -> Sample:
    tokens = Arg((300,), I32, leaf="state", make=_periodic(period))
    own = Arg((drafts,), I32, leaf="state", make=_few_ids)
    progress = Arg((2,), I32, leaf="state", make=_progress(length))
    return Sample((Arg(("N",), I32, make=_few_ids), own, tokens, progress), {}, {"N": rows})


def _place_sample(rows: int, drafts: int, length: int, groups: int, block: int) -> Sample:
    t, s = ("T",), ("S",)
    args = [Arg((2,), I32, make=_progress(length)), Arg((drafts,), I32, make=_few_ids)]
    args += [Arg((300,), I32, make=_periodic(7))]
    args += [Arg(shape, I32, leaf="state") for shape in (t, t, s, s)]
    for _ in range(groups):
        args += [Arg(t, I32, leaf="state"), Arg(("S", 5), I32, make=random_table)]
    return Sample((*args,), {"block": block}, {"S": rows, "T": rows})


# --------------------------------------------------------------------------------------------- ops


@op(
    "accept_drafts",
    infer=_infer_accept,
    cost=_accept_cost,
    tol={},
    writes=lambda count: (1, 2, 3),
    samples=grid(
        _accept_sample, rows=(0, 1, 5, 16), drafts=(1, 4, 15), length=(1, 2, 77, 284, 299),
        period=(1, 5, 40, 400),
    ),
)  # fmt: skip
def accept_drafts(
    sampled: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, progress: np.ndarray
) -> None:
    """Append the tokens that a step sampled, and predict the next ones. Written in place.

    sampled [N]; state: drafts [D], tokens [C], progress [2]: the number of tokens and of those of
    the prompt; all i32. Row r sampled the token after the first r drafts. So a draft is accepted if
    it is the token of the row before it, and all drafts before it are accepted; the token after the
    last accepted one is appended, too. Tokens beyond C are dropped.

    Then drafts are the tokens after the earlier occurrence of the last tokens with the longest
    match, from 2 up to 32 tokens, of equals the latest; a prediction that reaches the end is
    repeated. Without one, drafts are -1, which is never accepted.
    """
    rows, length = min(len(sampled), len(drafts) + 1), int(progress[0])
    predicted = drafts[: max(rows - 1, 0)]
    wrong = np.flatnonzero((sampled[: len(predicted)] != predicted) | (predicted < 0))
    accepted = int(wrong[0]) + 1 if len(wrong) else rows
    new = sampled[:accepted][: len(tokens) - length]
    tokens[length : length + len(new)] = new
    progress[0] = length + len(new)
    drafts[:] = _look_up(tokens[: progress[0]], len(drafts))


def _look_up(tokens: np.ndarray, count: int) -> np.ndarray:
    """Return the ``count`` tokens that are predicted after ``tokens``; -1: there are none."""
    end, best = len(tokens), (0, 0)
    for at in range(SHORTEST, end):
        most = min(at, LONGEST)
        differ = np.flatnonzero(tokens[at - most : at] != tokens[end - most :])
        length = most - 1 - int(differ[-1]) if len(differ) else most
        if length >= SHORTEST:
            best = max(best, (length, at))
    source = best[1]
    if not source:
        return np.full(count, -1, np.int32)
    return tokens[source + np.arange(count) % (end - source)]


@op(
    "place_drafts",
    infer=_infer_place,
    cost=_place_cost,
    tol={},
    writes=lambda count: (3, 4, 5, 6, *range(7, count, 2)),
    samples=grid(
        _place_sample, rows=(0, 1, 6), drafts=(1, 15), length=(1, 8, 40), groups=(0, 1, 2),
        block=(1, 8),
    ),
)  # fmt: skip
def place_drafts(
    progress: np.ndarray, drafts: np.ndarray, tokens: np.ndarray, ids: np.ndarray, pos: np.ndarray,
    kv_len: np.ndarray, count: np.ndarray, *groups: np.ndarray, block: int,
) -> None:  # fmt: skip
    """Begin a step with the last token of a sequence and its draft tokens. Written in place.

    progress, drafts, tokens: see `accept_drafts`; state: ids, pos [T], kv_len, count [S], with as
    many tokens as rows; then for each cache group slot [T] and table [S, B]; all i32. Row r is
    draft r - 1, or the last token again if there is no such draft, at the position after that of
    row r - 1; slots are as of `advance`.
    """
    row, (length, prompt) = np.arange(len(kv_len)), progress.tolist()
    known = drafts[np.maximum(np.minimum(row, len(drafts)) - 1, 0)]
    placed = (row > 0) & (row <= len(drafts)) & (known >= 0)
    p = length - 1 + row
    ids[: len(row)] = np.where(placed, known, tokens[length - 1])
    pos[: len(row)], kv_len[:], count[:] = p, p + 1, p + 1 - prompt
    for slot, table in zip(groups[::2], groups[1::2], strict=True):
        slot[: len(row)] = slots_at(table, p, block)
