"""Base of `simd.emitter.Emitter`: addresses, loops, memory, constants and lane-wise arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..runtime.isa import ISA, isa
from ..runtime.lazy_numba import activate, cgutils, ir, lazy

Value = Any  # an llvmlite value

LANES = 16
VECTOR = 64  # bytes of a vector
L1_PREFETCH_BYTES, L2_PREFETCH_BYTES = 1024, 4096  # prefetch distances into each cache level

I8, I16 = lazy(lambda: ir.IntType(8)), lazy(lambda: ir.IntType(16))
I32, I64 = lazy(lambda: ir.IntType(32)), lazy(lambda: ir.IntType(64))
F16, F32 = lazy(lambda: ir.HalfType()), lazy(lambda: ir.FloatType())


def vector(element: Any, lanes: int = LANES) -> Any:
    return ir.VectorType(element, lanes)


I8S, I16S = lazy(lambda: vector(ir.IntType(8))), lazy(lambda: vector(ir.IntType(16)))
I32S = lazy(lambda: vector(ir.IntType(32)))
F16S, F32S = lazy(lambda: vector(ir.HalfType())), lazy(lambda: vector(ir.FloatType()))
BYTES = lazy(lambda: vector(ir.IntType(8), 4 * LANES))
WORDS = lazy(lambda: vector(ir.IntType(16), 2 * LANES))
# Numba's fast-math pass skips operations that have a flag already. "afn" has no effect on addition
# and multiplication, "nsz" none on the quotient of positive numbers.
_EXACT, _EXACT_QUOTIENT = ("afn",), ("nsz",)


class VectorBuilder:
    """Emitter of the operations that all vector code uses; see `simd.emitter.Emitter`."""

    def __init__(self, builder: Any, features: ISA | None = None) -> None:
        activate()  # the types above are used as they are
        self.b = builder
        self.isa = features or isa()
        self._prefetch: Callable[[Value, int], None] | None = None
        self._prefetched: set[tuple[int, int]] = set()

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
        """Emit a counted loop: ``with e.loop(n) as loop: ... loop.index ...``"""
        count = self.count(count) if isinstance(count, int) else count
        return cgutils.for_range(self.b, count, intp=I64)

    def variable(self, first: Value) -> Value:
        """Make a variable that can change in loops, with an initial value; see `get` and `set`."""
        place = cgutils.alloca_once(self.b, first.type)
        self.b.store(first, place)
        return place

    def get(self, variable: Value) -> Value:
        return self.b.load(variable)

    def set(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    def keep_order(self) -> None:
        """Keep loads and stores before this place before those after it; emits no instruction.

        LLVM would begin an unrolled loop with all of its loads, and spill them.
        """
        kind = ir.FunctionType(ir.VoidType(), [])
        self.b.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    # -- memory
    def _pointer(self, address: Value, kind: Any, offset: int) -> Value:
        return self.b.inttoptr(self.at(address, offset), kind.as_pointer())

    def load(
        self, address: Value, kind: Any = None, offset: int = 0, streamed: bool = True
    ) -> Value:
        """Load a vector (i32x16 by default) or a number from an address of any alignment.

        ``streamed``: whether a vector is part of what `prefetching` prefetches.
        """
        kind = I32S if kind is None else kind  # not as the default, which would be a lazy value
        loaded = self.b.load(self._pointer(address, kind, offset))
        loaded.align = 1
        place = address, offset // VECTOR
        streamed = streamed and isinstance(kind, ir.VectorType)
        if self._prefetch and streamed and place not in self._prefetched:
            self._prefetched.add(place)
            self._prefetch(address, offset)
        return loaded

    @contextmanager
    def prefetching(self, distance: Value | None = None) -> Iterator[None]:
        """In this context each vector load also prefetches ahead, once; see `prefetch_ahead`.

        ``distance``: instead, prefetch into L2 only, this number of bytes ahead. Prefetches between
        other instructions are faster than many prefetches in a row.
        """

        def far(address: Value, offset: int) -> None:
            self.prefetch(self.at(address, distance), offset, level=2)

        self._prefetch = self.prefetch_ahead if distance is None else far
        yield
        self._prefetch = None
        self._prefetched.clear()

    def stack_buffer(self, nbytes: int) -> Value:
        """Address of ``nbytes`` bytes on the stack, aligned to a vector."""
        with self.b.goto_entry_block():
            # Numba's alloca_once would also store zeros.
            area = self.b.alloca(ir.ArrayType(I8, nbytes))
        area.align = VECTOR
        return self.b.ptrtoint(area, I64)

    def store(self, value: Value, address: Value, offset: int = 0) -> None:
        self.b.store(value, self._pointer(address, value.type, offset)).align = 1

    def store_nontemporal(self, value: Value, address: Value, offset: int = 0) -> None:
        """Store a vector at a multiple of its size, bypassing the caches."""
        stored = self.b.store(value, self._pointer(address, value.type, offset))
        stored.align = VECTOR
        stored.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(I32, 1)]))

    def load_f32(self, address: Value, offset: int = 0) -> Value:
        """Load 16 float32."""
        return self.load(address, F32S, offset)

    def load_f16(self, address: Value, offset: int = 0) -> Value:
        """Load 16 float16 as f32x16."""
        return self.half_to_f32(self.load(address, I16S, offset))

    def half_to_f32(self, x: Value) -> Value:
        """Upcast 16 float16, given by their bits as i16x16, to f32x16."""
        if self.isa.f16c:
            return self.b.fpext(self.b.bitcast(x, F16S), F32S)
        bits = self.b.zext(x, I32S)
        # After the shift the exponent is 112 too small. A product corrects that, also for
        # subnormals; the largest exponent means infinity or NaN.
        size = self.b.bitcast(self.shl(self.mask(bits, 0x7FFF), 13), F32S)
        value = self.b.bitcast(self.mul(size, self.f32(2.0**112)), I32S)
        is_inf_or_nan = self.b.icmp_unsigned(">=", self.mask(bits, 0x7FFF), self.i32(0x7C00))
        value = self.b.select(is_inf_or_nan, self.bits(value, 0x7F800000), value)
        return self.b.bitcast(self.b.or_(value, self.shl(self.mask(bits, 0x8000), 16)), F32S)

    def load_bf16(self, address: Value, offset: int = 0) -> Value:
        """Load 16 bfloat16 as f32x16."""
        bits = self.b.zext(self.load(address, I16S, offset), I32S)
        return self.b.bitcast(self.shl(bits, 16), F32S)

    def load_e8m0_half(self, address: Value, offset: int = 0) -> Value:
        """Load 16 bytes e as f32x16 2 ** (e - 128), which is subnormal if e is 0 or 1."""
        exponent = self.shl(self.b.zext(self.load(address, I8S, offset), I32S), 23)
        least = self.i32(0x00400000)  # half of the least normal number
        exponent = self.b.select(self.b.icmp_unsigned(">", exponent, least), exponent, least)
        return self.mul(self.b.bitcast(exponent, F32S), self.f32(0.5))

    def prefetch(self, address: Value, offset: int = 0, level: int = 1) -> None:
        """Prefetch the cache line into the cache of a level; the address need not be valid."""
        pointer = self._pointer(address, I8, offset)
        hints = [
            ir.Constant(I32, v) for v in (0, 4 - level, 1)
        ]  # for reading, locality, data cache
        self._call("llvm.prefetch.p0", ir.VoidType(), pointer, *hints)

    def prefetch_ahead(self, address: Value, offset: int = 0) -> None:
        """Prefetch what follows the line at the address, in memory that is read once, in order.

        The longer distance is prefetched into L2, which can have many outstanding misses. L1 has
        only about a dozen, so a line is prefetched into it when it is in L2 already.
        """
        self.prefetch(address, offset + L2_PREFETCH_BYTES, level=2)
        self.prefetch(address, offset + L1_PREFETCH_BYTES)

    def prefetch_lines(
        self, addresses: list[Value], index: Value, lines: Value, level: int = 2
    ) -> None:
        """Prefetch ``lines`` cache lines after each address, following those of the iterations
        before ``index`` of a loop, into the cache of a level."""
        # Marked unlikely, so that the code around it gets the registers.
        with self.b.if_then(self.b.icmp_signed(">", lines, self.count(0)), likely=False):
            first = self.b.mul(index, lines)
            with self.loop(lines) as loop:
                at = self.times(self.b.add(first, loop.index), VECTOR)
                for address in addresses:
                    self.prefetch(self.at(address, at), level=level)

    # -- constants and broadcasts
    def i32(self, value: int) -> Value:
        signed = value - (1 << 32) if value >= 1 << 31 else value
        return ir.Constant(I32S, [signed] * LANES)

    def f32(self, value: float) -> Value:
        return ir.Constant(F32S, [value] * LANES)

    def splat(self, value: Value) -> Value:
        """Broadcast a number to all lanes."""
        kind = vector(value.type)
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(I32S, [0] * LANES))

    def broadcast_i32(self, address: Value, offset: int = 0) -> Value:
        """Load an int32 (or four bytes, or two int16) and broadcast it to all lanes."""
        return self.splat(self.load(address, I32, offset))

    def broadcast_f32(self, address: Value, offset: int = 0) -> Value:
        return self.splat(self.load(address, F32, offset))

    # -- float arithmetic
    def add(self, x: Value, y: Value) -> Value:
        return self.b.fadd(x, y, flags=_EXACT)

    def sub(self, x: Value, y: Value) -> Value:
        return self.b.fsub(x, y, flags=_EXACT)

    def mul(self, x: Value, y: Value) -> Value:
        return self.b.fmul(x, y, flags=_EXACT)

    def divide_positive(self, x: Value, y: Value) -> Value:
        """x / y, correctly rounded, for positive numbers."""
        return self.b.fdiv(x, y, flags=_EXACT_QUOTIENT)

    def madd(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z, rounded once if the target has fused multiply-add, else twice."""
        if self.isa.x86 and not self.isa.avx2:
            return self.add(self.mul(x, y), z)
        return self._call("llvm.fma.v16f32", F32S, x, y, z)

    def madd_f16(self, x: Value, y: Value, z: Value) -> Value:
        """`madd` of 32 float16, for targets with float16 arithmetic."""
        return self._call("llvm.fma.v32f16", z.type, x, y, z)

    def to_f32(self, x: Value) -> Value:
        """Convert int32 lanes to float32, to nearest even."""
        return self.b.sitofp(x, F32S)

    # -- integer arithmetic on int32 lanes
    def mask(self, x: Value, mask: int) -> Value:
        return self.b.and_(x, self.i32(mask))

    def bits(self, x: Value, mask: int) -> Value:
        return self.b.or_(x, self.i32(mask))

    def shl(self, x: Value, count: int) -> Value:
        return self.b.shl(x, self.i32(count)) if count else x

    def shr(self, x: Value, count: int) -> Value:
        """Logical shift right."""
        return self.b.lshr(x, self.i32(count)) if count else x

    def sar(self, x: Value, count: int) -> Value:
        """Arithmetic shift right."""
        return self.b.ashr(x, self.i32(count)) if count else x

    def signed_byte(self, x: Value, index: int) -> Value:
        """Byte ``index`` of each lane, sign-extended."""
        return self.sar(self.shl(x, 24 - 8 * index), 24)

    def byte(self, x: Value, index: int) -> Value:
        """Byte ``index`` of each lane, zero-extended."""
        return self.mask(self.shr(x, 8 * index), 0xFF) if index < 3 else self.shr(x, 24)

    # -- calls
    def _call(self, name: str, result: Any, *values: Value) -> Value:
        kind = ir.FunctionType(result, [v.type for v in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values)

    def _call_as(self, name: str, operand: Any, result: Any, x: Value, y: Value) -> Value:
        """Call a function on vectors cast to ``operand``; the result is cast to int32 lanes."""
        found = self._call(name, result, self.b.bitcast(x, operand), self.b.bitcast(y, operand))
        return self.b.bitcast(found, I32S)

    def _call_per_half(self, name: str, lanes: int, element: Any, *operands: Value) -> Value:
        """Call a 256-bit instruction on both halves of 512-bit vectors."""
        operand = vector(element, lanes)
        result = {"wd": vector(I32, 8), "sw": vector(I16, 16)}.get(name[-2:], operand)
        found = []
        for first in (0, 8):
            pick = ir.Constant(vector(I32, 8), list(range(first, first + 8)))
            halves = (self.b.shuffle_vector(v, v, pick) for v in operands)
            parts = [self.b.bitcast(half, operand) for half in halves]
            found.append(self.b.bitcast(self._call(name, result, *parts), vector(I32, 8)))
        both = ir.Constant(I32S, list(range(LANES)))
        return self.b.shuffle_vector(found[0], found[1], both)

    def reduce(self, name: str, x: Value) -> Value:
        """Reduce the lanes of an i32x16 to one value with add or umax."""
        return self._call(f"llvm.vector.reduce.{name}.v16i32", I32, x)
