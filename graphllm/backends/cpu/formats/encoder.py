"""Vector code that encodes floats to blocks, bit for bit as the encoders of `graphllm.formats`.

Vectors are 16 elements of a row. A run is what has a scale of its own: 16 or 32 elements.
`BlockEncoder.fold` brings the extreme element of each run to a lane of its own, so that the scales
of up to 16 runs are computed together: a vector division takes as long as a scalar one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from ..runtime.lazy_numba import ir
from ..simd.emitter import F32S, I8S, I16, I16S, I32, I32S, I64, LANES, Emitter, Value
from ..simd.vectors import F16S

_SIGN, _MAGNITUDE, _INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000  # bits of a float32
# Added to a float32 below 2**22 in magnitude, this number rounds it to an integer, halves to even,
# and leaves the integer in the low bits: on every target, which a rounding instruction would not.
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000

Merge = Callable[[Value, Value], Value]


class BlockEncoder(Emitter):
    """Emits the arithmetic and the stores of encoders."""

    # -- numbers
    def bits_of(self, x: Value) -> Value:
        """The bits of floats."""
        return self.b.bitcast(x, I32S)

    def size(self, x: Value) -> Value:
        """The bits of |x|, which order as the magnitudes do, infinity and NaN last."""
        return self.mask(self.bits_of(x), _MAGNITUDE)

    def magnitude(self, x: Value) -> Value:
        return self.b.bitcast(self.size(x), F32S)

    def signed(self, magnitude: Value, *signs: Value) -> Value:
        """``magnitude`` with the product of the signs of ``signs``."""
        bits = self.bits_of(magnitude)
        for sign in signs:
            bits = self.b.xor(bits, self.mask(self.bits_of(sign), _SIGN))
        return self.b.bitcast(bits, F32S)

    def negative(self, x: Value) -> Value:
        return self.signed(x, self.f32(-1.0))

    def over(self, x: Value, divisor: float) -> Value:
        """x / divisor, correctly rounded; a zero keeps the sign of the quotient."""
        whole = self.divide_positive(self.magnitude(x), self.f32(abs(divisor)))
        return self.signed(whole, x, self.f32(divisor))

    def inverse(self, x: Value) -> Value:
        """1 / x; 0 where the result is infinite or NaN."""
        found = self.bits_of(self.divide_positive(self.f32(1.0), self.magnitude(x)))
        finite = self.b.icmp_signed("<", found, self.i32(_INFINITY))
        found = self.b.select(finite, found, self.i32(0))
        return self.signed(self.b.bitcast(found, F32S), x)

    def rounded(self, x: Value, low: int, high: int) -> Value:
        """Round x, below 2**22 in magnitude, to nearest even; int32 clipped to low..high."""
        moved = self.bits_of(self.add(x, self.f32(ROUND)))
        return self.within(self.b.sub(moved, self.i32(ROUND_BITS)), low, high)

    def within(self, x: Value, low: int, high: int) -> Value:
        x = self.b.select(self.b.icmp_signed("<", x, self.i32(low)), self.i32(low), x)
        return self.at_most(x, high)

    def at_most(self, x: Value, high: int) -> Value:
        return self.b.select(self.b.icmp_signed(">", x, self.i32(high)), self.i32(high), x)

    def whole(self, x: Value) -> Value:
        """x truncated to int32."""
        return self.b.fptosi(x, I32S)

    def nearest(self, x: Value, values: Sequence[float]) -> Value:
        """The index of the nearest of ``values``, which ascend; the lower one at a tie."""
        index = self.i32(0)
        for low, high in pairwise(values):
            above = self.b.fcmp_ordered(">", x, self.f32((low + high) / 2))
            index = self.b.select(above, self.b.add(index, self.i32(1)), index)
        return index

    # -- lanes
    def fold(self, vectors: Sequence[Value], run: int, merge: Merge) -> Value:
        """Reduce each run of ``run`` elements to one lane, in order; fewer runs than lanes repeat.

        ``merge`` combines neighbours pairwise, its first argument from the lower position.
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
        """The value of larger magnitude; ``x`` at a tie."""
        more = self.b.icmp_signed(">", self.size(y), self.size(x))
        return self.b.select(more, y, x)

    def lower(self, x: Value, y: Value) -> Value:
        """The lower value; ``x`` at a tie, zeros of different signs included."""
        return self.b.select(self.b.fcmp_ordered("<", y, x), y, x)

    def higher(self, x: Value, y: Value) -> Value:
        """The higher value."""
        return self.b.select(self.b.fcmp_ordered(">", y, x), y, x)

    def lane(self, x: Value, index: int) -> Value:
        """Broadcast one lane of x to all lanes."""
        return self.b.shuffle_vector(x, x, ir.Constant(I32S, [index] * LANES))

    def not_finite(self, vectors: Sequence[Value]) -> Value:
        """1 if an element is infinite or NaN, else 0 (int64)."""
        bad = None
        for x in vectors:
            one = self.b.icmp_signed(">=", self.size(x), self.i32(_INFINITY))
            bad = one if bad is None else self.b.or_(bad, one)
        some = self.b.icmp_unsigned("!=", self.flags(bad), ir.Constant(I16, 0))
        return self.b.zext(some, I64)

    # -- storing
    def flags(self, x: Value) -> Value:
        """16 lanes of one bit as an int16."""
        return self.b.bitcast(x, I16)

    def store_bytes(self, x: Value, at: Value, offset: int, count: int = LANES) -> None:
        """Store the low bytes of the first ``count`` lanes."""
        packed = self.b.trunc(x, I8S)
        if count < LANES:
            kind = ir.IntType(8 * count)
            words = self.b.bitcast(packed, ir.VectorType(kind, LANES // count))
            packed = self.b.extract_element(words, ir.Constant(I32, 0))
        self.store(packed, at, offset)

    def store_half(self, x: Value, index: int, at: Value, offset: int) -> None:
        """Store lane ``index`` of an i16x16, such as the bits of a float16."""
        self.store(self.b.extract_element(x, ir.Constant(I32, index)), at, offset)

    def to_half(self, x: Value) -> Value:
        """The bits of the nearest float16, i16x16."""
        return self.b.bitcast(self.b.fptrunc(x, F16S), I16S)

    def of_half(self, x: Value) -> Value:
        return self.b.fpext(self.b.bitcast(x, F16S), F32S)

    def store_nibbles(self, low: Value, high: Value, at: Value, offset: int) -> None:
        self.store_bytes(self.b.or_(low, self.shl(high, 4)), at, offset)


# Stores the elements in ``vectors`` to ``at`` as blocks. Returns int64: 1 if an element is infinite
# or NaN, else 0.
Encoder = Callable[[BlockEncoder, Sequence[Value], Value], Value]


def runs_of_32(vectors: Sequence[Value]) -> list[tuple[Value, Value]]:
    """Pairs of vectors: blocks of 32 elements."""
    return list(zip(vectors[::2], vectors[1::2]))


# ------------------------------------------------------------------------------ integer scales

BIT_PAIRS = (0, 2, 4, 6)  # where bit pairs lie in a byte


@dataclass
class FittedScales:
    """Scales and steps of a block's runs, a lane for each run."""

    d: Value  # the block's scale: the bits of a float16, in every lane
    scale: Value  # integer scales of the runs, int32
    step: Value  # d * scale, float32

    # The same for minima, in formats that have them.
    dmin: Value = None
    low: Value = None
    base: Value = None


def _scale(
    e: BlockEncoder, span: Value, most: Value, top: int, low: int, high: int
) -> tuple[Value, ...]:
    """d, scale and step of `FittedScales`: ``span`` as an integer low..high times a float16, the
    largest span ``most`` over ``top``."""
    half = e.to_half(e.over(most, top))
    d = e.of_half(half)
    scale = e.rounded(e.mul(span, e.inverse(d)), low, high)
    return half, scale, e.mul(d, e.to_f32(scale))


def fit_largest(
    e: BlockEncoder, vectors: Sequence[Value], run: int, lowest: int, top: int
) -> FittedScales:
    """The value of largest magnitude of each run becomes about ``lowest``."""
    span = e.over(e.fold(vectors, run, e.larger), lowest)
    most = e.fold([span], LANES, e.larger)
    return FittedScales(*_scale(e, span, most, -top, -top, top - 1))


def fit_span(
    e: BlockEncoder, vectors: Sequence[Value], run: int, most: int, top: int
) -> FittedScales:
    """Each run spans [min(x, 0), max(x, 0)] in ``most`` steps."""
    zero = e.f32(0.0)
    least = e.negative(e.lower(zero, e.fold(vectors, run, e.lower)))
    highest = e.higher(zero, e.fold(vectors, run, e.higher))
    span = e.over(e.add(highest, least), most)
    scale = _scale(e, span, e.fold([span], LANES, e.higher), top, 0, top)
    return FittedScales(*scale, *_scale(e, least, e.fold([least], LANES, e.higher), top, 0, top))


def quantized_steps(
    e: BlockEncoder, vectors: Sequence[Value], run: int, fitted: FittedScales, low: int, high: int
) -> list[Value]:
    """The elements in steps of their runs, int32 clipped to low..high."""
    inverse, found = e.inverse(fitted.step), []
    for i, x in enumerate(vectors):
        index = i * LANES // run
        if fitted.base is not None:
            x = e.add(x, e.lane(fitted.base, index))
        found.append(e.rounded(e.mul(x, e.lane(inverse, index)), low, high))
    return found


def join_bits(e: BlockEncoder, parts: Iterable[Value], shifts: Iterable[int]) -> Value:
    return reduce(e.b.or_, [e.shl(x, shift) for x, shift in zip(parts, shifts)])


def lanes_from(e: BlockEncoder, x: Value, first: int) -> Value:
    """Lanes ``first`` and up, moved to the front; the rest is undefined."""
    return e.select_lanes(x, range(first, LANES))


def store_bit_pairs(e: BlockEncoder, q: Sequence[Value], at: Value, offset: int) -> None:
    """Store two bits of each element: of each half, four runs of 32 above one another."""
    for i in range(4):
        first = 8 * (i // 2) + i % 2
        e.store_bytes(join_bits(e, q[first : first + 8 : 2], BIT_PAIRS), at, offset + LANES * i)


def store_bits(e: BlockEncoder, q: Sequence[Value], at: Value, offset: int) -> None:
    """Store one bit of each element: eight runs of 32 above one another."""
    for i in range(2):
        e.store_bytes(join_bits(e, q[i::2], range(8)), at, offset + LANES * i)


def store_nibbles_of(
    e: BlockEncoder, q: Sequence[Value], apart: int, at: Value, offset: int
) -> None:
    """Store four bits of each element: a vector in the low halves of 16 bytes, and in the high
    halves the vector ``apart`` positions later."""
    low = [i for i in range(len(q)) if i // apart % 2 == 0]
    for k, i in enumerate(low):
        e.store_nibbles(q[i], q[i + apart], at, offset + LANES * k)
