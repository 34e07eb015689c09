"""Loops that do nothing but move vectors, or nothing but multiply and add: `ceiling.py` times them.

They are written with what all kernels here are written with, so that no kernel can be faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numba import types
from numba.extending import intrinsic

from ..formats import FORMATS
from ..simd.emitter import F16, F32S, I32S, I64, VECTOR, Emit, Value
from ..simd.vectors import vector
from .isa import ISA, isa
from .jit import Kernel, args, i64s, kernel, next_chunk

ITERATION_BYTES = 4 * VECTOR  # bytes that a turn of a loop over memory moves
_CHUNK = 256 << 10  # bytes that a thread takes at a time
_PREFETCH_BYTES = 1024  # bytes between a load and what is asked for
FACTOR_PERIOD = 16  # turns after which the factors of multiply-adds are the same again
FACTOR_VECTORS = 2 * FACTOR_PERIOD  # vectors that factors are taken from; they fit the L1 cache
_ONE = 0x3F800000  # the float32 1.0, which is written
_HALVES = vector(F16, VECTOR // 2)
_LEAST = min(form.largest for form in FORMATS.values() if form.block > 1)  # of largest numbers


# -------------------------------------------------------------------------------------- over memory


def _mover(reads: bool, writes: bool, ahead: int) -> Any:
    """``move(source, target, nbytes)``, whole turns: an int64 that depends on all that was read.

    Stores go past the caches: a line that is stored to in a cache is read from memory first.
    """

    @intrinsic
    def move(typingctx, source, target, nbytes):
        def generate(context, builder, sig, values):
            e = Emit(builder)
            sums = [e.variable(e.i32(0)) for _ in range(ITERATION_BYTES // VECTOR)]
            with e.loop(e.b.sdiv(values[2], e.count(ITERATION_BYTES))) as loop:
                at, to = (e.at(base, e.times(loop.index, ITERATION_BYTES)) for base in values[:2])
                for i, total in enumerate(sums):
                    value = _read(e, at, i * VECTOR, ahead) if reads else e.i32(_ONE)
                    if writes:
                        e.store_nontemporal(value, to, i * VECTOR)
                    else:
                        e.set(total, e.b.xor(e.get(total), value))
            return _xor_lanes(e, [e.get(total) for total in sums])

        return types.int64(*[types.int64] * 3), generate

    return move


def _read(e: Emit, at: Value, offset: int, ahead: int) -> Value:
    if ahead:
        e.prefetch(at, ahead + offset)
    return e.load(at, offset=offset)


def _xor_lanes(e: Emit, vectors: list[Value]) -> Value:
    """All bits of some vectors in an int64, so that none is left out."""
    found = e.b.bitcast(vectors[0], I32S)
    for each in vectors[1:]:
        found = e.b.xor(found, e.b.bitcast(each, I32S))
    return e.b.zext(e.reduce("add", found), I64)


def memory_kernel(reads: bool, writes: bool) -> Kernel:
    """Arguments: source, target, bytes, and an int64 for each thread that keeps what was read."""
    move = _mover(reads, writes, _PREFETCH_BYTES)

    @kernel(key=("over memory", reads, writes, _PREFETCH_BYTES, ITERATION_BYTES))
    def run(p, thread, threads):
        source, target, nbytes, sink = args(p, 4)
        chunk, total = next_chunk(p), 0
        while chunk * _CHUNK < nbytes:
            at = chunk * _CHUNK
            total += move(source + at, target + at, min(_CHUNK, nbytes - at))
            chunk = next_chunk(p)
        i64s(sink)[thread] = total

    return run


_read_cached = _mover(True, False, 0)


@kernel(key=("read_cached", ITERATION_BYTES))
def read_cached(p, thread, threads):
    """All of a piece of memory, by every thread, so many times; each begins at another place."""
    start, nbytes, times, sink = args(p, 4)
    first = nbytes // threads * thread // ITERATION_BYTES * ITERATION_BYTES
    total = 0
    for _ in range(times):
        total += _read_cached(start + first, start, nbytes - first)
        total += _read_cached(start, start, first)
    i64s(sink)[thread] = total


read, write = memory_kernel(True, False), memory_kernel(False, True)
copy = memory_kernel(True, True)


# ------------------------------------------------------------------------------------ in registers


@dataclass(frozen=True)
class MultiplyAddLoop:
    """How the target multiplies and adds at its highest rate.

    A turn of the loop adds products to ``sums`` independent vectors: to each those of ``owns``
    vectors, which stay in registers, with ``factors`` vectors, which the turn loads. There are
    enough sums to hide the latency of the instructions, and few enough for the registers.

    Attributes:
        form: type of the vectors, of 64 bytes each.
        operations: of the product of two vectors that is added to a third, two per multiply-add.
        how: the instructions, as `graphllm doctor` names them.
        fused: whether the product and the sum are one instruction, so that all sums may be of the
            same vectors. Otherwise the compiler would compute their product once.
    """

    form: Any
    operations: int
    how: str
    sums: int
    owns: int = 1
    factors: int = 1
    fused: bool = True

    @property
    def sets(self) -> int:
        """How many sets of ``owns`` vectors differ."""
        return 1 if self.fused else self.sums

    @property
    def operations_per_iteration(self) -> int:
        """Operations of a turn."""
        return self.operations * self.sums * self.owns * self.factors


def multiply_add_loops(target: ISA | None = None) -> dict[str, MultiplyAddLoop]:
    """The multiply-adds of the target by kind: ``f32``, ``int8``, and ``f16`` where it has them."""
    target = target or isa()
    fused = target.avx2 or not target.x86
    # FMA and vpdpbusd have a latency of 4 or 5 cycles and start twice a cycle. A vector is one
    # register of 32 on AVX-512, two of 16 on AVX2, four of 16 on other x86, four of 32 on Arm.
    sums = 12 if target.avx512 else 5 if fused else 2
    name = "fused" if fused else "a product and a sum"
    found = {"f32": MultiplyAddLoop(F32S, 2 * 16, name, sums, fused=fused)}
    if target.fp16:
        found["f16"] = MultiplyAddLoop(_HALVES, 2 * 32, "fused, which no kernel here uses", sums)
    if target.vnni:
        found["int8"] = MultiplyAddLoop(I32S, 2 * 64, "vpdpbusd", sums)
    elif target.avx2:
        # Products of small numbers are added in int16 first: up to 43 of q2_k's, which are least.
        each = "vpmaddubsw and vpaddw; vpmaddwd and vpaddd after 42 of them"
        found["int8"] = MultiplyAddLoop(
            I32S, 2 * 64, each, 2 if target.avx512 else 1, 3, 14, fused=False
        )
    else:  # bytes are extended to int16
        found["int8"] = MultiplyAddLoop(I32S, 2 * 32, "products of int16", 2, fused=False)
    return found


def instruction_names() -> dict[str, str]:
    """By kind, the instructions that multiply and add here, or why there are none."""
    none = {"f16": "not on this processor: kernels widen to float32"}
    return none | {kind: chain.how for kind, chain in multiply_add_loops().items()}


def _plus(e: Emit, kind: str, total: Value, owns: list[Value], factors: list[Value]) -> Value:
    """``total`` plus all products, which int8 adds up in each lane of 32 bits."""
    if kind == "f32":
        return e.madd(owns[0], factors[0], total)
    if kind == "f16":
        return e.madd_f16(owns[0], factors[0], total)
    if e.isa.avx2:
        return e.dot_bytes([(own, factor) for factor in factors for own in owns], _LEAST, total)
    return e.dot_i16(owns[0], factors[0], total)


def emit_multiply_add(e: Emit, kind: str, operands: Value, turns: Value) -> Value:
    """Emit the loop over ``turns`` with `FACTOR_VECTORS` vectors at ``operands``.

    Sum i starts as vector i. Returns an int64 that depends on all sums.
    """
    chain = multiply_add_loops(e.isa)[kind]
    first = [e.load(operands, chain.form, i * VECTOR) for i in range(max(8, chain.sums))]
    totals = [e.variable(first[i]) for i in range(chain.sums)]
    with e.loop(turns) as loop:
        # Other factors in each turn: what stays the same would be computed before the loop.
        which = e.b.and_(loop.index, e.count(FACTOR_PERIOD - 1))
        at = e.at(operands, e.times(which, VECTOR))
        factors = [e.load(at, chain.form, i * VECTOR) for i in range(chain.factors)]
        for i, total in enumerate(totals):
            begin = i % chain.sets * chain.owns
            owns = first[begin : begin + chain.owns]
            e.set(total, _plus(e, kind, e.get(total), owns, factors))
    return _xor_lanes(e, [e.get(total) for total in totals])


def multiply_add(kind: str) -> tuple[Kernel, int]:
    """Return a kernel and its operations per iteration.

    Arguments: `FACTOR_VECTORS` vectors, iterations, and an int64 for each thread.
    """

    @intrinsic
    def multiply(typingctx, operands, turns):
        def generate(context, builder, sig, values):
            return emit_multiply_add(Emit(builder), kind, *values)

        return types.int64(types.int64, types.int64), generate

    @kernel(key=("multiply_add", kind))
    def run(p, thread, threads):
        operands, turns, sink = args(p, 3)
        i64s(sink)[thread] = multiply(operands, turns)

    return run, multiply_add_loops()[kind].operations_per_iteration
