"""Kernels of the roofline probes: loops that only move vectors, or only multiply and add.

They use the same primitives as all kernels of this backend, so no kernel can be faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..formats import BLOCK_FORMATS
from ..simd import amx
from ..simd.emitter import F32S, I32S, I64, VECTOR, Emitter, Value
from ..simd.vectors import vector
from .argument_block import argument_reader
from .isa import ISA, isa
from .jit import Kernel, i64s, kernel, next_chunk
from .lazy_numba import intrinsic, ir, lazy, types

ITERATION_BYTES = 4 * VECTOR  # bytes that an iteration of a loop over memory moves
_CHUNK = 256 << 10  # bytes that a thread takes at a time
_PREFETCH_BYTES = 1024  # prefetch distance
FACTOR_PERIOD = 16  # iterations after which the factors of multiply-adds repeat
FACTOR_VECTORS = 2 * FACTOR_PERIOD  # vectors that factors are taken from; they fit the L1 cache
_ONE = 0x3F800000  # bits of the float32 1.0, which is written
_HALVES = lazy(lambda: vector(ir.HalfType(), VECTOR // 2))
_LEAST = min(getattr(form, "largest", 255) for form in BLOCK_FORMATS.values())  # of largest numbers


# -------------------------------------------------------------------------------------- over memory


def _mover(reads: bool, writes: bool, ahead: int) -> Any:
    """Make ``move(source, target, nbytes)``, which returns an int64 that depends on all data read.

    Stores bypass the caches, as a store to a cache reads the line from memory first.
    """

    @intrinsic
    def move(typingctx, source, target, nbytes):
        def generate(context, builder, sig, values):
            e = Emitter(builder)
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


def _read(e: Emitter, at: Value, offset: int, ahead: int) -> Value:
    if ahead:
        e.prefetch(at, ahead + offset)
    return e.load(at, offset=offset)


def _xor_lanes(e: Emitter, vectors: list[Value]) -> Value:
    """Combine some vectors to an int64 that depends on all their bits."""
    found = e.b.bitcast(vectors[0], I32S)
    for each in vectors[1:]:
        found = e.b.xor(found, e.b.bitcast(each, I32S))
    return e.b.zext(e.reduce("add", found), I64)


class MemoryArgs(NamedTuple):
    """Argument block of kernels that move memory."""

    source: int
    target: int
    nbytes: int
    sink: int = 0  # int64 per thread that depends on the data read


class CacheArgs(NamedTuple):
    """Argument block of `read_cached`."""

    source: int
    nbytes: int
    repetitions: int
    sink: int = 0


_read_memory, _read_cache = argument_reader(MemoryArgs), argument_reader(CacheArgs)


def memory_kernel(reads: bool, writes: bool) -> Kernel:
    """Make a kernel that moves memory."""
    move = _mover(reads, writes, _PREFETCH_BYTES)

    @kernel(key=("over memory", reads, writes, _PREFETCH_BYTES, ITERATION_BYTES))
    def run(p, thread, threads):
        a = _read_memory(p)
        chunk, total = next_chunk(p), 0
        while chunk * _CHUNK < a.nbytes:
            at = chunk * _CHUNK
            total += move(a.source + at, a.target + at, min(_CHUNK, a.nbytes - at))
            chunk = next_chunk(p)
        i64s(a.sink)[thread] = total

    return run


_read_cached = _mover(True, False, 0)


@kernel(key=("read_cached", ITERATION_BYTES))
def read_cached(p, thread, threads):
    """Every thread reads the same memory repeatedly, each from another start."""
    a = _read_cache(p)
    start, nbytes = a.source, a.nbytes
    first = nbytes // threads * thread // ITERATION_BYTES * ITERATION_BYTES
    total = 0
    for _ in range(a.repetitions):
        total += _read_cached(start + first, start, nbytes - first)
        total += _read_cached(start, start, first)
    i64s(a.sink)[thread] = total


read, write = memory_kernel(True, False), memory_kernel(False, True)
copy = memory_kernel(True, True)


# ------------------------------------------------------------------------------------ in registers


@dataclass(frozen=True)
class MultiplyAddLoop:
    """The loop of multiply-adds with the highest throughput on the target.

    An iteration adds products to ``sums`` independent vectors: each sum gets the products of
    ``owns`` vectors, which stay in registers, with ``factors`` vectors, which the iteration loads.
    There are enough sums to hide the latency of the instructions, and few enough for the registers.

    Attributes:
        form: type of the vectors, of 64 bytes each.
        operations: operations of one product of vectors and its addition, two per multiply-add.
        how: the instructions, as `graphllm doctor` shows them.
        sums: number of independent sums.
        owns: vectors of each sum that stay in registers.
        factors: vectors that an iteration loads.
        fused: whether product and sum are one instruction, so that all sums may use the same
            vectors. Otherwise the compiler would compute their product only once.
        tiles: sums are the four tiles of products of two tiles with two others.
    """

    form: Any
    operations: int
    how: str
    sums: int
    owns: int = 1
    factors: int = 1
    fused: bool = True
    tiles: bool = False

    @property
    def sets(self) -> int:
        """Number of different sets of ``owns`` vectors."""
        return 1 if self.fused else self.sums

    @property
    def operations_per_iteration(self) -> int:
        """Operations of one iteration."""
        return self.operations * self.sums * self.owns * self.factors

    @property
    def iterations(self) -> int:
        """Iterations that take about 50 us, which the start of a run does not distort."""
        return (1 << 28 if self.tiles else 1 << 25) // self.operations_per_iteration


def multiply_add_loops(target: ISA | None = None) -> dict[str, MultiplyAddLoop]:
    """Loops of the target by kind: ``f32``, ``int8``, and ``f16`` if it computes with float16."""
    target = target or isa()
    fused = target.avx2 or not target.x86
    # FMA and vpdpbusd have a latency of 4 or 5 cycles and a throughput of 2 per cycle. A vector is
    # one register of 32 on AVX-512, two of 16 on AVX2, four of 16 on other x86, four of 32 on Arm.
    sums = 12 if target.avx512 else 5 if fused else 2
    name = "fused" if fused else "a product and a sum"
    found = {"f32": MultiplyAddLoop(F32S, 2 * 16, name, sums, fused=fused)}
    if target.fp16:
        found["f16"] = MultiplyAddLoop(_HALVES, 2 * 32, "fused, which no kernel here uses", sums)
    if target.amx:
        operations = 2 * amx.TILE_ROWS * 16 * VECTOR
        found["int8"] = MultiplyAddLoop(I32S, operations, "tdpbssd", 4, tiles=True)
    elif target.vnni:
        found["int8"] = MultiplyAddLoop(I32S, 2 * 64, "vpdpbusd", sums)
    elif target.avx2:
        # Products are added in int16 first: up to 43 of q2_k's, which are the smallest.
        each = "vpmaddubsw and vpaddw; vpmaddwd and vpaddd after 42 of them"
        found["int8"] = MultiplyAddLoop(
            I32S, 2 * 64, each, 2 if target.avx512 else 1, 3, 14, fused=False
        )
    else:  # bytes are extended to int16
        found["int8"] = MultiplyAddLoop(I32S, 2 * 32, "products of int16", 2, fused=False)
    return found


def instruction_names() -> dict[str, str]:
    """By kind, the instructions that multiply and add on this processor, or why there are none."""
    none = {"f16": "not on this processor: kernels convert to float32"}
    return none | {kind: chain.how for kind, chain in multiply_add_loops().items()}


def _plus(e: Emitter, kind: str, total: Value, owns: list[Value], factors: list[Value]) -> Value:
    """``total`` plus all products; those of int8 are summed in lanes of 32 bits."""
    if kind == "f32":
        return e.madd(owns[0], factors[0], total)
    if kind == "f16":
        return e.madd_f16(owns[0], factors[0], total)
    if e.isa.avx2:
        return e.dot_bytes([(own, factor) for factor in factors for own in owns], _LEAST, total)
    return e.dot_i16(owns[0], factors[0], total)


def emit_multiply_add(e: Emitter, kind: str, operands: Value, iterations: Value) -> Value:
    """Emit the loop over ``iterations`` with `FACTOR_VECTORS` vectors at ``operands``.

    Sum i starts as vector i. Returns an int64 that depends on all sums.
    """
    chain = multiply_add_loops(e.isa)[kind]
    if chain.tiles:
        return _emit_tile_products(e, operands, iterations)
    first = [e.load(operands, chain.form, i * VECTOR) for i in range(max(8, chain.sums))]
    totals = [e.variable(first[i]) for i in range(chain.sums)]
    with e.loop(iterations) as loop:
        # Factors change in each iteration, as the compiler would hoist a constant product.
        which = e.b.and_(loop.index, e.count(FACTOR_PERIOD - 1))
        at = e.at(operands, e.times(which, VECTOR))
        factors = [e.load(at, chain.form, i * VECTOR) for i in range(chain.factors)]
        for i, total in enumerate(totals):
            begin = i % chain.sets * chain.owns
            owns = first[begin : begin + chain.owns]
            e.set(total, _plus(e, kind, e.get(total), owns, factors))
    return _xor_lanes(e, [e.get(total) for total in totals])


def _emit_tile_products(e: Emitter, operands: Value, iterations: Value) -> Value:
    """Emit the loop of AMX: products of two tiles at ``operands`` with each other and themselves.

    There are four tiles of sums, which hide the latency of a product.
    """
    shape = amx.TileShape(amx.TILE_ROWS, VECTOR)
    sums, left, right = (0, 1, 2, 3), (4, 5), (6, 7)
    amx.configure(e, [shape] * 8)
    for tile in sums:
        amx.zero(e, tile)
    for i in range(2):
        amx.load(e, left[i], operands if i == 0 else e.at(operands, amx.TILE_BYTES))
        amx.load(e, right[i], e.at(operands, amx.TILE_BYTES) if i == 0 else operands)
    with e.loop(iterations):
        for tile in sums:
            amx.dot(e, tile, left[tile // 2], right[tile % 2], unsigned=False)
    found = e.stack_buffer(len(sums) * amx.TILE_BYTES)
    for tile in sums:
        amx.store(e, tile, e.at(found, tile * amx.TILE_BYTES))
    amx.release(e)
    rows = range(len(sums) * amx.TILE_ROWS)
    return _xor_lanes(e, [e.load(found, offset=VECTOR * row) for row in rows])


class MultiplyArgs(NamedTuple):
    """Argument block of `multiply_add`."""

    operands: int  # `FACTOR_VECTORS` vectors
    iterations: int
    sink: int = 0  # int64 per thread that depends on all sums


_read_multiply = argument_reader(MultiplyArgs)


def multiply_add(kind: str) -> tuple[Kernel, int]:
    """Return a kernel and its operations per iteration."""

    @intrinsic
    def multiply(typingctx, operands, iterations):
        def generate(context, builder, sig, values):
            return emit_multiply_add(Emitter(builder), kind, *values)

        return types.int64(types.int64, types.int64), generate

    @kernel(key=("multiply_add", kind))
    def run(p, thread, threads):
        a = _read_multiply(p)
        i64s(a.sink)[thread] = multiply(a.operands, a.iterations)

    return run, multiply_add_loops()[kind].operations_per_iteration
