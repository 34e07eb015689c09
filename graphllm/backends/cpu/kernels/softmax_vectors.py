"""Softmax of one row of attention scores, over 16-lane vectors; see attention_vectors.py."""

from __future__ import annotations

from typing import Any

from ..runtime.lazy_numba import ir
from ..simd.emitter import F32, F32S, I32, I32S, LANES, Emitter, Value
from .attention_vectors import fold, shuffle, tuple_intrinsic

_MIN_EXPONENT = -87.0  # e^x is zero below it, where it would be subnormal
_LOG2E = 1.4426950408889634
# The first part has 16 bits, so its product with an integer is exact.
_LN2 = (0.693145751953125, 1.42860682030941723212e-6)
# Adding _ROUND leaves the nearest integer in the low bits.
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
_FACTORS = tuple(1.0 / f for f in (5040, 720, 120, 24, 6, 2, 1, 1))
_STEP = LANES * 4  # bytes


def _exp(e: Emitter, x: Value) -> Value:
    """e^x for x <= 0, accurate to about one unit in the last place; NaN stays NaN."""
    shifted = e.madd(x, e.f32(_LOG2E), e.f32(_ROUND))
    n = e.sub(shifted, e.f32(_ROUND))
    r = e.madd(n, e.f32(-_LN2[1]), e.madd(n, e.f32(-_LN2[0]), x))
    p = e.f32(_FACTORS[0])
    for factor in _FACTORS[1:]:
        p = e.madd(p, r, e.f32(factor))
    power = e.b.sub(e.b.bitcast(shifted, I32S), e.i32(_ROUND_BITS - 127))
    p = e.mul(p, e.b.bitcast(e.shl(power, 23), F32S))
    return e.b.select(e.b.fcmp_ordered("<", x, e.f32(_MIN_EXPONENT)), e.f32(0.0), p)


def _larger(e: Emitter, x: Value, y: Value) -> Value:
    """Maximum lane by lane; y where x is NaN."""
    return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)


def _largest(e: Emitter, x: Value) -> Value:
    """Broadcast the largest lane to every lane."""
    half = LANES // 2
    while half:
        x = _larger(e, shuffle(e, x, x, [(i + half) % LANES for i in range(LANES)]), x)
        half //= 2
    return x


def _first(e: Emitter, x: Value) -> Value:
    return e.b.extract_element(x, ir.Constant(I32, 0))


def _softmax_row(
    e: Emitter, row: Value, first: Value, count: Value, low: Value, high: Value, scale: Value,
    top: Value, total: Value,
) -> None:  # fmt: skip
    """Emit the softmax weights of a row of scores, exp(scale * (score - maximum)), in place.

    The row is ``count`` vectors from vector ``first`` on; elements outside low..high (counted from
    the start of the row) get the weight zero. The maximum and the sum are stored at the addresses
    ``top`` and ``total``. NaN is not the maximum, but makes the sum NaN.
    """
    lanes: Any = ir.Constant(I32S, list(range(LANES)))
    low, size = (e.splat(e.b.trunc(v, I32)) for v in (low, e.b.sub(high, low)))
    start, minus_inf = e.at(row, e.times(first, _STEP)), e.f32(float("-inf"))
    scale = e.splat(e.b.bitcast(e.b.trunc(scale, I32), F32))
    begin = e.b.sub(e.b.add(e.splat(e.b.trunc(e.times(first, LANES), I32)), lanes), low)
    best = e.variable(minus_inf)
    with e.loop(count) as loop:
        at = e.at(start, e.times(loop.index, _STEP))
        place = e.b.add(begin, e.splat(e.b.trunc(e.times(loop.index, LANES), I32)))
        inside = e.b.icmp_unsigned("<", place, size)
        x = e.b.select(inside, e.mul(e.load(at, F32S), scale), minus_inf)
        e.store(x, at)
        e.set(best, _larger(e, x, e.get(best)))
    largest = _largest(e, e.get(best))
    finite = e.b.select(e.b.fcmp_ordered("==", largest, minus_inf), e.f32(0.0), largest)
    sums = e.variable(e.f32(0.0))
    with e.loop(count) as loop:
        at = e.at(start, e.times(loop.index, _STEP))
        x = _exp(e, e.sub(e.load(at, F32S), finite))
        e.store(x, at)
        e.set(sums, e.add(e.get(sums), x))
    folded = fold(e, [e.get(sums)])
    broken = e.b.fcmp_unordered("uno", folded, folded)  # all scores may be NaN
    e.store(_first(e, folded), total)
    e.store(_first(e, e.b.select(broken, finite, largest)), top)


softmax_row = tuple_intrinsic(_softmax_row, 8)
