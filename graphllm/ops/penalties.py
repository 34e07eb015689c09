"""Penalties: changes of logits by what was generated so far."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, expect, grid, op, require, same
from ..graph.tensor import Env, Meta
from .sampling import cycle, fit, logits_and_faults

_PENALTIES = {
    "count": "i32", "repeat": "f32", "presence": "f32", "frequency": "f32", "min_tokens": "i32",
}  # fmt: skip


def _penalise_infer(logits: Meta, history: Meta, count: Meta, stop: Meta, *settings: Meta) -> Meta:
    expect("logits", logits, 2, "f32")
    require(logits.inner[0] > 0, "logits has no columns")
    expect("history", history, 2, "i32")
    expect("stop", stop, 1, "i32")
    fit("history", history, logits)
    for (name, kind), x in zip(_PENALTIES.items(), (count, *settings), strict=True):
        expect(name, x, 1, kind)
        fit(name, x, logits)
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
        Arg(("N", width), layout=layout, make=logits_and_faults),
        Arg(("N", ring), I32, make=_past(width)),
        Arg(n, I32, make=cycle(0, 3, 2**31 - 1, 5)),
        Arg((4,), I32, make=lambda rng, shape: np.array([0, -1, width - 1, width])),
        Arg(n, make=cycle(1.0, 1.1, 1.5, 0.5, 2.0, 1.0)),
        Arg(n, make=cycle(0.0, 0.5, -0.25, 0.0)),
        Arg(n, make=cycle(0.0, 0.3, 0.0, -0.1, 0.7)),
        Arg(n, I32, make=cycle(0, 4, 2**31 - 1)),
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
