"""What the integer microkernels for one token and for several have in common.

Dot products of unsigned with signed bytes start at minus the format's zero point times the sum of
the activations, so that nothing is subtracted later. Of a super-block, scaled dots are summed as
integers; offsets and corrections are added, and the float scales are applied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..formats import Block32, Block256
from ..runtime.lazy_numba import ir
from ..simd.emitter import F32, I16S, I32, VECTOR, Emitter, Value
from ..simd.vectors import vector

SUMS_BYTES = 2 * VECTOR  # of a token and a super-block: initial dots, and sums in pairs
_AS_PAIRS = (0, 2, 1, 3, 4, 6, 5, 7)  # order of sums over 32; see `Block256.offsets`


# ------------------------------------------------------------------------------------ blocks of 32


def dot_start_32(e: Emitter, f: Block32, s: Value) -> Value:
    """Initial value of a dot: minus the offset times the sum of the activations at ``s``."""
    if not f.zero_point(e):
        return e.i32(0)
    return e.splat(e.b.mul(e.load(s, I32), I32(-f.zero_point(e))))


def add_32(
    e: Emitter, f: Block32, acc: Value, dot: Value, factors: list[Value], d: Value, s: Value
) -> Value:
    """acc + dot * (scale * activation scale), and if the format has an m, then
    + m * (sum of activations * activation scale)."""
    acc = e.add(acc, e.mul(e.to_f32(dot), e.mul(factors[0], e.broadcast_f32(d))))
    if not f.has_minimum:
        return acc
    total = e.mul(e.b.sitofp(e.load(s, I32), F32), e.load(d, F32))
    return e.add(acc, e.mul(factors[1], e.splat(total)))


# ------------------------------------------------------------------------------------ super-blocks


def scales_of(e: Emitter, f: Block256, w: Value) -> Iterator[Value]:
    """Yield the scales of a super-block."""
    for z in range(64 // f.sub):
        four = f.scale_bytes(e, w, z)
        for k in range(4 * z, 4 * z + 4):
            yield f.scale(e, four, k)


def factors_of(e: Emitter, f: Block256, w: Value) -> tuple[list[Value], ...]:
    """Corrections, offsets and factors of a super-block, which are needed after its words."""
    corrections = f.corrections(e, w) if f.has_corrections(e) else []
    offsets = f.offsets(e, w) if f.has_offsets(e) else []
    return corrections, offsets, f.factors(e, w)


def _select(e: Emitter, x: Value, lanes: Sequence[int]) -> Value:
    return e.b.shuffle_vector(x, x, ir.Constant(vector(I32, len(lanes)), [*lanes]))


def _sub_block_sums(e: Emitter, f: Block256, s: Value) -> Value:
    """A token's sums over the activations of each sub-block, int16."""
    sums = e.load(s, I16S)
    if f.sub == 16:
        return sums
    return e.b.add(_select(e, sums, range(0, 16, 2)), _select(e, sums, range(1, 16, 2)))


def pair_sums(e: Emitter, f: Block256, s: Value) -> Value:
    """The pairs of int16 that `Block256.offsets` are multiplied with, from the sums at ``s``."""
    sums = _sub_block_sums(e, f, s)
    return _select(e, sums, _AS_PAIRS) if f.sub == 32 else sums


def prepare_sums(e: Emitter, f: Block256, s: Value, sums_at: Value) -> None:
    """Prepare a token's sums over 16 activations, int16 at ``s``, in `SUMS_BYTES` bytes."""

    sums = _sub_block_sums(e, f, s)
    if f.sub == 32:
        e.store(_select(e, sums, _AS_PAIRS), sums_at, VECTOR)
    if f.zero_point(e):
        wide = e.b.sext(sums, vector(I32, sums.type.count))
        by = ir.Constant(wide.type, [-f.zero_point(e)] * sums.type.count)
        e.store(e.b.mul(wide, by), sums_at)


def dot_start_k(e: Emitter, f: Block256, sums_at: Value) -> Value:
    """Initial value of a sub-block's dot, from its place in the sums."""
    return e.broadcast_i32(sums_at) if f.zero_point(e) else e.i32(0)


def add_offsets(
    e: Emitter, pairs: list[Value], s: Value, sums_at: Value, total: Value | None = None
) -> Value | None:
    """``total`` plus offsets or corrections (see `Block256`) times the corresponding sums."""
    at = s if len(pairs) == 8 else e.at(sums_at, VECTOR)
    for j, pair in enumerate(pairs):
        total = e.dot_i16(pair, e.broadcast_i32(at, 4 * j), total)
    return total
