"""The end of a step: what it sampled becomes the input of the next one."""

from __future__ import annotations

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Sample, expect, grid, op, require

_TOKENS, _SEQUENCES = ("ids", "pos"), ("kv_len", "count", "done")


def _written(count):
    """ids, pos, kv_len, count, done, history, and the slots of every group."""
    return (2, 3, 4, 5, 6, 7, *range(8, count, 2))


def _infer(sampled, stop, ids, pos, kv_len, count, done, history, *groups, block):
    for name, x in (("sampled", sampled), ("stop", stop)):
        expect(name, x, 1, "i32")
    for name, x in zip((*_TOKENS, *_SEQUENCES), (ids, pos, kv_len, count, done), strict=True):
        expect(name, x, 1, "i32")
        rows = (ids if name in _TOKENS else kv_len).shape
        require(x.shape == rows, f"{name} {x.shape} does not fit {rows}")
    expect("history", history, 2, "i32")
    require(history.shape[0] == kv_len.shape[0], f"history {history.shape} for {kv_len.shape}")
    require(history.shape[1] > 0, "history has no columns")
    require(len(groups) % 2 == 0, f"{len(groups)} operands are not pairs of slot and table")
    require(block > 0, f"block is {block}, not above zero")
    for slot, table in zip(groups[::2], groups[1::2], strict=True):
        expect("slot", slot, 1, "i32")
        expect("table", table, 2, "i32")
        require(slot.shape == ids.shape, f"slot {slot.shape} does not fit ids {ids.shape}")
        require(table.shape[0] == kv_len.shape[0], f"table {table.shape} for kv_len {kv_len.shape}")
    return ids


def _cost(out, sampled, stop, ids, pos, kv_len, *rest, env, **_):
    groups = (len(rest) - 3) // 2
    words = kv_len.size * (10 + 2 * groups) + stop.size  # each read or written once
    return Cost(kv_len.size * (3 + 4 * groups), 4 * words)


_STOP, _WIDTH, _RING = 3, 4, 5


def _tokens(rng, shape):
    """Ids, and -1 for rows that `sample` had none for."""
    return rng.integers(-1, 6, shape)


def _stops(rng, shape):
    return np.array([4, -1, 2, -1])[: shape[0]]


def _flags(rng, shape):
    return np.arange(shape[0]) % 5 == 1


def _lengths(block):
    """Within a block, at its end, and past the table."""

    def make(rng, shape):
        known = np.array([0, block - 1, block, 2 * block + 1, _WIDTH * block, _WIDTH * block - 1])
        return known[np.arange(shape[0]) % len(known)]

    return make


def _table(rng, shape):
    table = rng.permutation(shape[0] * shape[1]).reshape(shape)
    table[:, -1] = -1
    return table


def _sample(rows, spare, block, groups):
    t, s = ("T",), ("S",)
    states = [Arg(t, I32, leaf="state"), Arg(t, I32, leaf="state")]
    states += [Arg(s, I32, leaf="state", make=_lengths(block)), Arg(s, I32, leaf="state")]
    states += [Arg(s, I32, leaf="state", make=_flags), Arg(("S", _RING), I32, leaf="state")]
    for _ in range(groups):
        states += [Arg(t, I32, leaf="state"), Arg(("S", _WIDTH), I32, make=_table)]
    first = (Arg(("N",), I32, make=_tokens), Arg((_STOP,), I32, make=_stops))
    env = {"N": rows, "S": rows, "T": rows + spare}
    return Sample((*first, *states), {"block": block}, env)


@op(
    "advance",
    infer=_infer,
    cost=_cost,
    tol={},
    writes=_written,
    samples=grid(_sample, rows=(0, 1, 7), spare=(0, 5), block=(1, 8), groups=(0, 1, 2)),
)
def advance(sampled, stop, ids, pos, kv_len, count, done, history, *groups, block):
    """Make each sequence's sampled id the next step's token, all in place.

    sampled [N >= S], stop [E] (entries below zero are padding); state: ids, pos [T >= S], kv_len,
    count, done [S], history [S, W] (a ring of the last ids, see `penalise`); then for each cache
    group slot [T] and table [S, B]; all i32. Token s of the next step belongs to sequence s and
    stands at p = kv_len[s], in column p % W of its history, and in slot table[s, p // block] *
    block + p % block, or -1 (stored nowhere) where the table has no such block. An id of -1, which
    `sample` gives where it can choose none, is stored as it is and ends nothing.
    """
    live = len(kv_len)
    chosen, p = sampled[:live], kv_len.copy()
    ids[:live], pos[:live] = chosen, p
    history[np.arange(live), p % history.shape[1]] = chosen
    done |= (np.isin(chosen, stop) & (chosen >= 0)).astype(np.int32)
    for slot, table in zip(groups[::2], groups[1::2], strict=True):
        column = np.minimum(p // block, table.shape[1] - 1)
        entry = table[np.arange(live), column]
        known = (p // block < table.shape[1]) & (entry >= 0)
        slot[:live] = np.where(known, entry * block + p % block, -1)
    kv_len += 1
    count += 1
