"""Ops that write the KV cache: rows of a step, and copies of blocks."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from ..formats.activations import ACT_TINY
from ..formats.legacy import Q4_0, Q8_0
from ..formats.quantization import Blocks, quantise
from ..formats.row_format import FP8, ROW_FORMATS
from ..graph.dtype import CACHED, F16, F32, I32, DType
from ..graph.op import (
    Arg,
    Cost,
    Maker,
    Rng,
    Sample,
    Samples,
    Shape,
    expect,
    grid,
    op,
    require,
)
from ..graph.tensor import Env, Meta

_NAN = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)  # bytes of a NaN scale


def _write_infer(pool: Meta, x: Meta, slot: Meta) -> Meta:
    expect("pool", pool, 3, *CACHED)
    expect("x", x, 3, "f32")
    expect("slot", slot, 1, "i32")
    require(x.inner == pool.inner, f"rows {x.inner} do not fit the pool's {pool.inner}")
    require(slot.shape[0] == x.shape[0], f"slot {slot.shape} does not fit {x.shape[0]} rows")
    return pool


def _write_cost(out: Meta, pool: Meta, x: Meta, slot: Meta, *, env: Env) -> Cost:
    return Cost(0, x.nbytes + slot.nbytes + x.dims[0] * row_nbytes(pool))


def row_nbytes(pool: Meta) -> int:
    """Return the bytes of one slot of a KV pool."""
    *heads, width = pool.inner
    return prod(heads) * pool.dtype.row_nbytes(width)


def _extremes(rng: Rng, shape: Shape) -> np.ndarray:
    """Return blocks of 32: huge, tiny, subnormal, zero, with infinity, with NaN, and with ties."""
    sizes = np.array([1.0, 1e30, 1e-30, 1e-40, 0.0, 1.0, 1.0, 127.0])
    x = rng.uniform(-1, 1, (*shape[:-1], shape[-1] // 32, 32))
    which = np.arange(x[..., 0].size).reshape(x.shape[:-1]) % len(sizes)
    x *= sizes[which, None]
    x[which == 5, 3], x[which == 6, 31] = -np.inf, np.nan
    x[which == 7] = np.append(np.arange(31) - 15.5, 127)
    return x.reshape(shape)


def _write_sample(
    rows: int, inner: Shape, kind: DType, layout: str, values: Maker | None = None,
) -> Sample:  # fmt: skip
    slots = 24

    def free(rng: Rng, shape: Shape) -> np.ndarray:
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
    samples=Samples(
        lambda: [
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
                kind=(Q8_0, Q4_0, FP8),
                layout=("contiguous", "strided"),
                values=(None, _extremes),
            ),
        ]
    ),
)
def kv_write(pool: Any, x: np.ndarray, slot: np.ndarray) -> None:
    """Store rows in the pool: pool[slot[t]] = x[t], rounded to the pool's dtype.

    pool [slots, H, D] f32, f16, q8_0, q4_0 or fp8 (written in place, and the result), x [T, H, D]
    f32, slot [T] i32. A negative slot writes nothing; the other slots of one call are distinct.
    q8_0 and q4_0 (D in whole blocks) are quantised as by `quantise`, except that a block with all
    values below 2**-100 becomes zero, and a block with NaN or infinity gets a NaN scale. fp8 has
    one scale for the D elements of a head, and the same exceptions.
    """
    keep = slot >= 0
    if isinstance(pool, Blocks):
        rows = _quantised(x[keep].reshape(-1, pool.elements), pool.dtype)
        pool.raw[slot[keep]] = rows.reshape(-1, *pool.raw.shape[1:])
        return
    with np.errstate(over="ignore"):  # beyond f16 a value becomes infinite
        pool[slot[keep]] = x[keep].astype(pool.dtype)


def _quantised(x: np.ndarray, kind: DType) -> np.ndarray:
    """Quantise rows of arbitrary floats to uint8 [rows, row_bytes]."""
    if kind.name in ROW_FORMATS:
        return ROW_FORMATS[kind.name].encode(x)
    blocks = x.reshape(-1, kind.block)
    size = np.abs(blocks).max(axis=-1, keepdims=True, initial=0)
    finite = np.isfinite(size)  # the maximum of a block with NaN is NaN
    with np.errstate(over="ignore"):  # a scale beyond f16 becomes infinite
        raw = quantise(np.where(finite & (size >= ACT_TINY), blocks, np.float32(0)), kind)
    raw[~finite[:, 0], :2] = _NAN
    return raw.reshape(len(x), kind.row_nbytes(x.shape[1]))


def _copy_infer(pool: Meta, source: Meta, target: Meta, *, block: int) -> Meta:
    expect("pool", pool, 3, *CACHED)
    expect("source", source, 1, "i32")
    expect("target", target, 1, "i32")
    require(target.shape == source.shape, f"target {target.shape} does not fit {source.shape}")
    slots = pool.shape[0]
    require(
        block > 0 and isinstance(slots, int) and slots % block == 0,
        f"a pool of {slots} slots has no blocks of {block}",
    )
    return pool


def _copy_cost(
    out: Meta, pool: Meta, source: Meta, target: Meta, *, env: Env, block: int
) -> Cost:  # fmt: skip
    copied = source.size * block * row_nbytes(pool)
    return Cost(0, source.nbytes + target.nbytes + 2 * copied)


def _copy_sample(rows: int, inner: Shape, kind: DType, block: int) -> Sample:
    blocks = 17

    def sources(rng: Rng, shape: Shape) -> np.ndarray:
        found = rng.integers(0, 8, shape)  # a block may be copied several times
        found[1::4] = -1
        return found

    def targets(rng: Rng, shape: Shape) -> np.ndarray:
        found = 8 + rng.permutation(blocks - 8)[: shape[0]]
        found[2::4] = -1
        return found

    pool = Arg((blocks * block, *inner), kind, leaf="state")
    args = (pool, Arg(("M",), I32, make=sources), Arg(("M",), I32, make=targets))
    return Sample(args, {"block": block}, {"M": rows})


@op(
    "copy_blocks",
    infer=_copy_infer,
    cost=_copy_cost,
    tol={},
    writes=lambda count: (0,),
    samples=Samples(
        lambda: [
            *grid(
                _copy_sample,
                rows=(0, 1, 7),
                inner=((1, 1), (3, 20), (2, 64)),
                kind=(F32, F16),
                block=(1, 8),
            ),
            *grid(
                _copy_sample,
                rows=(0, 1, 7),
                inner=((1, 32), (2, 96)),
                kind=(Q8_0, FP8),
                block=(1, 8),
            ),
        ]
    ),
)
def copy_blocks(pool: Any, source: np.ndarray, target: np.ndarray, *, block: int) -> None:
    """Copy blocks of a KV pool: block target[m] becomes equal to block source[m].

    pool [slots, H, D] of any dtype of a KV cache (written in place, and the result), in blocks of
    ``block`` slots; source and target [M] i32. A negative source or target copies nothing. The
    targets of one call are distinct, and none of them is a source, so the order of the copies does
    not matter.
    """
    rows = pool.raw if isinstance(pool, Blocks) else pool
    keep = (source >= 0) & (target >= 0)
    blocks = rows.reshape(-1, block, *rows.shape[1:])  # a view: pools are contiguous
    blocks[target[keep]] = blocks[source[keep]]
