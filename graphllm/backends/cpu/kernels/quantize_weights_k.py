"""From floats to GGUF's blocks of 256, bit for bit as `graphllm.formats` writes them.

A block is sixteen vectors, and a run one or two of these; its scale, of four to eight bits, is in
steps of the block's. Of eight runs, lanes 8 and on repeat the first. See `encode.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

from llvmlite import ir

from ....formats.iq4 import IQ4_VALUES
from ..simd.emitter import I16S, I32S, LANES, Value
from .quantize_weights import Encode, Encoder

_PAIRS = (0, 2, 4, 6)  # where bit pairs lie in a byte


@dataclass
class _Fitted:
    """What a block's runs are in steps of, a lane for each run."""

    d: Value  # the block's scale: the bits of a float16, in every lane
    scale: Value  # the runs' own, int32
    step: Value  # the product of both, float32

    # The same for what is subtracted, where the format has that.
    dmin: Value = None
    low: Value = None
    base: Value = None


def _scale(e: Encode, span: Value, most: Value, top: int, low: int, high: int) -> tuple[Value, ...]:
    """`_Fitted.d`, scale and step: ``span`` in whole steps low..high of a float16, which is the
    largest span, ``most``, over ``top``."""
    half = e.to_half(e.over(most, top))
    d = e.of_half(half)
    scale = e.rounded(e.mul(span, e.inverse(d)), low, high)
    return half, scale, e.mul(d, e.to_f32(scale))


def _fit_largest(e: Encode, vectors: Sequence[Value], run: int, lowest: int, top: int) -> _Fitted:
    """The value of largest magnitude of each run becomes about ``lowest``."""
    span = e.over(e.fold(vectors, run, e.larger), lowest)
    most = e.fold([span], LANES, e.larger)
    return _Fitted(*_scale(e, span, most, -top, -top, top - 1))


def _fit_span(e: Encode, vectors: Sequence[Value], run: int, most: int, top: int) -> _Fitted:
    """Each run spans [min(x, 0), max(x, 0)] in ``most`` steps."""
    zero = e.f32(0.0)
    least = e.negative(e.lower(zero, e.fold(vectors, run, e.lower)))
    highest = e.higher(zero, e.fold(vectors, run, e.higher))
    span = e.over(e.add(highest, least), most)
    scale = _scale(e, span, e.fold([span], LANES, e.higher), top, 0, top)
    return _Fitted(*scale, *_scale(e, least, e.fold([least], LANES, e.higher), top, 0, top))


def _steps(
    e: Encode, vectors: Sequence[Value], run: int, fitted: _Fitted, low: int, high: int
) -> list[Value]:
    """Each element in its run's steps, int32 in low..high."""
    inverse, found = e.inverse(fitted.step), []
    for i, x in enumerate(vectors):
        index = i * LANES // run
        if fitted.base is not None:
            x = e.add(x, e.lane(fitted.base, index))
        found.append(e.rounded(e.mul(x, e.lane(inverse, index)), low, high))
    return found


def _joined(e: Encode, parts: Iterable[Value], shifts: Iterable[int]) -> Value:
    return reduce(e.b.or_, [e.shl(x, shift) for x, shift in zip(parts, shifts)])


def _tail(e: Encode, x: Value, first: int) -> Value:
    """Lanes ``first`` and on, in front; what follows means nothing."""
    return e.select_lanes(x, range(first, LANES))


def _store_bit_pairs(e: Encode, q: Sequence[Value], at: Value, offset: int) -> None:
    """Of each half four runs of 32, one above the other."""
    for i in range(4):
        first = 8 * (i // 2) + i % 2
        e.store_bytes(_joined(e, q[first : first + 8 : 2], _PAIRS), at, offset + LANES * i)


def _store_bits(e: Encode, q: Sequence[Value], at: Value, offset: int) -> None:
    """One bit of each element: eight runs of 32, one above the other."""
    for i in range(2):
        e.store_bytes(_joined(e, q[i::2], range(8)), at, offset + LANES * i)


def _store_nibbles(e: Encode, q: Sequence[Value], apart: int, at: Value, offset: int) -> None:
    """Low halves, and above them the vectors that come ``apart`` later."""
    low = [i for i in range(len(q)) if i // apart % 2 == 0]
    for k, i in enumerate(low):
        e.store_nibbles(q[i], q[i + apart], at, offset + LANES * k)


def _q2_k(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_span(e, vectors, 16, 3, 15)
    e.store_nibbles(fitted.scale, fitted.low, at, 0)
    _store_bit_pairs(e, _steps(e, vectors, 16, fitted, 0, 3), at, 16)
    e.store_half(fitted.d, 0, at, 80)
    e.store_half(fitted.dmin, 0, at, 82)
    return e.endless(vectors)


def _store_k_scales(e: Encode, fitted: _Fitted, at: Value) -> None:
    """The 16 bytes of which `quant_formats._k_scales` tells."""
    e.store_half(fitted.d, 0, at, 0)
    e.store_half(fitted.dmin, 0, at, 2)
    scale, low = fitted.scale, fitted.low
    last, last_low = _tail(e, scale, 4), _tail(e, low, 4)
    e.store_bytes(e.b.or_(scale, e.shl(e.shr(last, 4), 6)), at, 4, 4)
    e.store_bytes(e.b.or_(low, e.shl(e.shr(last_low, 4), 6)), at, 8, 4)
    e.store_bytes(e.b.or_(e.mask(last, 15), e.shl(last_low, 4)), at, 12, 4)


def _q4_k(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_span(e, vectors, 32, 15, 63)
    _store_k_scales(e, fitted, at)
    _store_nibbles(e, _steps(e, vectors, 32, fitted, 0, 15), 2, at, 16)
    return e.endless(vectors)


def _q5_k(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_span(e, vectors, 32, 31, 63)
    _store_k_scales(e, fitted, at)
    q = _steps(e, vectors, 32, fitted, 0, 31)
    _store_bits(e, [e.shr(x, 4) for x in q], at, 16)
    _store_nibbles(e, [e.mask(x, 15) for x in q], 2, at, 48)
    return e.endless(vectors)


def _q3_k(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_largest(e, vectors, 16, -4, 32)
    six = e.b.add(fitted.scale, e.i32(32))
    nibbles, top = e.mask(six, 15), e.shr(six, 4)
    e.store_bytes(e.b.or_(nibbles, e.shl(_tail(e, nibbles, 8), 4)), at, 96, 8)
    fours = [top, *(_tail(e, top, first) for first in (4, 8, 12))]
    e.store_bytes(_joined(e, fours, _PAIRS), at, 104, 4)
    e.store_half(fitted.d, 0, at, 108)
    q = [e.b.add(x, e.i32(4)) for x in _steps(e, vectors, 16, fitted, -4, 3)]
    _store_bits(e, [e.shr(x, 2) for x in q], at, 0)
    _store_bit_pairs(e, [e.mask(x, 3) for x in q], at, 32)
    return e.endless(vectors)


def _q6_k(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_largest(e, vectors, 16, -32, 128)
    e.store_bytes(fitted.scale, at, 192)
    e.store_half(fitted.d, 0, at, 208)
    q = [e.b.add(x, e.i32(32)) for x in _steps(e, vectors, 16, fitted, -32, 31)]
    _store_nibbles(e, [e.mask(x, 15) for x in q], 4, at, 0)
    _store_bit_pairs(e, [e.shr(x, 4) for x in q], at, 128)
    return e.endless(vectors)


def _iq4_xs(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    fitted = _fit_largest(e, vectors, 32, -127, 32)
    six = e.b.add(fitted.scale, e.i32(32))
    places = ir.Constant(I32S, [2 * k for k in range(8)] * 2)
    top = e.b.shl(e.shr(six, 4), places)
    both = e.fold([top], 8, e.b.or_)  # of eight runs, in every lane
    e.store_half(fitted.d, 0, at, 0)
    e.store_half(e.b.trunc(both, I16S), 0, at, 2)
    low = e.mask(six, 15)
    even, odd = e.select_lanes(low, range(0, 8, 2)), e.select_lanes(low, range(1, 8, 2))
    e.store_bytes(e.b.or_(even, e.shl(odd, 4)), at, 4, 4)
    inverse, q = e.inverse(fitted.step), []
    for i, x in enumerate(vectors):
        q.append(e.nearest(e.mul(x, e.lane(inverse, i // 2)), IQ4_VALUES))
    _store_nibbles(e, q, 1, at, 8)
    return e.endless(vectors)


ENCODE_K: dict[str, Encoder] = {
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_xs": _iq4_xs,
}  # fmt: skip
