"""Bidirectional attention over packed sequences, without a KV cache."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..graph.dtype import I32
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
from .attention import SCORE_BYTES, attend, require_grouped_heads


def _infer(q: Meta, k: Meta, v: Meta, q_start: Meta, *, scale: float) -> Meta:
    for name, rows in (("q", q), ("k", k), ("v", v)):
        expect(name, rows, 3, "f32")
        require(rows.shape[0] == q.shape[0], f"{name} has {rows.shape[0]} tokens, q {q.shape[0]}")
    expect("q_start", q_start, 1, "i32")
    require(k.shape[1] == v.shape[1], f"k {k.shape} and v {v.shape} differ in heads")
    require_grouped_heads(q, k)
    return out((*q.shape[:2], v.shape[2]))


def _cost(out: Meta, q: Meta, k: Meta, v: Meta, q_start: Meta, *, env: Env, scale: float) -> Cost:
    """Cost from ``env["kv_sum"]``: number of keys that each query attends to, summed over queries.

    Without it, the sequences are assumed to have equal lengths.
    """
    sequences = max(1, q_start.dims[0] - 1)
    pairs: float = env.get("kv_sum", q.dims[0] ** 2 / sequences)
    moved = sum(m.nbytes for m in (q, k, v, q_start, out))
    return Cost(2 * pairs * q.dims[1] * (q.dims[2] + v.dims[2]), moved)


def _sample(
    lengths: tuple[int, ...], heads: tuple[int, int] = (4, 2), width: tuple[int, int] = (32, 32),
    layout: str = "contiguous",
) -> Sample:  # fmt: skip
    def q_start(rng: Rng, shape: Shape) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)])

    counts = (heads[0], heads[1], heads[1])
    depths = (width[0], width[0], width[1])
    rows = (
        Arg(("T", count, depth), layout=layout) for count, depth in zip(counts, depths, strict=True)
    )
    env = {"T": sum(lengths), "Q": len(lengths) + 1}
    return Sample((*rows, Arg(("Q",), I32, make=q_start)), {"scale": width[0] ** -0.5}, env)


# Fewer and more tokens than a kernel splits, and sequences longer than a tile or a split.
_LENGTHS = ((), (1,), (17,), (3, 0, 1), (1, 9, 4, 20), (5, 300, 2, 75))
_SHAPES = (((1, 1), (1, 1)), ((3, 3), (20, 20)), ((6, 2), (64, 64)), ((12, 12), (32, 48)))


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
        ]
    ),
)
def packed_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, q_start: np.ndarray, *, scale: float
) -> np.ndarray:
    """Softmax attention of each token to all tokens of its own sequence, with grouped heads.

    q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] f32 (H a multiple of Hkv; head h reads kv head
    h // (H / Hkv)); q_start [S + 1] i32 -> [T, H, Dv] f32. Sequence s has the rows q_start[s] to
    q_start[s + 1] - 1. Logits: q.k * scale.

    Vaswani et al. 2017, eq. 1; Devlin et al. 2019 (bidirectional); packing: Effective Transformer
    (ByteDance 2019).
    """
    result = np.empty((*q.shape[:2], v.shape[2]), np.float32)
    for first, end in pairwise(q_start.tolist()):
        keys, values = k[first:end], v[first:end]
        every = np.ones((1, end - first), np.bool_)
        step = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, end - first)))
        for at in range(first, end, step):
            rows = slice(at, min(at + step, end))
            result[rows] = attend(q[rows], keys, values, every, scale=scale)
    return result
