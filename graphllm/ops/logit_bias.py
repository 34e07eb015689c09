"""Logit bias: biases, banned and allowed ids, bitmaps of ids, and stop ids that come too early."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Rng, Sample, Shape, grid, op, require, same
from ..graph.tensor import Env, Meta
from .sampling import (
    allowed_ids,
    cycle,
    expect_logits,
    expect_mask,
    expect_per_row,
    logits_and_faults,
    mask_words,
    masks,
)


def _infer(
    logits: Meta, ids: Meta, bias: Meta, allowed: Meta, stop: Meta, count: Meta, min_tokens: Meta,
    mask: Meta | None = None,
) -> Meta:  # fmt: skip
    expect_logits(logits)
    expect_per_row(logits, 2, "i32", ids=ids, allowed=allowed, stop=stop)
    expect_per_row(logits, 2, "f32", bias=bias)
    require(bias.shape == ids.shape, f"bias {bias.shape} does not fit ids {ids.shape}")
    expect_per_row(logits, 1, "i32", count=count, min_tokens=min_tokens)
    expect_mask(logits, mask)
    return same(logits)


def _cost(out: Meta, logits: Meta, *rest: Meta | None, env: Env) -> Cost:
    small = sum(m.nbytes for m in rest if m is not None)
    return Cost(logits.size, logits.nbytes + out.nbytes + small)


def _sample(rows: int, width: int, listed: int, layout: str, masked: bool) -> Sample:
    def distinct(rng: Rng, shape: Shape) -> np.ndarray:
        """Rows of distinct ids, some of them missing (-1) or out of range."""
        ids = np.argsort(rng.random((shape[0], max(width, shape[1]))), axis=1)[:, : shape[1]] - 1
        return np.minimum(ids, width)

    def allowed(rng: Rng, shape: Shape) -> np.ndarray:
        ids = rng.integers(-1, width + 1, shape)
        ids[::3] = -1  # all ids are allowed
        ids[1::6, 1:] = -1
        return ids

    n = ("N",)
    args = (
        Arg(("N", width), layout=layout, make=logits_and_faults),
        Arg(("N", listed), I32, make=distinct),
        Arg(("N", listed), make=lambda rng, shape: rng.choice([-np.inf, -1.5, 0.0, 3.0], shape)),
        Arg(("N", listed + 1), I32, make=allowed),
        Arg(("N", 4), I32, make=lambda rng, s: np.resize([0, -1, width - 1, width], s)),
        Arg(n, I32, make=cycle(0, 3, 2**31 - 1, 5)),
        Arg(n, I32, make=cycle(0, 4, 2**31 - 1)),
        Arg(("N", mask_words(width)), I32, make=masks(width)) if masked else None,
    )
    return Sample(args, {}, {"N": rows})


@op(
    "bias_logits",
    infer=_infer,
    cost=_cost,
    tol={"f32": 1e-6},
    samples=grid(
        _sample, rows=(0, 1, 23), width=(1, 5, 1000), listed=(1, 9),
        layout=("contiguous", "strided"), masked=(False, True),
    )
    + grid(
        _sample, rows=(2,), width=(40001,), listed=(64,), layout=("contiguous",), masked=(True,)
    ),
)  # fmt: skip
def bias_logits(
    logits: np.ndarray, ids: np.ndarray, bias: np.ndarray, allowed: np.ndarray, stop: np.ndarray,
    count: np.ndarray, min_tokens: np.ndarray, mask: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Add biases to the logits of single ids, and exclude ids. logits [N, V] f32 -> [N, V].

    For each row: ids [N, K] i32, distinct, with bias [N, K] f32, where -inf bans an id; allowed
    [N, A] i32, outside of which all ids are excluded unless the list is empty; and stop [N, E] i32,
    which are excluded while count < min_tokens [N] i32. Entries outside 0..V-1 are ignored; a list
    that has only such entries is empty. The bitmap mask [N, ceil(V / 32)] i32 excludes id i if bit
    i % 32 of word i // 32 is 0. To exclude an id, infinity is subtracted from its logit: a
    finite logit becomes -inf, and NaN or +inf becomes NaN, so that faulty logits are not hidden.

    As logit_bias of OpenAI's API, allowed_token_ids and min_tokens of vLLM's SamplingParams, and
    SequenceBias, NoBadWords (of one token) and MinLength of transformers' logits processors.
    """
    result, width = logits.copy(), logits.shape[1]
    infinity = np.float32(np.inf)
    with np.errstate(invalid="ignore"):  # +inf - inf
        for n, row in enumerate(result):
            known = (ids[n] >= 0) & (ids[n] < width)
            row[ids[n][known]] += bias[n][known]
            only = allowed[n][(allowed[n] >= 0) & (allowed[n] < width)]
            if len(only):
                row[np.setdiff1d(np.arange(width), only)] -= infinity
            if count[n] < min_tokens[n]:
                row[np.unique(stop[n][(stop[n] >= 0) & (stop[n] < width)])] -= infinity
            if mask is not None:
                row[~allowed_ids(mask[n : n + 1], width)[0]] -= infinity
    return result
