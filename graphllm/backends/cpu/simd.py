"""Vectors of 16 lanes, written in LLVM's terms: what microkernels are made with.

An `Emit` writes instructions at the builder's position. A vector always has 16 lanes of 32 bits
(`i32x16`, `f32x16`), one lane a row of a weight matrix; LLVM splits it into the registers that the
target has: one on AVX-512, two on AVX2, four elsewhere. Bytes and int16 pairs are carried in the
int32 lanes and named where they matter. Addresses are int64.

Integer arithmetic is exact on every target. Float arithmetic is written operation by operation and
carries a flag that keeps Numba's fast-math pass away, so nothing is reassociated or contracted: a
microkernel gives the same bits on every target, unless it calls `madd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .isa import ISA, isa

Value = Any  # an llvmlite value
Pairs = Sequence[tuple[Value, Value]]

LANES = 16
VECTOR = 64  # bytes of a vector

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()


def _vector(element: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(element, lanes)


I32S, F32S, F16S, I16S = _vector(I32), _vector(F32), _vector(F16), _vector(I16)
_BYTES, _WORDS = _vector(I8, 4 * LANES), _vector(I16, 2 * LANES)
# Numba's fast-math pass leaves an operation alone that has a flag already. "afn" says nothing
# about addition and multiplication, "nsz" nothing about the quotient of positive numbers.
_EXACT, _EXACT_QUOTIENT = ("afn",), ("nsz",)

SIGN_BITS = 0x80808080  # of four bytes


class Emit:
    """Writes vector code with an llvmlite ``builder`` for the target ``features``."""

    def __init__(self, builder: Any, features: ISA | None = None) -> None:
        self.b = builder
        self.isa = features or isa()

    # -- addresses and loops
    def at(self, base: Value, *offsets: Value | int) -> Value:
        """``base`` plus offsets in bytes."""
        for offset in offsets:
            if not isinstance(offset, int):
                base = self.b.add(base, offset)
            elif offset:
                base = self.b.add(base, ir.Constant(I64, offset))
        return base

    def times(self, value: Value, factor: int) -> Value:
        """An int64 times a constant."""
        return self.b.mul(value, ir.Constant(I64, factor))

    def count(self, number: int) -> Value:
        return ir.Constant(I64, number)

    def loop(self, count: Value | int) -> AbstractContextManager[Any]:
        """``with e.loop(n) as loop: ... loop.index ...``"""
        count = self.count(count) if isinstance(count, int) else count
        return cgutils.for_range(self.b, count, intp=I64)

    def variable(self, first: Value) -> Value:
        """A variable that lives through loops, in a register if LLVM finds one; see get and set."""
        place = cgutils.alloca_once(self.b, first.type)
        self.b.store(first, place)
        return place

    def get(self, variable: Value) -> Value:
        return self.b.load(variable)

    def set(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    # -- memory
    def _pointer(self, address: Value, kind: Any, offset: int) -> Value:
        return self.b.inttoptr(self.at(address, offset), kind.as_pointer())

    def load(self, address: Value, kind: Any = I32S, offset: int = 0) -> Value:
        """Any vector or number at an address of any alignment."""
        loaded = self.b.load(self._pointer(address, kind, offset))
        loaded.align = 1
        return loaded

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(address, value.type, offset)).align = 1

    def load_f32(self, address: Value, offset: int = 0) -> Value:
        """Sixteen float32."""
        return self.load(address, F32S, offset)

    def halves(self, address: Value, offset: int = 0) -> Value:
        """Sixteen float16 as f32x16."""
        if self.isa.f16c:
            return self.b.fpext(self.load(address, F16S, offset), F32S)
        bits = self.b.zext(self.load(address, I16S, offset), I32S)
        # Shifted into place the exponent is 112 short, which a product makes up for, subnormals
        # included; what had the largest exponent is infinity or NaN.
        size = self.b.bitcast(self.shl(self.mask(bits, 0x7FFF), 13), F32S)
        value = self.b.bitcast(self.mul(size, self.f32(2.0**112)), I32S)
        endless = self.b.icmp_unsigned(">=", self.mask(bits, 0x7FFF), self.i32(0x7C00))
        value = self.b.select(endless, self.bits(value, 0x7F800000), value)
        return self.b.bitcast(self.b.or_(value, self.shl(self.mask(bits, 0x8000), 16)), F32S)

    def brains(self, address: Value, offset: int = 0) -> Value:
        """Sixteen bfloat16 as f32x16."""
        bits = self.b.zext(self.load(address, I16S, offset), I32S)
        return self.b.bitcast(self.shl(bits, 16), F32S)

    def prefetch(self, address: Value, offset: int = 0) -> None:
        """Ask for the cache line there; any address will do."""
        pointer = self._pointer(address, I8, offset)
        hints = [ir.Constant(I32, v) for v in (0, 3, 1)]  # read, keep, data
        self._call("llvm.prefetch.p0", ir.VoidType(), pointer, *hints)

    # -- numbers in all lanes
    def i32(self, value: int) -> Value:
        signed = value - (1 << 32) if value >= 1 << 31 else value
        return ir.Constant(I32S, [signed] * LANES)

    def f32(self, value: float) -> Value:
        return ir.Constant(F32S, [value] * LANES)

    def splat(self, value: Value) -> Value:
        """A number in every lane."""
        kind = _vector(value.type)
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(nothing, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(I32S, [0] * LANES))

    def all_i32(self, address: Value, offset: int = 0) -> Value:
        """The int32 (or four bytes, or two int16) at an address in every lane."""
        return self.splat(self.load(address, I32, offset))

    def all_f32(self, address: Value, offset: int = 0) -> Value:
        return self.splat(self.load(address, F32, offset))

    # -- float arithmetic
    def add(self, x: Value, y: Value) -> Value:
        return self.b.fadd(x, y, flags=_EXACT)

    def sub(self, x: Value, y: Value) -> Value:
        return self.b.fsub(x, y, flags=_EXACT)

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.fmul(x, y, flags=_EXACT)

    def ratio(self, x: Value, y: Value) -> Value:
        """x / y, correctly rounded, for positive numbers."""
        return self.b.fdiv(x, y, flags=_EXACT_QUOTIENT)

    def madd(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z, rounded once where the target has such an instruction, else twice."""
        if self.isa.x86 and not self.isa.avx2:
            return self.add(self.mul(x, y), z)
        return self._call("llvm.fma.v16f32", F32S, x, y, z)

    def to_f32(self, x: Value) -> Value:
        """int32 lanes as float32, to nearest even."""
        return self.b.sitofp(x, F32S)

    # -- integer arithmetic on int32 lanes
    def mask(self, x: Value, mask: int) -> Value:
        return self.b.and_(x, self.i32(mask))

    def bits(self, x: Value, mask: int) -> Value:
        return self.b.or_(x, self.i32(mask))

    def shl(self, x: Value, count: int) -> Value:
        return self.b.shl(x, self.i32(count)) if count else x

    def shr(self, x: Value, count: int) -> Value:
        """Zeros come in."""
        return self.b.lshr(x, self.i32(count)) if count else x

    def sar(self, x: Value, count: int) -> Value:
        """The sign comes in."""
        return self.b.ashr(x, self.i32(count)) if count else x

    def signed_byte(self, x: Value, index: int) -> Value:
        """Byte ``index`` of each lane with its sign."""
        return self.sar(self.shl(x, 24 - 8 * index), 24)

    def byte(self, x: Value, index: int) -> Value:
        """Byte ``index`` of each lane without sign."""
        return self.mask(self.shr(x, 8 * index), 0xFF) if index < 3 else self.shr(x, 24)

    def twice(self, x: Value) -> Value:
        """int32 lanes that fit int16 as a pair of equal int16."""
        return self.b.or_(self.mask(x, 0xFFFF), self.shl(x, 16))

    def low(self, x: Value) -> Value:
        """The low int16 of each pair as int32."""
        return self.sar(self.shl(x, 16), 16)

    def high(self, x: Value) -> Value:
        return self.sar(x, 16)

    def dot_pairs(self, x: Value, y: Value, total: Value | None = None) -> Value:
        """``total`` plus, in each lane, the sum of two products of int16."""
        if self.isa.avx512:
            found = self._by("llvm.x86.avx512.pmaddw.d.512", _WORDS, I32S, x, y)
        elif self.isa.avx2:
            found = self._by_halves("llvm.x86.avx2.pmadd.wd", 16, I16, x, y)
        else:
            first = self.b.mul(self.low(x), self.low(y))
            found = self.b.add(first, self.b.mul(self.high(x), self.high(y)))
        return self._plus(total, found)

    def dot(self, pairs: Pairs, largest: int, total: Value | None = None) -> Value:
        """``total`` plus, in each lane, the sum of products u * s of the four bytes of each pair.

        u is unsigned and at most ``largest``, s is signed and not -128.
        """
        if self.isa.vnni:
            for u, s in pairs:
                total = self._call(
                    "llvm.x86.avx512.vpdpbusd.512", I32S, self.i32(0) if total is None else total,
                    u, s,
                )  # fmt: skip
            return total
        if self.isa.avx2 and 2 * largest * 127 < 1 << 15:
            for run in self._runs(pairs, largest):
                total = self.dot_pairs(run, self.i32(0x00010001), total)
            return total
        for u, s in pairs:
            even, odd = self.mask(u, 0x00FF00FF), self.mask(self.shr(u, 8), 0x00FF00FF)
            total = self._dot_split(even, odd, s, total)
        return total

    def dot_signed(self, pairs: Pairs, total: Value | None = None) -> Value:
        """As `dot`, for two signed factors of which the second is not -128. Not for VNNI."""
        for w, s in pairs:
            if self.isa.avx2:
                total = self._dot_by_sign(w, s, total)
            else:
                total = self._dot_split(*self.split_bytes(w), s, total)
        return total

    def scale_form(self, scale: Value) -> Value:
        """int32 scales, that fit int16, as `dot_scaled` wants them."""
        return self.twice(scale) if self._scales_pairs else scale

    def dot_scaled(
        self, pairs: Pairs, largest: int, scale: Value, total: Value | None = None
    ) -> Value:
        """``total`` plus `dot` of the pairs times a scale (see `scale_form`) in each lane."""
        if not self._scales_pairs:
            return self._plus(total, self.b.mul(self.dot(pairs, largest), scale))
        for run in self._runs(pairs, largest):
            total = self.dot_pairs(run, scale, total)
        return total

    @property
    def _scales_pairs(self) -> bool:
        """Without VNNI the step from int16 to int32 multiplies anyway: let it apply the scale."""
        return self.isa.avx2 and not self.isa.vnni

    def _plus(self, total: Value | None, x: Value) -> Value:
        return x if total is None else self.b.add(total, x)

    def _runs(self, pairs: Pairs, largest: int) -> Iterable[Value]:
        """Sums of byte products in int16, each of as many pairs as cannot overflow."""
        room = ((1 << 15) - 1) // (2 * largest * 127)
        for start in range(0, len(pairs), room):
            run = None
            for u, s in pairs[start : start + room]:
                product = self._multiply_bytes(u, s)
                run = product if run is None else self._add_i16(run, product)
            yield run

    def _add_i16(self, x: Value, y: Value) -> Value:
        words = self.b.add(self.b.bitcast(x, _WORDS), self.b.bitcast(y, _WORDS))
        return self.b.bitcast(words, I32S)

    def _multiply_bytes(self, u: Value, s: Value) -> Value:
        """u0 * s0 + u1 * s1 and u2 * s2 + u3 * s3 in int16, which must not overflow. AVX2."""
        if self.isa.avx512:
            return self._by("llvm.x86.avx512.pmaddubs.w.512", _BYTES, _WORDS, u, s)
        return self._by_halves("llvm.x86.avx2.pmadd.ub.sw", 32, I8, u, s)

    def _dot_by_sign(self, w: Value, s: Value, total: Value | None) -> Value:
        """|w| times s with the sign of w: 2 * 128 * 127 fits int16."""
        size, moved = self.b.bitcast(w, _BYTES), self.b.bitcast(s, _BYTES)
        zero = ir.Constant(_BYTES, None)
        below = self.b.icmp_signed("<", size, zero)
        size = self.b.select(below, self.b.sub(zero, size), size)
        if self.isa.avx512:
            moved = self.b.select(below, self.b.sub(zero, moved), moved)
        else:
            moved = self._by_halves("llvm.x86.avx2.psign.b", 32, I8, s, w)
        product = self._multiply_bytes(self.b.bitcast(size, I32S), self.b.bitcast(moved, I32S))
        return self.dot_pairs(product, self.i32(0x00010001), total)

    def split_bytes(self, x: Value) -> tuple[Value, Value]:
        """Bytes 0 and 2, then 1 and 3, of each lane as pairs of int16 with their signs."""
        words = self.b.bitcast(x, _WORDS)
        eight = ir.Constant(_WORDS, [8] * _WORDS.count)
        even = self.b.ashr(self.b.shl(words, eight), eight)
        return self.b.bitcast(even, I32S), self.b.bitcast(self.b.ashr(words, eight), I32S)

    def _dot_split(self, even: Value, odd: Value, s: Value, total: Value | None) -> Value:
        s_even, s_odd = self.split_bytes(s)
        return self.dot_pairs(odd, s_odd, self.dot_pairs(even, s_even, total))

    # -- calls
    def _call(self, name: str, result: Any, *values: Value) -> Value:
        kind = ir.FunctionType(result, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values)

    def _by(self, name: str, operand: Any, result: Any, x: Value, y: Value) -> Value:
        """Call with vectors seen as ``operand``; the result seen as int32 lanes."""
        found = self._call(name, result, self.b.bitcast(x, operand), self.b.bitcast(y, operand))
        return self.b.bitcast(found, I32S)

    def _by_halves(self, name: str, lanes: int, element: Any, x: Value, y: Value) -> Value:
        """Call a 256-bit instruction on both halves."""
        operand = _vector(element, lanes)
        result = {"wd": _vector(I32, 8), "sw": _vector(I16, 16)}.get(name[-2:], operand)
        found = []
        for first in (0, 8):
            pick = ir.Constant(_vector(I32, 8), list(range(first, first + 8)))
            parts = [self.b.bitcast(self.b.shuffle_vector(v, v, pick), operand) for v in (x, y)]
            found.append(self.b.bitcast(self._call(name, result, *parts), _vector(I32, 8)))
        both = ir.Constant(I32S, list(range(LANES)))
        return self.b.shuffle_vector(found[0], found[1], both)

    def reduce(self, name: str, x: Value) -> Value:
        """The lanes of an i32x16 folded into one: add or umax."""
        return self._call(f"llvm.vector.reduce.{name}.v16i32", I32, x)
