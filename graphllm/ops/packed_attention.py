"""Bidirectional attention over packed sequences, and attention of one sequence in NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..graph.dtype import F16, F32, I32, DType
from ..graph.op import (
    ATTENTION,
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
)
from ..graph.tensor import Env, Meta

SCORE_BYTES = 16 << 20  # maximum size of the scores in memory


def _infer(
    q: Meta, k: Meta, v: Meta, q_start: Meta, position_bias: Meta | None = None, *, scale: float,
    window: int,
) -> Meta:  # fmt: skip
    for name, rows in (("q", q), ("k", k), ("v", v)):
        expect(name, rows, 3, "f32", "f16")
        require(rows.dtype == q.dtype, f"{name} is {rows.dtype}, q {q.dtype}")
        require(rows.shape[0] == q.shape[0], f"{name} has {rows.shape[0]} tokens, q {q.shape[0]}")
    expect("q_start", q_start, 1, "i32")
    require(k.shape[1] == v.shape[1], f"k {k.shape} and v {v.shape} differ in heads")
    require_grouped_heads(q, k)
    require(window >= 0, f"window {window} is below zero")
    check_position_bias(q, position_bias)
    return out((*q.shape[:2], v.shape[2]))


def _cost(
    out: Meta, q: Meta, k: Meta, v: Meta, q_start: Meta, position_bias: Meta | None = None, *,
    env: Env, scale: float, window: int,
) -> Cost:  # fmt: skip
    """Cost from ``env["kv_sum"]``: number of keys of each query's sequence, summed over queries.

    Without it, the sequences are assumed to have equal lengths. A window is assumed to be whole
    for every query, or none.
    """
    sequences = max(1, q_start.dims[0] - 1)
    pairs: float = env.get("kv_sum", q.dims[0] ** 2 / sequences)
    if window:
        pairs = min(pairs, q.dims[0] * (2 * window + 1))
    moved = sum(m.nbytes for m in (q, k, v, q_start, position_bias, out) if m is not None)
    return Cost(2 * pairs * q.dims[1] * (q.dims[2] + v.dims[2]), moved)


def _sample(
    lengths: tuple[int, ...], heads: tuple[int, int] = (4, 2), width: tuple[int, int] = (32, 32),
    layout: str = "contiguous", biased: bool = False, window: int = 0, kind: DType = F32,
) -> Sample:  # fmt: skip
    def q_start(rng: Rng, shape: Shape) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)])

    counts = (heads[0], heads[1], heads[1])
    depths = (width[0], width[0], width[1])
    rows = (
        Arg(("T", count, depth), kind, layout) for count, depth in zip(counts, depths, strict=True)
    )
    env = {"T": sum(lengths), "Q": len(lengths) + 1}
    bias = [Arg((heads[0], 37), leaf="weight")] if biased else []
    args = (*rows, Arg(("Q",), I32, make=q_start), *bias)
    return Sample(args, {"scale": width[0] ** -0.5, "window": window}, env)


# Fewer and more tokens than a kernel splits, and sequences longer than a tile or a split.
_LENGTHS = ((), (1,), (17,), (3, 0, 1), (1, 9, 4, 20), (5, 300, 2, 75))
_SHAPES = (((1, 1), (1, 1)), ((3, 3), (20, 20)), ((6, 2), (64, 64)), ((12, 12), (32, 48)))
_WIDE = (((4, 4), (32, 32)), ((3, 1), (96, 96)), ((2, 2), (128, 128)))
# Of more sequences than a warp finds at once, and of several within 16 tokens.
_MANY = tuple(i * 7 % 11 for i in range(90))


@op(
    "packed_attention",
    infer=_infer,
    cost=_cost,
    arithmetic=ATTENTION,
    tol={"f32": 1e-5},
    samples=Samples(
        lambda: [
            *(_sample(lengths, *shape) for lengths in _LENGTHS for shape in _SHAPES),
            *grid(_sample, lengths=_LENGTHS[1:-1], layout=("strided", "permuted")),
            *grid(_sample, lengths=_LENGTHS, biased=[True]),
            *grid(_sample, lengths=_LENGTHS, window=(1, 70)),
            *grid(
                _sample,
                lengths=(*_LENGTHS[-2:], _MANY),
                heads=[(2, 1)],
                width=[(64, 64)],
                kind=(F32, F16),
                biased=(False, True),
                window=(0, 5),
            ),
            *(
                _sample(lengths, *shape, kind=kind)
                for lengths in (_LENGTHS[-1], _MANY)
                for shape in (*_SHAPES[1:], *_WIDE)
                for kind in (F32, F16)
            ),
            *grid(_sample, lengths=_LENGTHS[3:5], layout=("strided", "permuted"), kind=[F16]),
        ]
    ),
)
def packed_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q_start: np.ndarray,
    position_bias: np.ndarray | None = None, *, scale: float, window: int = 0,
) -> np.ndarray:  # fmt: skip
    """Softmax attention of each token to the tokens of its own sequence, with grouped heads.

    q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], all f32 or all f16 (H a multiple of Hkv; head h
    reads kv head h // (H / Hkv)); q_start [S + 1] i32 -> [T, H, Dv] f32. Sequence s has the rows
    q_start[s] to q_start[s + 1] - 1. Logits: q.k * scale, + position_bias [H, 2 R + 1] f32 as in
    `attention`. Above 0, ``window`` is the largest distance of a token that is attended to, on
    either side.

    Vaswani et al. 2017, eq. 1; Devlin et al. 2019 (bidirectional); packing: Effective Transformer
    (ByteDance 2019).
    """
    q, k, v = (rows.astype(np.float32, copy=False) for rows in (q, k, v))
    result = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    for first, end in pairwise(q_start.tolist()):
        keys, values = k[first:end], v[first:end]
        step = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, end - first)))
        for at in range(first, end, step):
            rows = slice(at, min(at + step, end))
            distance = np.arange(end - first) - np.arange(at - first, rows.stop - first)[:, None]
            bias = logit_bias(distance, None, position_bias)
            visible = np.abs(distance) <= (window or end)
            result[rows] = attend(q[rows], keys, values, visible, bias, scale=scale)
    return result


# -- what the op `attention` shares


def check_position_bias(q: Meta, bias: Meta | None) -> None:
    """Check that ``bias`` is None or [H, 2 R + 1] for q [T, H, D]."""
    if bias is not None:
        expect("position_bias", bias, 2, "f32")
        fits = bias.shape[0] == q.shape[1] and bias.inner[0] % 2 == 1
        require(fits, f"position_bias {bias.shape} for {q.shape[1]} heads")


def require_grouped_heads(q: Meta, k: Meta) -> None:
    """Check that equal numbers of the heads of q [T, H, D] share each head of k [*, Hkv, D]."""
    require(q.shape[2] == k.shape[2], f"queries of {q.shape[2]}, keys of {k.shape[2]}")
    heads, kv_heads = q.inner[0], k.inner[0]
    require(heads % kv_heads == 0, f"{heads} heads do not share {kv_heads} kv heads")


def logit_bias(
    distance: np.ndarray, slopes: np.ndarray | None, position_bias: np.ndarray | None
) -> np.ndarray | None:
    """Return what is added to the logits [n, H, J].

    ``distance`` [n, J]: position of the key minus that of the query.
    """
    found = None
    if slopes is not None:
        found = slopes[:, None] * distance[:, None].astype(np.float32)
    if position_bias is not None:
        reach = position_bias.shape[1] // 2
        by_head = position_bias[:, reach + np.clip(distance, -reach, reach)].swapaxes(0, 1)
        found = by_head if found is None else found + by_head
    return found


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray,
    bias: np.ndarray | None = None, sinks: np.ndarray | None = None, *, scale: float,
    softcap: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Attend with queries [n, H, D] of one sequence to its keys and values [J, Hkv, D].

    ``visible`` [n, J], or what broadcasts to it: which keys a query attends to. ``bias``: see
    `logit_bias`.
    """
    n, heads, width = q.shape
    shared = heads // keys.shape[1]
    result = np.empty((n, heads, values.shape[2]), np.float32)
    for g in range(keys.shape[1]):
        own = slice(g * shared, (g + 1) * shared)
        logits = q[:, own].reshape(n * shared, width) @ keys[:, g].T * np.float32(scale)
        if softcap:
            logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
        logits = logits.reshape(n, shared, -1)
        if bias is not None:
            logits = logits + bias[:, own]
        logits = np.where(visible[:, None], logits, np.float32(-np.inf))
        top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, sinks[own, None])
        top = np.where(np.isneginf(top), np.float32(0), top)  # no visible key
        weight = np.exp(logits - top)
        total = weight.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[own, None] - top)
        mixed = weight.reshape(n * shared, -1) @ values[:, g]
        total = np.where(total == 0, np.float32(1), total)
        result[:, own] = mixed.reshape(n, shared, -1) / total
    return result
