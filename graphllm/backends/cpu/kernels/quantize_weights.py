"""From floats to GGUF's blocks, bit for bit as `graphllm.formats` writes them.

Here: the formats with blocks of 32, and what those with blocks of 256 (`encode_k.py`) need, too.
Vectors are sixteen elements of a row. A *run* is what has a scale of its own, 16 or 32 elements.
`fold` brings the largest element of each run to a lane of its own, so that the scales of up to
sixteen runs are worked out together: a division takes as long for one as for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from llvmlite import ir

from ....formats.iq4 import IQ4_VALUES
from ....formats.mxfp4 import MXFP4_VALUES
from ..simd.emitter import F32S, I8, I8S, I16, I16S, I32, I32S, I64, LANES, Emit, Value
from ..simd.vectors import F16S

_SIGN, _SIZE, _ENDLESS = 0x80000000, 0x7FFFFFFF, 0x7F800000  # bits of a float32
# Added to a float32 below 2**22 in magnitude, it rounds to an integer, halves to even, and leaves
# the integer in the low bits: on every target, which a rounding instruction would not.
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000

Merge = Callable[[Value, Value], Value]


class Encode(Emit):
    """Writes what block formats are made with."""

    # -- numbers
    def bits_of(self, x: Value) -> Value:
        """The bits of floats."""
        return self.b.bitcast(x, I32S)

    def size(self, x: Value) -> Value:
        """The bits of |x|, which are in the order of magnitudes; infinity and NaN come last."""
        return self.mask(self.bits_of(x), _SIZE)

    def magnitude(self, x: Value) -> Value:
        return self.b.bitcast(self.size(x), F32S)

    def signed(self, magnitude: Value, *signs: Value) -> Value:
        """A magnitude with the product of the signs of the others."""
        bits = self.bits_of(magnitude)
        for sign in signs:
            bits = self.b.xor(bits, self.mask(self.bits_of(sign), _SIGN))
        return self.b.bitcast(bits, F32S)

    def negative(self, x: Value) -> Value:
        return self.signed(x, self.f32(-1.0))

    def over(self, x: Value, divisor: float) -> Value:
        """x / divisor, correctly rounded, with its sign even where it is zero."""
        whole = self.divide_positive(self.magnitude(x), self.f32(abs(divisor)))
        return self.signed(whole, x, self.f32(divisor))

    def inverse(self, x: Value) -> Value:
        """1 / x; 0 where that is not a finite number."""
        found = self.bits_of(self.divide_positive(self.f32(1.0), self.magnitude(x)))
        finite = self.b.icmp_signed("<", found, self.i32(_ENDLESS))
        found = self.b.select(finite, found, self.i32(0))
        return self.signed(self.b.bitcast(found, F32S), x)

    def rounded(self, x: Value, low: int, high: int) -> Value:
        """x, below 2**22 in magnitude, to nearest even as int32 in low..high."""
        moved = self.bits_of(self.add(x, self.f32(ROUND)))
        return self.within(self.b.sub(moved, self.i32(ROUND_BITS)), low, high)

    def within(self, x: Value, low: int, high: int) -> Value:
        x = self.b.select(self.b.icmp_signed("<", x, self.i32(low)), self.i32(low), x)
        return self.at_most(x, high)

    def at_most(self, x: Value, high: int) -> Value:
        return self.b.select(self.b.icmp_signed(">", x, self.i32(high)), self.i32(high), x)

    def whole(self, x: Value) -> Value:
        """x as int32, without what is behind the point."""
        return self.b.fptosi(x, I32S)

    def nearest(self, x: Value, values: Sequence[int]) -> Value:
        """The index of the nearest of ``values``, which ascend; of two, the first."""
        index = self.i32(0)
        for low, high in pairwise(values):
            above = self.b.fcmp_ordered(">", x, self.f32((low + high) / 2))
            index = self.b.select(above, self.b.add(index, self.i32(1)), index)
        return index

    # -- lanes
    def fold(self, vectors: Sequence[Value], run: int, merge: Merge) -> Value:
        """Each run of ``run`` elements merged into one, the runs in order and, where they are fewer
        than the lanes, again from the first one on.

        ``merge`` sees pairs of neighbours, then pairs of these: the element that is in front first.
        """
        even, odd = (ir.Constant(I32S, list(range(k, 2 * LANES, 2))) for k in (0, 1))
        found = list(vectors)
        while run > 1:
            pairs = list(zip(found[::2], found[1::2])) if len(found) > 1 else [(found[0],) * 2]
            found = [
                merge(self.b.shuffle_vector(x, y, even), self.b.shuffle_vector(x, y, odd))
                for x, y in pairs
            ]
            run //= 2
        return found[0]

    def larger(self, x: Value, y: Value) -> Value:
        """The value of larger magnitude; of two, the first."""
        more = self.b.icmp_signed(">", self.size(y), self.size(x))
        return self.b.select(more, y, x)

    def lower(self, x: Value, y: Value) -> Value:
        """The lower value; of two (zeros with different signs, too), the first."""
        return self.b.select(self.b.fcmp_ordered("<", y, x), y, x)

    def higher(self, x: Value, y: Value) -> Value:
        """The higher value."""
        return self.b.select(self.b.fcmp_ordered(">", y, x), y, x)

    def lane(self, x: Value, index: int) -> Value:
        """One lane of x in all of them."""
        return self.b.shuffle_vector(x, x, ir.Constant(I32S, [index] * LANES))

    def endless(self, vectors: Sequence[Value]) -> Value:
        """Whether an element is infinite or NaN (int64)."""
        bad = None
        for x in vectors:
            one = self.b.icmp_signed(">=", self.size(x), self.i32(_ENDLESS))
            bad = one if bad is None else self.b.or_(bad, one)
        some = self.b.icmp_unsigned("!=", self.flags(bad), ir.Constant(I16, 0))
        return self.b.zext(some, I64)

    # -- storing
    def flags(self, x: Value) -> Value:
        """Sixteen lanes of one bit as an int16."""
        return self.b.bitcast(x, I16)

    def store_bytes(self, x: Value, at: Value, offset: int, count: int = LANES) -> None:
        """The low bytes of the first ``count`` lanes."""
        packed = self.b.trunc(x, I8S)
        if count < LANES:
            kind = ir.IntType(8 * count)
            words = self.b.bitcast(packed, ir.VectorType(kind, LANES // count))
            packed = self.b.extract_element(words, ir.Constant(I32, 0))
        self.store(packed, at, offset)

    def store_half(self, x: Value, index: int, at: Value, offset: int) -> None:
        """One of sixteen int16, the bits of a float16 say."""
        self.store(self.b.extract_element(x, ir.Constant(I32, index)), at, offset)

    def to_half(self, x: Value) -> Value:
        """The bits of the nearest float16, i16x16."""
        return self.b.bitcast(self.b.fptrunc(x, F16S), I16S)

    def of_half(self, x: Value) -> Value:
        return self.b.fpext(self.b.bitcast(x, F16S), F32S)

    def store_nibbles(self, low: Value, high: Value, at: Value, offset: int) -> None:
        self.store_bytes(self.b.or_(low, self.shl(high, 4)), at, offset)


# -------------------------------------------------------------------------------- blocks of 32

# Writes the elements in ``vectors`` to ``at`` as blocks; 1 if one of them is no finite number.
Encoder = Callable[[Encode, Sequence[Value], Value], Value]
_BLOCK = 32


def _blocks(vectors: Sequence[Value]) -> list[tuple[Value, Value]]:
    return list(zip(vectors[::2], vectors[1::2]))


def _q8_0(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    d = e.over(e.magnitude(e.fold(vectors, _BLOCK, e.larger)), 127)
    inverse, half = e.inverse(d), e.to_half(d)
    for i, block in enumerate(_blocks(vectors)):
        e.store_half(half, i, at, 34 * i)
        one = e.lane(inverse, i)
        for j, x in enumerate(block):
            x = e.mul(x, one)
            q = e.whole(e.add(x, e.signed(e.f32(0.5), x)))  # halves away from zero
            e.store_bytes(q, at, 34 * i + 2 + LANES * j)
    return e.endless(vectors)


def _store_fives(e: Encode, low: Value, high: Value, at: Value, offset: int) -> None:
    """Fifth bits of 32 elements, then their nibbles."""
    for j, q in enumerate((low, high)):
        fifth = e.b.icmp_unsigned("!=", e.mask(q, 16), e.i32(0))
        e.store(e.flags(fifth), at, offset + 2 * j)
    e.store_nibbles(e.mask(low, 15), e.mask(high, 15), at, offset + 4)


def _centred(lowest: int, nbytes: int, e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    """q4_0 and q5_0: the value of largest magnitude becomes ``lowest``."""
    d = e.over(e.fold(vectors, _BLOCK, e.larger), lowest)
    inverse, half = e.inverse(d), e.to_half(d)
    store = e.store_nibbles if lowest == -8 else partial(_store_fives, e)
    for i, block in enumerate(_blocks(vectors)):
        e.store_half(half, i, at, nbytes * i)
        one, middle = e.lane(inverse, i), e.f32(0.5 - lowest)
        steps = (e.whole(e.add(e.mul(x, one), middle)) for x in block)
        low, high = (e.at_most(q, -2 * lowest - 1) for q in steps)
        store(low, high, at, nbytes * i + 2)
    return e.endless(vectors)


def _from_least(most: int, nbytes: int, e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    """q4_1 and q5_1: q in 0..most spans all values of the block."""
    least = e.fold(vectors, _BLOCK, e.lower)
    span = e.sub(e.fold(vectors, _BLOCK, e.higher), least)
    d = e.over(e.magnitude(span), most)
    inverse, halves = e.inverse(d), (e.to_half(d), e.to_half(least))
    store = e.store_nibbles if most == 15 else partial(_store_fives, e)
    for i, block in enumerate(_blocks(vectors)):
        for j, half in enumerate(halves):
            e.store_half(half, i, at, nbytes * i + 2 * j)
        one, base = e.lane(inverse, i), e.lane(least, i)
        steps = (e.whole(e.add(e.mul(e.sub(x, base), one), e.f32(0.5))) for x in block)
        low, high = (e.at_most(q, most) for q in steps)
        store(low, high, at, nbytes * i + 4)
    return e.endless(vectors)


def _iq4_nl(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    d = e.over(e.fold(vectors, _BLOCK, e.larger), -127)
    inverse, half = e.inverse(d), e.to_half(d)
    for i, block in enumerate(_blocks(vectors)):
        e.store_half(half, i, at, 18 * i)
        one = e.lane(inverse, i)
        low, high = (e.nearest(e.mul(x, one), IQ4_VALUES) for x in block)
        e.store_nibbles(low, high, at, 18 * i + 2)
    return e.endless(vectors)


def _e2m1(e: Encode, x: Value, steps: Value) -> Value:
    """The four bits of x, which has so many steps; none is a negative zero."""
    q = e.nearest(steps, MXFP4_VALUES[:8])
    minus = e.mask(e.shr(e.bits_of(x), 28), 8)
    return e.b.select(e.b.icmp_signed(">", q, e.i32(0)), e.b.or_(q, minus), q)


def _mxfp4(e: Encode, vectors: Sequence[Value], at: Value) -> Value:
    exponent = e.shr(e.size(e.fold(vectors, _BLOCK, e.larger)), 23)
    code = e.within(e.b.sub(exponent, e.i32(2)), 0, 254)
    # 2 ** (code - 128), which is subnormal where the code is 0 or 1.
    small = e.b.shl(e.i32(0x00200000), e.at_most(code, 1))
    normal = e.shl(e.b.sub(code, e.i32(1)), 23)
    d = e.b.select(e.b.icmp_signed("<", code, e.i32(2)), small, normal)
    for i, block in enumerate(_blocks(vectors)):
        e.store(e.b.trunc(e.b.extract_element(code, ir.Constant(I32, i)), I8), at, 17 * i)
        one = e.lane(e.b.bitcast(d, F32S), i)
        low, high = (_e2m1(e, x, e.divide_positive(e.magnitude(x), one)) for x in block)
        e.store_nibbles(low, high, at, 17 * i + 1)
    return e.endless(vectors)


ENCODE_32: dict[str, Encoder] = {
    "q8_0": _q8_0,
    "q4_0": partial(_centred, -8, 18),
    "q5_0": partial(_centred, -16, 22),
    "q4_1": partial(_from_least, 15, 20),
    "q5_1": partial(_from_least, 31, 24),
    "iq4_nl": _iq4_nl,
    "mxfp4": _mxfp4,
}
