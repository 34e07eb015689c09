"""Attention over a paged cache of keys and values, and the op that fills the cache.

A step carries T tokens of S sequences without padding; see `attention` for the operands' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ..formats import Q8_0
from ..formats.activations import ACT_TINY
from ..formats.quantization import Blocks, quantise
from ..graph.dtype import CACHED, F16, F32, I32, DType
from ..graph.op import ATTENTION, Arg, Cost, Sample, expect, grid, op, out, require

_SCORES = 16 << 20  # bytes of scores that live at one time
_NAN = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)

# --------------------------------------------------------------------------------------- kv_write


def _write_infer(pool, x, slot):
    expect("pool", pool, 3, *CACHED)
    expect("x", x, 3, "f32")
    expect("slot", slot, 1, "i32")
    require(x.inner == pool.inner, f"rows {x.inner} do not fit the pool's {pool.inner}")
    require(slot.shape[0] == x.shape[0], f"slot {slot.shape} does not fit {x.shape[0]} rows")
    return pool


def _write_cost(out, pool, x, slot, *, env):
    return Cost(0, x.nbytes + slot.nbytes + x.size // pool.dtype.block * pool.dtype.nbytes)


def _extremes(rng, shape):
    """Blocks of 32 of every kind: huge, tiny, subnormal, zero, with infinity, with NaN, and halves
    between two steps."""
    sizes = np.array([1.0, 1e30, 1e-30, 1e-40, 0.0, 1.0, 1.0, 127.0])
    x = rng.uniform(-1, 1, (*shape[:-1], shape[-1] // 32, 32))
    which = np.arange(x[..., 0].size).reshape(x.shape[:-1]) % len(sizes)
    x *= sizes[which, None]
    x[which == 5, 3], x[which == 6, 31] = -np.inf, np.nan
    x[which == 7] = np.append(np.arange(31) - 15.5, 127)
    return x.reshape(shape)


def _write_sample(rows, inner, kind, layout, values=None):
    slots = 24

    def free(rng, shape):
        slot = rng.permutation(slots)[: shape[0]]
        slot[2::3] = -1
        return slot

    pool = Arg((slots, *inner), kind, leaf="state")
    args = (pool, Arg(("T", *inner), layout=layout, make=values), Arg(("T",), I32, make=free))
    return Sample(args, {}, {"T": rows})


@op(
    "kv_write",
    infer=_write_infer,
    cost=_write_cost,
    tol={},
    writes=lambda count: (0,),
    samples=[
        *grid(
            _write_sample,
            rows=(0, 1, 7),
            inner=((1, 1), (3, 20), (2, 64)),
            kind=(F32, F16),
            layout=("contiguous", "strided"),
        ),
        *grid(
            _write_sample,
            rows=(0, 1, 7),
            inner=((1, 32), (2, 96)),
            kind=(Q8_0,),
            layout=("contiguous", "strided"),
            values=(None, _extremes),
        ),
    ],
)
def kv_write(pool, x, slot):
    """Store rows in the pool: pool[slot[t]] = x[t], rounded to its dtype.

    pool [slots, H, D] f32, f16 or q8_0 (written in place, and the result), x [T, H, D], slot [T]
    i32. A slot below zero writes nothing; no two slots of one call are equal. q8_0 (D in whole
    blocks): as `quantise`, where all of a block is below 2**-100 zero, and where any of it is NaN
    or infinite a scale of NaN.
    """
    keep = slot >= 0
    if isinstance(pool, Blocks):
        rows = _quantised(x[keep].reshape(-1, pool.elements), pool.dtype)
        pool.raw[slot[keep]] = rows.reshape(-1, *pool.raw.shape[1:])
        return
    with np.errstate(over="ignore"):  # beyond f16 a value becomes infinite
        pool[slot[keep]] = x[keep].astype(pool.dtype)


def _quantised(x: np.ndarray, kind: DType) -> np.ndarray:
    """Rows of any floats in blocks, uint8 [rows, row_bytes]."""
    blocks = x.reshape(-1, kind.block)
    size = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    fine = np.isfinite(size)  # NaN is a maximum, too
    with np.errstate(over="ignore"):  # a scale beyond f16 becomes infinite
        raw = quantise(np.where(fine & (size >= ACT_TINY), blocks, np.float32(0)), kind)
    raw[~fine[:, 0], :2] = _NAN
    return raw.reshape(len(x), kind.row_nbytes(x.shape[1]))


# -------------------------------------------------------------------------------------- attention


def _infer(
    q, k, v, q_start, kv_len, table, sinks=None, slopes=None, prefix_len=None,
    *, scale, block, causal, window, softcap,
):  # fmt: skip
    for name, pool in (("k", k), ("v", v)):
        expect(name, pool, 3, *CACHED)
        require(pool.inner_contiguous, f"{name}'s heads lie apart: a slice must leave rows whole")
    expect("q", q, 3, "f32")
    expect("q_start", q_start, 1, "i32")
    expect("kv_len", kv_len, 1, "i32")
    expect("table", table, 2, "i32")
    require(k.shape[:2] == v.shape[:2], f"k {k.shape} and v {v.shape} differ in slots or heads")
    require(q.shape[2] == k.shape[2], f"queries of {q.shape[2]}, keys of {k.shape[2]}")
    require(q.shape[1] % k.shape[1] == 0, f"{q.shape[1]} heads do not share {k.shape[1]} kv heads")
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
    return out((*q.shape[:2], v.shape[2]))


def _cost(out, q, k, v, q_start, kv_len, table, *rest, env, block, window, **_):
    """``env["kv_sum"]``: keys at or before each query, summed over all queries.

    Without it, a step of one token a sequence is priced at a full table, and a longer one as a
    prompt from its beginning. Keys are read once a sequence, whatever the count of queries. Of
    several sequences each is taken to be as long as their mean.
    """
    tokens, sequences = q.shape[0], max(1, kv_len.shape[0])
    each = tokens / sequences
    seen = env.get("kv_sum")
    if seen is None:
        seen = tokens * (table.shape[1] * block if each <= 1 else (each + 1) / 2)
    start = max(0, seen / tokens - (each + 1) / 2) if tokens else 0  # cached before the step
    pairs, keys = _visible_pairs(start, each, window)
    pools = (k, v) if v.contiguous else (k,)  # else v is a part of k
    row = sum(prod(pool.inner) // pool.dtype.block * pool.dtype.nbytes for pool in pools)
    small = sum(m.nbytes for m in (q_start, kv_len, table, *rest) if m is not None)
    flops = 2 * pairs * sequences * q.shape[1] * (q.shape[2] + v.shape[2])
    return Cost(flops, q.nbytes + out.nbytes + keys * sequences * row + small)


def _visible_pairs(start, count, window):
    """(query and key pairs, keys) of ``count`` queries after ``start`` tokens: each query sees the
    keys up to itself, of these the last ``window`` unless it is 0."""
    if not window:
        return count * start + count * (count + 1) / 2, count and start + count
    short = min(count, max(0, window - start))  # queries that see fewer keys, or just so many
    pairs = short * start + short * (short + 1) / 2 + (count - short) * window
    return pairs, count and min(start, window - 1) + count


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch, for samples and benchmarks: ``queries`` and total ``lengths`` by sequence.

    Blocks of ``block`` tokens lie shuffled over a pool of ``slots``; a table is ``width`` wide.
    With ``forget`` > 0 a table no longer names the blocks that a window of that size has left.
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
        """Alternately none, part and all of a sequence."""
        return np.array([n * (s % 3) // 2 for s, n in enumerate(self.lengths, 1)], np.int32)


_BATCHES = (
    PackedBatch((), ()),
    PackedBatch((1,), (1,)),
    PackedBatch((1,), (77,)),
    PackedBatch((19,), (19,)),
    PackedBatch((5,), (33,)),
    PackedBatch((1, 1, 1), (3, 70, 16)),
    PackedBatch((1, 9, 4, 20), (40, 9, 64, 21)),
)
# Longer than any one piece that a kernel may split the keys or the queries into.
_LONG = PackedBatch((1, 1, 3, 70), (700, 513, 300, 200), block=16, slots=1760, width=44)
_FEW = PackedBatch((1, 2, 1), (700, 513, 90), block=16, slots=1760, width=44)  # a piece is an item


_FAR: tuple[tuple[dict[str, float], tuple[str, ...]], ...] = (
    ({}, ()),
    ({"window": 300}, ("sinks",)),
    ({"window": 13}, ("slopes",)),
)


def _slopes(rng, shape):
    return 2.0 ** -np.linspace(1, 8, shape[0])


def _sample(
    batch, heads=(4, 2), width=(32, 32), kind=F32, layout="contiguous", attrs=(), extras=(),
    values="contiguous",
):  # fmt: skip
    layouts = zip(width, ("contiguous", values))
    pools = [Arg((batch.slots, heads[1], w), kind, how, leaf="state") for w, how in layouts]
    optional = (
        Arg(heads[:1], leaf="weight") if "sinks" in extras else None,
        Arg(heads[:1], leaf="weight", make=_slopes) if "slopes" in extras else None,
        Arg(("S",), I32, make=batch.prefix_len) if "prefix" in extras else None,
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


_KINDS = (F32, F16, Q8_0)
_SHAPES = (((1, 1), (1, 1)), ((3, 3), (20, 20)), ((6, 2), (64, 64)), ((8, 1), (80, 48)))
_BLOCK_SHAPES = (((1, 1), (32, 32)), ((6, 2), (64, 96)), ((7, 1), (128, 32)), ((8, 4), (96, 96)))
_WIDE = (((2, 1), (576, 512)), ((4, 2), (320, 288)))
_LATENT = (((16, 1), (576, 512)), ((5, 1), (96, 32)))  # whose values are a part of the keys' rows
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
)


def _made(batch, kind, shape=((4, 2), (32, 32)), feature=({}, ()), values="contiguous"):
    (heads, width), (attrs, extras) = shape, feature
    return _sample(batch, heads, width, kind, "contiguous", attrs.items(), extras, values)


@op(
    "attention",
    infer=_infer,
    cost=_cost,
    arithmetic=ATTENTION,
    tol={"f32": 1e-5},
    samples=[
        *grid(_made, batch=_BATCHES, shape=_SHAPES, kind=(F32, F16)),
        *grid(_made, batch=_BATCHES[-2:], feature=_FEATURES, kind=(F32, F16)),
        *grid(_made, batch=[_LONG], feature=(({}, ()), *_FEATURES), kind=_KINDS),
        *grid(_made, batch=[_FEW], feature=_FAR, kind=_KINDS),
        *grid(_made, batch=_BATCHES, shape=_BLOCK_SHAPES, kind=(Q8_0,)),
        *grid(_made, batch=_BATCHES, shape=_LATENT, kind=_KINDS, values=["leading"]),
        *grid(
            _made, batch=[_FEW], shape=_LATENT[:1], feature=_FAR, kind=_KINDS, values=["leading"]
        ),
        *grid(_made, batch=_BATCHES[-2:], shape=_WIDE, kind=_KINDS),
        *grid(_sample, batch=_BATCHES[3:], layout=("strided", "permuted")),
        *grid(
            _sample, batch=[PackedBatch((1, 9), (60, 21), block=b, width=60) for b in (1, 3, 64)]
        ),
        _sample(PackedBatch((2, 1, 7), (60, 64, 70), forget=13), attrs=(("window", 13),)),
        _sample(PackedBatch((0, 3, 0), (5, 9, 0))),
    ],
)
def attention(
    q, k, v, q_start, kv_len, table, sinks=None, slopes=None, prefix_len=None,
    *, scale, block, causal=True, window=0, softcap=0.0,
):  # fmt: skip
    """Softmax attention of packed queries over paged keys and values, heads in groups.

    q [T, H, D] f32; k [slots, Hkv, D], v [slots, Hkv, Dv] f32, f16 or q8_0 (H a multiple of Hkv;
    head h reads kv head h // (H / Hkv)); q_start [S + 1], kv_len [S], table [S, B] i32 ->
    [T, H, Dv] f32. With one kv head, v may be the first Dv columns of k: a view of its pool.

    Sequence s owns the queries q_start[s]..q_start[s+1], the last of its kv_len[s] tokens; its key
    j is pool row table[s, j // block] * block + j % block. With p the query's position, it sees the
    keys j < kv_len, when causal j <= p (or both below prefix_len[s]), with a window p - j < window.
    Logits: q.k * scale, softcap * tanh(. / softcap) where softcap > 0, then + slopes[h] * (j - p).
    sinks [H] adds exp(sinks[h]) to the denominator. A query that sees nothing gives zeros.

    Vaswani et al. 2017, eq. 1; grouped heads: Ainslie et al. 2023; paging: Kwon et al. 2023;
    slopes: Press et al. 2021; softcap: Gemma Team 2024; sinks: OpenAI 2025 (gpt-oss).
    """
    result = np.zeros((*q.shape[:2], v.shape[2]), np.float32)
    for s in range(len(kv_len)):
        first, last, length = int(q_start[s]), int(q_start[s + 1]), int(kv_len[s])
        if last == first:
            continue
        prefix = int(prefix_len[s]) if prefix_len is not None else 0
        start = length - (last - first)
        low = max(0, start - window + 1) if window else 0  # older blocks may be gone
        j = np.arange(low, length)
        rows = table[s, j // block] * block + j % block
        keys, values = (_floats(pool[rows]) for pool in (k, v))  # [J, Hkv, D]
        step = max(1, _SCORES // (4 * q.shape[1] * max(1, len(j))))
        for at in range(first, last, step):
            end = min(at + step, last)
            p = np.arange(at, end)[:, None] - first + start
            seen = _visible(p, j, causal, window, prefix)
            bias = (j - p).astype(np.float32) if slopes is not None else None
            result[at:end] = _piece(
                q[at:end], keys, values, seen, bias, sinks, slopes, scale, softcap
            )
    return result


def _floats(rows):
    """Rows of a pool as float32 [J, heads, width]."""
    if isinstance(rows, Blocks):
        return rows.dequantise()
    return rows.astype(np.float32)


def _visible(p, j, causal, window, prefix):
    """Which keys j [J] the queries at p [n, 1] see, bool [n, J]."""
    seen = np.ones((len(p), len(j)), bool)
    if causal:
        seen = (j <= p) | ((j < prefix) & (p < prefix))
    return seen & (p - j < window) if window else seen


def _piece(q, keys, values, seen, bias, sinks, slopes, scale, softcap):
    """Some queries [n, H, D] of one sequence against its keys and values [J, Hkv, D]."""
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
            logits = logits + slopes[own, None] * bias[:, None]
        logits = np.where(seen[:, None], logits, np.float32(-np.inf))
        top = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, sinks[own, None])
        top = np.where(np.isneginf(top), np.float32(0), top)  # it sees nothing
        weight = np.exp(logits - top)
        total = weight.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[own, None] - top)
        mixed = weight.reshape(n * shared, -1) @ values[:, g]
        total = np.where(total == 0, np.float32(1), total)
        result[:, own] = mixed.reshape(n, shared, -1) / total
    return result
