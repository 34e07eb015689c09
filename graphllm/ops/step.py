"""End of a decode step: the sampled ids become the input of the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..graph.dtype import I32
from ..graph.op import Arg, Cost, Maker, Rng, Sample, Shape, expect, grid, op, require
from ..graph.tensor import Env, Meta

_TOKENS, _SEQUENCES = ("ids", "pos"), ("kv_len", "count")


def _written(count: int) -> tuple[int, ...]:
    """Return the indices of ids, pos, kv_len, count, history and every group's slots."""
    return (*range(1, 6), *range(6, count, 2))


def _infer(
    sampled: Meta, ids: Meta, pos: Meta, kv_len: Meta, count: Meta, history: Meta, *groups: Meta,
    block: int,
) -> Meta:  # fmt: skip
    expect("sampled", sampled, 1, "i32")
    for name, x in zip((*_TOKENS, *_SEQUENCES), (ids, pos, kv_len, count), strict=True):
        expect(name, x, 1, "i32")
        rows = (ids if name in _TOKENS else kv_len).shape
        require(x.shape == rows, f"{name} {x.shape} does not fit {rows}")
    expect("history", history, 2, "i32")
    require(history.shape[0] == kv_len.shape[0], f"history {history.shape} for {kv_len.shape}")
    require(history.inner[0] > 0, "history has no columns")
    check_groups(ids, kv_len, groups, block)
    return ids


def check_groups(ids: Meta, kv_len: Meta, groups: Sequence[Meta], block: int) -> None:
    """Raise GraphError unless ``groups`` are slots [T] and block tables [S, B], alternating."""
    require(len(groups) % 2 == 0, f"{len(groups)} operands are not pairs of slot and table")
    require(block > 0, f"block is {block}, not above zero")
    for slot, table in zip(groups[::2], groups[1::2], strict=True):
        expect("slot", slot, 1, "i32")
        expect("table", table, 2, "i32")
        require(slot.shape == ids.shape, f"slot {slot.shape} does not fit ids {ids.shape}")
        require(table.shape[0] == kv_len.shape[0], f"table {table.shape} for kv_len {kv_len.shape}")


def _cost(
    out: Meta, sampled: Meta, ids: Meta, pos: Meta, kv_len: Meta, *rest: Meta, env: Env, **_: Any,
) -> Cost:  # fmt: skip
    groups = (len(rest) - 2) // 2
    words = kv_len.size * (8 + 2 * groups)  # each read or written once
    return Cost(kv_len.size * (3 + 4 * groups), 4 * words)


_WIDTH, _RING = 4, 5


def _tokens(rng: Rng, shape: Shape) -> np.ndarray:
    """Return ids, with -1 for rows from which `sample` cannot sample."""
    return rng.integers(-1, 6, shape)


def _lengths(block: int) -> Maker:
    """Return a maker of lengths within a block, at its end, and past the table."""

    def make(rng: Rng, shape: Shape) -> np.ndarray:
        known = np.array([0, block - 1, block, 2 * block + 1, _WIDTH * block, _WIDTH * block - 1])
        return known[np.arange(shape[0]) % len(known)]

    return make


def random_table(rng: Rng, shape: Shape) -> np.ndarray:
    """Return block tables of which no two share a block; the last column has none."""
    table = rng.permutation(shape[0] * shape[1]).reshape(shape)
    table[:, -1] = -1
    return table


def _sample(rows: int, padding_rows: int, block: int, groups: int) -> Sample:
    t, s = ("T",), ("S",)
    states = [Arg(t, I32, leaf="state"), Arg(t, I32, leaf="state")]
    states += [Arg(s, I32, leaf="state", make=_lengths(block)), Arg(s, I32, leaf="state")]
    states.append(Arg(("S", _RING), I32, leaf="state"))
    for _ in range(groups):
        states += [Arg(t, I32, leaf="state"), Arg(("S", _WIDTH), I32, make=random_table)]
    env = {"N": rows, "S": rows, "T": rows + padding_rows}
    return Sample((Arg(("N",), I32, make=_tokens), *states), {"block": block}, env)


@op(
    "advance",
    infer=_infer,
    cost=_cost,
    tol={},
    writes=_written,
    samples=grid(_sample, rows=(0, 1, 7), padding_rows=(0, 5), block=(1, 8), groups=(0, 1, 2)),
)
def advance(
    sampled: np.ndarray, ids: np.ndarray, pos: np.ndarray, kv_len: np.ndarray, count: np.ndarray,
    history: np.ndarray, *groups: np.ndarray, block: int,
) -> None:  # fmt: skip
    """Make each sequence's sampled id the token of the next step. All states are written in place.

    sampled [N >= S]; state: ids, pos [T >= S], kv_len, count [S], history [S, W] (a ring of the
    last ids, see `penalise`); then for each cache group slot [T] and table [S, B]; all i32. Token s
    of the next step belongs to sequence s, with position p = kv_len[s], column p % W of its
    history, and slot table[s, p // block] * block + p % block, or -1 (not stored) if the table has
    no such block. An id of -1, for which `sample` found no token, is stored unchanged.
    """
    live = len(kv_len)
    chosen, p = sampled[:live], kv_len.copy()
    ids[:live], pos[:live] = chosen, p
    history[np.arange(live), p % history.shape[1]] = chosen
    for slot, table in zip(groups[::2], groups[1::2], strict=True):
        slot[:live] = slots_at(table, p, block)
    kv_len += 1
    count += 1


def slots_at(table: np.ndarray, positions: np.ndarray, block: int) -> np.ndarray:
    """Return the slot of a position of each sequence; -1 where ``table`` [S, B] has no block."""
    column = positions // block
    entry = table[np.arange(len(table)), np.minimum(column, table.shape[1] - 1)]
    known = (column < table.shape[1]) & (entry >= 0)
    return np.where(known, entry * block + positions % block, -1)
