"""Attention over a paged KV cache.

A step has T tokens of S sequences without padding; see `attention` for the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats.legacy import Q4_0, Q8_0
from ..formats.quantization import Blocks
from ..formats.row_format import FP8
from ..graph.dtype import CACHED, F16, F32, I32, DType
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
from .kv_cache import row_nbytes
from .packed_attention import (
    SCORE_BYTES,
    attend,
    check_position_bias,
    logit_bias,
    require_grouped_heads,
)

# -------------------------------------------------------------------------------------- attention


def _infer(
    q: Meta, k: Meta, v: Meta, q_start: Meta, kv_len: Meta, table: Meta, sinks: Meta | None = None,
    slopes: Meta | None = None, prefix_len: Meta | None = None, position_bias: Meta | None = None,
    *, scale: float, block: int, causal: bool, window: int, softcap: float, skip_prefix: bool,
) -> Meta:  # fmt: skip
    for name, pool in (("k", k), ("v", v)):
        expect(name, pool, 3, *CACHED)
        require(pool.inner_contiguous, f"{name}'s heads lie apart: a slice must leave rows whole")
    expect("q", q, 3, "f32")
    expect("q_start", q_start, 1, "i32")
    expect("kv_len", kv_len, 1, "i32")
    expect("table", table, 2, "i32")
    require(k.shape[:2] == v.shape[:2], f"k {k.shape} and v {v.shape} differ in slots or heads")
    require_grouped_heads(q, k)
    require(table.shape[0] == kv_len.shape[0], f"table {table.shape} for kv_len {kv_len.shape}")
    require(block > 0, f"block is {block}, not above zero")
    require(window >= 0 and softcap >= 0, f"window {window} or softcap {softcap} is below zero")
    for name, head in (("sinks", sinks), ("slopes", slopes)):
        if head is not None:
            expect(name, head, 1, "f32")
            require(head.shape[0] == q.shape[1], f"{name} {head.shape} for {q.shape[1]} heads")
    if prefix_len is not None:
        expect("prefix_len", prefix_len, 1, "i32")
        require(prefix_len.shape == kv_len.shape, f"prefix_len {prefix_len.shape} for {kv_len}")
    require(not skip_prefix or prefix_len is not None, "skip_prefix needs prefix_len")
    check_position_bias(q, position_bias)
    return out((*q.shape[:2], v.shape[2]))


def _cost(
    out: Meta, q: Meta, k: Meta, v: Meta, q_start: Meta, kv_len: Meta, table: Meta,
    *rest: Meta | None, env: Env, block: int, window: int, causal: bool, skip_prefix: bool,
    **_: Any,
) -> Cost:  # fmt: skip
    """Cost from ``env["kv_sum"]``: number of keys at or before each query, summed over queries.

    Of these, ``env["prefix_sum"]`` are in the prefix of the query's sequence: the only ones of
    cross-attention (not ``causal``), and none with ``skip_prefix``.

    Without it, a step with one token per sequence is assumed to have a full table, and a longer one
    to be a prompt from its first token. Keys are read once per sequence, whatever the number of
    queries. Several sequences are assumed to have equal lengths.
    """
    tokens, sequences = q.dims[0], max(1, kv_len.dims[0])
    each = tokens / sequences
    assumed = tokens * (table.dims[1] * block if each <= 1 else (each + 1) / 2)
    visible: float = env.get("kv_sum", assumed)
    prefix: float = env.get("prefix_sum", 0)
    if prefix and tokens and not causal:
        pairs, keys = prefix / sequences, prefix / tokens
    else:
        visible -= prefix if skip_prefix else 0
        start = max(0, visible / tokens - (each + 1) / 2) if tokens else 0  # cached tokens before
        pairs, keys = _visible_pairs(start, each, window)
    pools = (k, v) if v.contiguous else (k,)  # otherwise v is a slice of k
    row = sum(map(row_nbytes, pools))
    small = sum(m.nbytes for m in (q_start, kv_len, table, *rest) if m is not None)
    flops = 2 * pairs * sequences * q.dims[1] * (q.dims[2] + v.dims[2])
    return Cost(flops, q.nbytes + out.nbytes + keys * sequences * row + small)


def _visible_pairs(start: float, count: float, window: int) -> tuple[float, float]:
    """Return (query-key pairs, keys) of ``count`` queries after ``start`` cached tokens.

    Each query attends to the keys up to its own, of these only the last ``window`` unless it is 0.
    """
    if not window:
        return count * start + count * (count + 1) / 2, count and start + count
    short = min(count, max(0, window - start))  # queries with at most ``window`` keys
    pairs = short * start + short * (short + 1) / 2 + (count - short) * window
    return pairs, count and min(start, window - 1) + count


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch, for samples and benchmarks.

    Attributes:
        queries: number of queries of each sequence.
        lengths: total length of each sequence, cached tokens included.
        block: tokens per block; blocks are shuffled over the pool.
        slots: tokens in the pool.
        width: columns of the block table.
        forget: if not 0, the window size for which evicted blocks are missing from the table.
    """

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    block: int = 8
    slots: int = 192
    width: int = 12
    forget: int = 0

    @property
    def env(self) -> dict[str, int]:
        count = len(self.queries)
        return {"T": sum(self.queries), "S": count, "Q": count + 1}

    def q_start(self, rng: object, shape: Sequence[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)

    def kv_len(self, rng: object, shape: Sequence[int]) -> np.ndarray:
        return np.array(self.lengths, np.int32)

    def table(self, rng: object, shape: Sequence[int]) -> np.ndarray:
        free = list(np.random.default_rng(7).permutation(self.slots // self.block))
        table = np.full((len(self.lengths), self.width), -1, np.int32)
        for s, (count, length) in enumerate(zip(self.queries, self.lengths, strict=True)):
            oldest = max(0, length - count - self.forget + 1) if self.forget else 0
            for b in range(oldest // self.block, -(-length // self.block)):
                table[s, b] = free.pop()
        return table

    def prefix_len(self, rng: object, shape: Sequence[int]) -> np.ndarray:
        """Return prefix lengths of none, half and all of a sequence in turn."""
        return np.array([n * (s % 3) // 2 for s, n in enumerate(self.lengths, 1)], np.int32)

    def source_len(self, rng: object, shape: Sequence[int]) -> np.ndarray:
        """Return lengths of none, half and all of the tokens before the queries in turn."""
        before = [n - count for n, count in zip(self.lengths, self.queries, strict=True)]
        return np.array([n * (s % 3) // 2 for s, n in enumerate(before, 1)], np.int32)


_BATCHES = (
    PackedBatch((), ()),
    PackedBatch((1,), (1,)),
    PackedBatch((1,), (77,)),
    PackedBatch((19,), (19,)),
    PackedBatch((5,), (33,)),
    PackedBatch((1, 1, 1), (3, 70, 16)),
    PackedBatch((1, 9, 4, 20), (40, 9, 64, 21)),
)
# Longer than any split of the keys or tile of the queries in a kernel.
_LONG = PackedBatch((1, 1, 3, 70), (700, 513, 300, 200), block=16, slots=1760, width=44)
_FEW = PackedBatch((1, 2, 1), (700, 513, 90), block=16, slots=1760, width=44)


_LONG_FEATURES: tuple[tuple[dict[str, float], tuple[str, ...]], ...] = (
    ({}, ()),
    ({"window": 300}, ("sinks",)),
    ({"window": 13}, ("slopes",)),
)


def _slopes(rng: Rng, shape: Shape) -> np.ndarray:
    return 2.0 ** -np.linspace(1, 8, shape[0])


def _sample(
    batch: PackedBatch, heads: tuple[int, int] = (4, 2), width: tuple[int, int] = (32, 32),
    kind: DType = F32, layout: str = "contiguous", attrs: Any = (), extras: Sequence[str] = (),
    values: str = "contiguous",
) -> Sample:  # fmt: skip
    layouts = zip(width, ("contiguous", values))
    pools = [Arg((batch.slots, heads[1], w), kind, how, leaf="state") for w, how in layouts]
    optional = (
        Arg(heads[:1], leaf="weight") if "sinks" in extras else None,
        Arg(heads[:1], leaf="weight", make=_slopes) if "slopes" in extras else None,
        _prefix_arg(batch, extras),
        Arg((heads[0], 9), leaf="weight") if "position_bias" in extras else None,
    )
    args = (
        Arg(("T", heads[0], width[0]), layout=layout),
        *pools,
        Arg(("Q",), I32, make=batch.q_start),
        Arg(("S",), I32, make=batch.kv_len),
        Arg(("S", batch.width), I32, make=batch.table),
        *optional,
    )
    fixed = {"scale": width[0] ** -0.5, "block": batch.block}
    return Sample(args, {**fixed, **dict(attrs)}, batch.env)


def _prefix_arg(batch: PackedBatch, extras: Sequence[str]) -> Arg | None:
    """Return the lengths of prefixes, or of sources, behind which all queries are."""
    make = {"prefix": batch.prefix_len, "source": batch.source_len}
    found = [make[name] for name in make if name in extras]
    return Arg(("S",), I32, make=found[0]) if found else None


_KINDS = (F32, F16, Q8_0)
_SHAPES = (((1, 1), (1, 1)), ((3, 3), (20, 20)), ((6, 2), (64, 64)), ((8, 1), (80, 48)))
_BLOCK_SHAPES = (((1, 1), (32, 32)), ((6, 2), (64, 96)), ((7, 1), (128, 32)), ((8, 4), (96, 96)))
_WIDE = (((2, 1), (576, 512)), ((4, 2), (320, 288)))
_MLA = (((16, 1), (576, 512)), ((5, 1), (96, 32)))  # values are a slice of the keys' rows
_FEATURES: tuple[tuple[dict[str, float], tuple[str, ...]], ...] = (
    ({"causal": False}, ()),
    ({"window": 1}, ()),
    ({"window": 13}, ()),
    ({"softcap": 2.0}, ()),
    ({}, ("sinks",)),
    ({}, ("slopes",)),
    ({}, ("prefix",)),
    ({"window": 13, "softcap": 2.0}, ("sinks", "slopes")),
    ({"window": 13}, ("prefix",)),
    ({"causal": False, "window": 9}, ("sinks",)),
    ({}, ("position_bias",)),
    ({"skip_prefix": True}, ("source", "position_bias")),
)


def _made(
    batch: PackedBatch, kind: DType, shape: Any = ((4, 2), (32, 32)), feature: Any = ({}, ()),
    values: str = "contiguous",
) -> Sample:  # fmt: skip
    (heads, width), (attrs, extras) = shape, feature
    return _sample(batch, heads, width, kind, "contiguous", attrs.items(), extras, values)


@op(
    "attention",
    infer=_infer,
    cost=_cost,
    arithmetic=ATTENTION,
    tol={"f32": 1e-5},
    samples=Samples(
        lambda: [
            *grid(_made, batch=_BATCHES, shape=_SHAPES, kind=(F32, F16)),
            *grid(_made, batch=_BATCHES[-2:], feature=_FEATURES, kind=(F32, F16)),
            *grid(_made, batch=[_LONG], feature=(({}, ()), *_FEATURES), kind=_KINDS),
            *grid(_made, batch=[_FEW], feature=_LONG_FEATURES, kind=_KINDS),
            *grid(_made, batch=_BATCHES, shape=_BLOCK_SHAPES, kind=(Q8_0,)),
            *grid(_made, batch=_BATCHES[-3:], shape=_BLOCK_SHAPES, kind=(Q4_0, FP8)),
            *grid(_made, batch=[_FEW], feature=_LONG_FEATURES, kind=(Q4_0, FP8)),
            *grid(_made, batch=_BATCHES, shape=_MLA, kind=_KINDS, values=["leading"]),
            *grid(
                _made,
                batch=[_FEW],
                shape=_MLA[:1],
                feature=_LONG_FEATURES,
                kind=_KINDS,
                values=["leading"],
            ),
            *grid(_made, batch=_BATCHES[-2:], shape=_WIDE, kind=_KINDS),
            *grid(_sample, batch=_BATCHES[3:], layout=("strided", "permuted")),
            *grid(
                _sample,
                batch=[PackedBatch((1, 9), (60, 21), block=b, width=60) for b in (1, 3, 64)],
            ),
            _sample(PackedBatch((2, 1, 7), (60, 64, 70), forget=13), attrs=(("window", 13),)),
            _sample(PackedBatch((0, 3, 0), (5, 9, 0))),
            _sample(PackedBatch((4, 1, 9), (2, 7, 1)), attrs=(("causal", False),)),
        ]
    ),
)
def attention(
    q: np.ndarray, k: Any, v: Any, q_start: np.ndarray, kv_len: np.ndarray, table: np.ndarray,
    sinks: np.ndarray | None = None, slopes: np.ndarray | None = None,
    prefix_len: np.ndarray | None = None, position_bias: np.ndarray | None = None, *, scale: float,
    block: int, causal: bool = True, window: int = 0, softcap: float = 0.0,
    skip_prefix: bool = False,
) -> np.ndarray:  # fmt: skip
    """Softmax attention of packed queries over paged keys and values, with grouped heads.

    q [T, H, D] f32; k [slots, Hkv, D], v [slots, Hkv, Dv] f32, f16, q8_0, q4_0 or fp8 (H a multiple
    of Hkv; head h reads kv head h // (H / Hkv)); q_start [S + 1], kv_len [S], table [S, B] i32 ->
    [T, H, Dv] f32. With one kv head, v may be a view of the first Dv columns of k's pool, but not
    in fp8.

    Sequence s owns the queries q_start[s]..q_start[s+1], the last of its kv_len[s] tokens. Its key
    j is pool row table[s, j // block] * block + j % block. The query at position p attends to keys
    j < kv_len; if causal, to j <= p (or both below prefix_len[s]); with a window, p - j < window.
    Logits: q.k * scale, softcap * tanh(. / softcap) where softcap > 0, then + slopes[h] * (j - p).
    sinks [H] adds exp(sinks[h]) to the denominator. A query that sees nothing gives zeros.
    position_bias [H, 2 R + 1] f32 adds position_bias[h, R + clip(j - p, -R, R)] to the logits. If
    skip_prefix, the keys j < prefix_len[s] are not attended to, and no query is at such a position.
    If neither causal nor with a window, a sequence may have more queries than keys.

    Vaswani et al. 2017, eq. 1; grouped heads: Ainslie et al. 2023; paging: Kwon et al. 2023;
    slopes: Press et al. 2021; softcap: Gemma Team 2024; sinks: OpenAI 2025 (gpt-oss);
    position_bias: Raffel et al. 2020 (T5).
    """
    result = np.zeros((*q.shape[:2], v.shape[2]), np.float32)
    for s in range(len(kv_len)):
        first, last, length = int(q_start[s]), int(q_start[s + 1]), int(kv_len[s])
        if last == first:
            continue
        prefix = int(prefix_len[s]) if prefix_len is not None else 0
        start = length - (last - first)
        low = max(0, start - window + 1) if window else 0  # older blocks may have been evicted
        j = np.arange(low, length)
        rows = table[s, j // block] * block + j % block
        keys, values = (_floats(pool[rows]) for pool in (k, v))  # [J, Hkv, D]
        step = max(1, SCORE_BYTES // (4 * q.shape[1] * max(1, len(j))))
        for at in range(first, last, step):
            end = min(at + step, last)
            p = np.arange(at, end)[:, None] - first + start
            visible = _visible_mask(p, j, causal, window, prefix, skip_prefix)
            bias = logit_bias(j - p, slopes, position_bias)
            result[at:end] = attend(
                q[at:end], keys, values, visible, bias, sinks, scale=scale, softcap=softcap
            )
    return result


def _floats(rows: Any) -> np.ndarray:
    """Return rows of a pool as float32 [J, heads, width]."""
    if isinstance(rows, Blocks):
        return rows.dequantise()
    return rows.astype(np.float32)


def _visible_mask(
    p: np.ndarray, j: np.ndarray, causal: bool, window: int, prefix: int, skip_prefix: bool
) -> np.ndarray:
    """Return the mask [n, J] of the keys j [J] that queries at positions p [n, 1] attend to."""
    visible = np.ones((len(p), len(j)), bool)
    if causal:
        visible = (j <= p) | ((j < prefix) & (p < prefix))
    if skip_prefix:
        visible = visible & (j >= prefix)
    return visible & (p - j < window) if window else visible
