"""Emitter of LLVM code for vectors of 16 lanes, which microkernels are written with.

An `Emitter` emits instructions at the builder's position. A vector always has 16 lanes of 32 bits
(`i32x16`, `f32x16`), one per interleaved row of a weight matrix; LLVM splits it into registers: one
on AVX-512, two on AVX2, four elsewhere. Bytes and pairs of int16 are stored in int32 lanes, and
methods that treat lanes so say it. Addresses are int64.

Integer arithmetic is exact on every target. Float operations carry a flag that makes Numba's
fast-math pass skip them, so they are not reassociated or contracted: a microkernel gives the same
bits on every target, unless it calls `madd`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..runtime.lazy_numba import ir
from .vectors import (  # fmt: skip
    BYTES,
    F16,
    F32,
    F32S,
    I8,
    I8S,
    I16,
    I16S,
    I32,
    I32S,
    I64,
    LANES,
    VECTOR,
    WORDS,
    Value,
    VectorBuilder,
    vector,
)

Pairs = Sequence[tuple[Value, Value]]

SIGN_BITS = 0x80808080  # of four bytes


class Emitter(VectorBuilder):
    """Emits vector code with an llvmlite ``builder`` for the target ``features``."""

    # -- bytes and pairs of int16
    def add_bytes(self, x: Value, value: int) -> Value:
        """Add a number to each byte, modulo 256."""
        each = ir.Constant(BYTES, [value] * BYTES.count)
        return self.b.bitcast(self.b.add(self.b.bitcast(x, BYTES), each), I32S)

    def lookup_bytes(self, x: Value, table: Sequence[int]) -> Value:
        """Replace each byte of x, which is below 16, by that entry of a table of 16 bytes."""
        if self.isa.avx2:
            entries = self.b.bitcast(ir.Constant(BYTES, [*table] * 4), I32S)
            return self._shuffle_bytes(entries, x)
        index, zero = self.b.bitcast(x, BYTES), ir.Constant(BYTES, None)
        found = [ir.Constant(BYTES, [entry] * BYTES.count) for entry in table]
        for bit in (1, 2, 4, 8):
            only = self.b.and_(index, ir.Constant(BYTES, [bit] * BYTES.count))
            odd = self.b.icmp_unsigned("!=", only, zero)
            pairs = zip(found[::2], found[1::2])
            found = [self.b.select(odd, high, low) for low, high in pairs]
        return self.b.bitcast(found[0], I32S)

    def _shuffle_bytes(self, x: Value, indices: Value) -> Value:
        """Bytes of x at indices within 16 bytes; 0 for indices of 128 and more. Needs AVX2."""
        if self.isa.avx512:
            return self._call_as("llvm.x86.avx512.pshuf.b.512", BYTES, BYTES, x, indices)
        return self._call_per_half("llvm.x86.avx2.pshuf.b", 32, I8, x, indices)

    def duplicate_i16(self, x: Value) -> Value:
        """Duplicate int32 lanes that fit int16 as pairs of int16."""
        return self.pack_i16(x, x)

    def pack_i16(self, low: Value, high: Value) -> Value:
        """Pack two vectors of int32 lanes that fit int16 as pairs of int16."""
        return self.b.or_(self.mask(low, 0xFFFF), self.shl(high, 16))

    def select_lanes(self, x: Value, lanes: Sequence[int]) -> Value:
        """Select lanes of x; the lanes that follow are undefined."""
        chosen = [*lanes, *[0] * (LANES - len(lanes))]
        return self.b.shuffle_vector(x, x, ir.Constant(I32S, chosen))

    def low_i16(self, x: Value) -> Value:
        """Low int16 of each pair as int32."""
        return self.sar(self.shl(x, 16), 16)

    def high_i16(self, x: Value) -> Value:
        """High int16 of each pair as int32."""
        return self.sar(x, 16)

    def dot_i16(self, x: Value, y: Value, total: Value | None = None) -> Value:
        """``total`` plus the dot product of the int16 pairs in each lane."""
        if self.isa.vnni and total is not None:
            return self._vnni("vpdpwssd", total, x, y)
        if self.isa.avx512:
            found = self._call_as("llvm.x86.avx512.pmaddw.d.512", WORDS, I32S, x, y)
        elif self.isa.avx2:
            found = self._call_per_half("llvm.x86.avx2.pmadd.wd", 16, I16, x, y)
        else:
            first = self.b.mul(self.low_i16(x), self.low_i16(y))
            found = self.b.add(first, self.b.mul(self.high_i16(x), self.high_i16(y)))
        return self._add_to(total, found)

    def _vnni(self, name: str, total: Value, x: Value, y: Value) -> Value:
        """A VNNI instruction: ``total`` plus dot products of x and y in each lane."""
        if self.isa.avx512:
            return self._call(f"llvm.x86.avx512.{name}.512", I32S, total, x, y)
        return self._call_per_half(f"llvm.x86.avx512.{name}.256", 8, I32, total, x, y)

    def dot_bytes(self, pairs: Pairs, largest: int, total: Value | None = None) -> Value:
        """``total`` plus the dot products of bytes u and s in each lane, of all pairs (u, s).

        u is unsigned and at most ``largest``, s is signed and not -128.
        """
        if self.isa.vnni:
            for u, s in pairs:
                total = self._vnni("vpdpbusd", self.i32(0) if total is None else total, u, s)
            return total
        if self.isa.dotprod and largest < 128:
            return self.dot_signed_bytes(pairs, total)
        if self.isa.avx2 and 2 * largest * 127 < 1 << 15:
            for run in self._i16_sums(pairs, largest):
                total = self.dot_i16(run, self.i32(0x00010001), total)
            return total
        for u, s in pairs:
            even, odd = self.mask(u, 0x00FF00FF), self.mask(self.shr(u, 8), 0x00FF00FF)
            total = self._dot_split(even, odd, s, total)
        return total

    def dot_signed_bytes(self, pairs: Pairs, total: Value | None = None) -> Value:
        """As `dot_bytes`, for signed u and s, with s not -128. Not for VNNI."""
        for w, s in pairs:
            if self.isa.avx2:
                total = self.dot_i16(self._multiply_by_sign(w, s), self.i32(0x00010001), total)
            elif self.isa.dotprod:
                total = self._dot_arm(self.i32(0) if total is None else total, w, s)
            else:
                total = self._dot_split(*self.split_bytes(w), s, total)
        return total

    def _dot_arm(self, total: Value, w: Value, s: Value) -> Value:
        """``total`` plus dot products of signed bytes in each lane; four instructions."""
        words, found = vector(I32, 4), []
        for first in range(0, LANES, 4):
            pick = ir.Constant(words, list(range(first, first + 4)))
            part, *values = (self.b.shuffle_vector(v, v, pick) for v in (total, w, s))
            halves = [self.b.bitcast(v, vector(I8, 16)) for v in values]
            found.append(self._call("llvm.aarch64.neon.sdot.v4i32.v16i8", words, part, *halves))
        eight = ir.Constant(vector(I32, 8), list(range(8)))
        low, high = (self.b.shuffle_vector(*found[at : at + 2], eight) for at in (0, 2))
        return self.b.shuffle_vector(low, high, ir.Constant(I32S, list(range(LANES))))

    def scale(self, bytes_: Value, index: int, signed: bool, narrow: bool = False) -> Value:
        """Byte ``index`` of each lane as an operand of `add_scaled` or, if `i16_terms` is not 0,
        of `dot_i16`."""
        if not self._scales_pairs:
            scale = self.signed_byte(bytes_, index) if signed else self.byte(bytes_, index)
            return self.mask(scale, 0xFFFF) if narrow and signed else scale
        return self.byte_pairs(bytes_, index, signed)

    def byte_pairs(self, bytes_: Value, index: int, signed: bool) -> Value:
        """Byte ``index`` of each lane as a pair of equal int16. Needs AVX2."""
        pair = (0x80, index) * 2 if signed else (index, 0x80) * 2
        lanes = [min(4 * lane + byte, 0x80) for lane in range(4) for byte in pair]
        indices = self.b.bitcast(ir.Constant(BYTES, lanes * 4), I32S)
        found = self._shuffle_bytes(bytes_, indices)
        return self.high_bytes(found, signed) if signed else found

    def add_scaled(
        self, x: Value, scale: Value, total: Value | None = None, narrow: bool = False
    ) -> Value:
        """``total`` plus x times a scale in each lane; ``narrow``: x fits int16."""
        if narrow:  # the high half of x, which is its sign, is multiplied by 0
            return self.dot_i16(x, scale, total)
        return self._add_to(total, self.b.mul(x, scale))

    @property
    def _scales_pairs(self) -> bool:
        """Whether the multiplication that widens int16 to int32 applies the scale (no VNNI)."""
        return self.isa.avx2 and not self.isa.vnni

    def _add_to(self, total: Value | None, x: Value) -> Value:
        return x if total is None else self.b.add(total, x)

    def i16_terms(self, largest: int, signed: bool) -> int:
        """How many `multiply_bytes` have a sum that fits int16; 0 if dots are not computed so."""
        if self.isa.vnni or not self.isa.avx2:
            return 0
        return 1 if signed else ((1 << 15) - 1) // (2 * largest * 127)

    def multiply_bytes(self, w: Value, s: Value, signed: bool) -> Value:
        """Sums of two adjacent products in int16, for operands as in `dot_bytes` or, if ``signed``,
        `dot_signed_bytes`. Needs AVX2."""
        return self._multiply_by_sign(w, s) if signed else self._multiply_bytes(w, s)

    def _i16_sums(self, pairs: Pairs, largest: int) -> Iterable[Value]:
        """Sum byte products in int16; each sum has as many pairs as cannot overflow."""
        most = ((1 << 15) - 1) // (2 * largest * 127)
        for start in range(0, len(pairs), most):
            run = None
            for u, s in pairs[start : start + most]:
                product = self._multiply_bytes(u, s)
                run = product if run is None else self.add_i16(run, product)
            yield run

    def add_i16(self, x: Value, y: Value) -> Value:
        """Add int16 lanes."""
        words = self.b.add(self.b.bitcast(x, WORDS), self.b.bitcast(y, WORDS))
        return self.b.bitcast(words, I32S)

    def keep(self, x: Value) -> Value:
        """x, hidden from the optimiser. It would reorder a long sum to a tree, whose partial sums
        do not fit the 16 registers of AVX2. Emits no instruction; elsewhere, nothing is hidden."""
        if not self.isa.avx2 or self.isa.avx512:
            return x
        half, whole = vector(I32, LANES // 2), ir.Constant(I32S, list(range(LANES)))
        hide = ir.InlineAsm(ir.FunctionType(half, [half]), "", "=x,0")
        parts = [
            self.b.call(hide, [self.b.shuffle_vector(x, x, ir.Constant(half, list(lanes)))])
            for lanes in (range(LANES // 2), range(LANES // 2, LANES))
        ]
        return self.b.shuffle_vector(*parts, whole)

    def shl_i16(self, x: Value, count: int) -> Value:
        """Shift int16 lanes left."""
        by = ir.Constant(WORDS, [count] * WORDS.count)
        return self.b.bitcast(self.b.shl(self.b.bitcast(x, WORDS), by), I32S)

    def multiply_i16(self, x: Value, y: Value) -> Value:
        """Low halves of the products of int16 lanes."""
        words = self.b.mul(self.b.bitcast(x, WORDS), self.b.bitcast(y, WORDS))
        return self.b.bitcast(words, I32S)

    def negative_i16(self, x: Value) -> Value:
        """Minus int16 lanes."""
        zero = ir.Constant(WORDS, None)
        return self.b.bitcast(self.b.sub(zero, self.b.bitcast(x, WORDS)), I32S)

    def multiply_high_i16(self, x: Value, y: Value) -> Value:
        """High halves of the products of int16 lanes. Needs AVX-512."""
        return self._call_as("llvm.x86.avx512.pmulh.w.512", WORDS, WORDS, x, y)

    def _multiply_bytes(self, u: Value, s: Value) -> Value:
        """u0 * s0 + u1 * s1 and u2 * s2 + u3 * s3 in int16, without overflow. Needs AVX2."""
        if self.isa.avx512:
            return self._call_as("llvm.x86.avx512.pmaddubs.w.512", BYTES, WORDS, u, s)
        return self._call_per_half("llvm.x86.avx2.pmadd.ub.sw", 32, I8, u, s)

    def multiply_by_magnitude(self, w: Value, s: Value) -> Value:
        """As `multiply_bytes` of signed bytes, for w other than -128: |s| times w with the sign of
        s. It is faster than |w| times s if s is a broadcast, whose magnitude one register holds.
        Needs AVX2."""
        if self.isa.avx512:
            return self._multiply_by_sign(w, s)
        size, zero = self.b.bitcast(s, BYTES), ir.Constant(BYTES, None)
        below = self.b.icmp_signed("<", size, zero)
        size = self.b.bitcast(self.b.select(below, self.b.sub(zero, size), size), I32S)
        moved = self._call_per_half("llvm.x86.avx2.psign.b", 32, I8, w, s)
        return self._multiply_bytes(size, moved)

    def _multiply_by_sign(self, w: Value, s: Value) -> Value:
        """Multiply |w| by s with the sign of w, as 2 * 128 * 127 fits int16."""
        size, moved = self.b.bitcast(w, BYTES), self.b.bitcast(s, BYTES)
        zero = ir.Constant(BYTES, None)
        below = self.b.icmp_signed("<", size, zero)
        size = self.b.select(below, self.b.sub(zero, size), size)
        if self.isa.avx512:
            moved = self.b.select(below, self.b.sub(zero, moved), moved)
        else:
            moved = self._call_per_half("llvm.x86.avx2.psign.b", 32, I8, s, w)
        return self._multiply_bytes(self.b.bitcast(size, I32S), self.b.bitcast(moved, I32S))

    def split_bytes(self, x: Value, signed: bool = True) -> tuple[Value, Value]:
        """Bytes 0 and 2, and bytes 1 and 3, of each lane as pairs of int16."""
        if not signed:
            return self.mask(x, 0x00FF00FF), self.high_bytes(x, signed)
        eight = ir.Constant(WORDS, [8] * WORDS.count)
        moved = self.b.bitcast(self.b.shl(self.b.bitcast(x, WORDS), eight), I32S)
        return self.high_bytes(moved, signed=True), self.high_bytes(x, signed=True)

    def high_bytes(self, x: Value, signed: bool) -> Value:
        """Bytes 1 and 3 of each lane as pairs of int16, sign-extended if ``signed``."""
        shift, words = self.b.ashr if signed else self.b.lshr, self.b.bitcast(x, WORDS)
        return self.b.bitcast(shift(words, ir.Constant(WORDS, [8] * WORDS.count)), I32S)

    def _dot_split(self, even: Value, odd: Value, s: Value, total: Value | None) -> Value:
        s_even, s_odd = self.split_bytes(s)
        return self.dot_i16(odd, s_odd, self.dot_i16(even, s_even, total))


__all__ = ["F16", "F32", "F32S", "I8", "I8S", "I16", "I16S", "I32", "I32S", "I64", "LANES",
           "SIGN_BITS", "VECTOR", "Emitter", "Value"]  # fmt: skip
