"""Loops that do nothing but move vectors, or nothing but multiply and add: `ceiling.py` times them.

They are written with what all kernels here are written with, so that no kernel can be faster.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from .isa import isa
from .jit import Kernel, args, i64s, kernel, next_chunk
from .simd import F16, F32S, I32S, I64, VECTOR, Emit, Value
from .vectors import vector

TURN = 4 * VECTOR  # bytes that a turn of a loop over memory moves
_CHUNK = 256 << 10  # bytes that a thread takes at a time
_AHEAD = 1024  # bytes between a load and what is asked for
OPERANDS = 16  # vectors that multiply-adds take their factors from, in the first level of cache
_ONE = 0x3F800000  # the float32 1.0, which is written
_HALVES = vector(F16, VECTOR // 2)


# -------------------------------------------------------------------------------------- over memory


def _mover(reads: bool, writes: bool, ahead: int) -> Any:
    """``move(source, target, nbytes)``, whole turns: an int64 that depends on all that was read.

    Stores go past the caches: a line that is stored to in a cache is read from memory first.
    """

    @intrinsic
    def move(typingctx, source, target, nbytes):
        def generate(context, builder, sig, values):
            e = Emit(builder)
            sums = [e.variable(e.i32(0)) for _ in range(TURN // VECTOR)]
            with e.loop(e.b.sdiv(values[2], e.count(TURN))) as loop:
                at, to = (e.at(base, e.times(loop.index, TURN)) for base in values[:2])
                for i, total in enumerate(sums):
                    value = _read(e, at, i * VECTOR, ahead) if reads else e.i32(_ONE)
                    if writes:
                        e.store_past(value, to, i * VECTOR)
                    else:
                        e.set(total, e.b.xor(e.get(total), value))
            return _folded(e, [e.get(total) for total in sums])

        return types.int64(*[types.int64] * 3), generate

    return move


def _read(e: Emit, at: Value, offset: int, ahead: int) -> Value:
    if ahead:
        e.prefetch(at, ahead + offset)
    return e.load(at, offset=offset)


def _folded(e: Emit, vectors: list[Value]) -> Value:
    """All bits of some vectors in an int64, so that none is left out."""
    found = e.b.bitcast(vectors[0], I32S)
    for each in vectors[1:]:
        found = e.b.xor(found, e.b.bitcast(each, I32S))
    return e.b.zext(e.reduce("add", found), I64)


def over_memory(reads: bool, writes: bool) -> Kernel:
    """Arguments: source, target, bytes, and an int64 for each thread that keeps what was read."""
    move = _mover(reads, writes, _AHEAD)

    @kernel(key=("over memory", reads, writes, _AHEAD, TURN))
    def run(p, thread, threads):
        source, target, nbytes, sink = args(p, 4)
        chunk, total = next_chunk(p), 0
        while chunk * _CHUNK < nbytes:
            at = chunk * _CHUNK
            total += move(source + at, target + at, min(_CHUNK, nbytes - at))
            chunk = next_chunk(p)
        i64s(sink)[thread] = total

    return run


_again = _mover(True, False, 0)


@kernel(key=("cached", TURN))
def cached(p, thread, threads):
    """All of a piece of memory, by every thread, so many times; each begins at another place."""
    start, nbytes, times, sink = args(p, 4)
    first = nbytes // threads * thread // TURN * TURN
    total = 0
    for _ in range(times):
        total += _again(start + first, start, nbytes - first)
        total += _again(start, start, first)
    i64s(sink)[thread] = total


read, write, copy = over_memory(True, False), over_memory(False, True), over_memory(True, True)


# ------------------------------------------------------------------------------------ in registers


def _sums() -> int:
    """How many vectors are summed up side by side: none waits for itself, all stay in registers."""
    return 12 if isa().avx512 else 5 if isa().avx2 else 3


def kinds() -> dict[str, tuple[Any, int, str]]:
    """Kind -> (type of the sums, operations of a step on one, how it is done)."""
    fused = isa().avx2 or not isa().x86
    found = {"f32": (F32S, 2 * 16, "fused" if fused else "a product and a sum")}
    if isa().fp16:
        found["f16"] = (_HALVES, 2 * 32, "fused, which no kernel here uses")
    chain = "vpmaddubsw, vpmaddwd and vpaddd" if isa().avx2 else "products of int16"
    return found | {"int8": (I32S, 2 * 64, "vpdpbusd" if isa().vnni else chain)}


def how() -> dict[str, str]:
    """By kind, how it is multiplied and added here, or why not."""
    none = {"f16": "not on this processor: kernels widen to float32"}
    return none | {kind: text for kind, (_, _, text) in kinds().items()}


def _step(e: Emit, kind: str, total: Value, own: Value, factor: Value) -> Value:
    """total + own * factor in each lane, for int8 in each byte of a lane."""
    if kind == "int8":
        return e.dot([(own, factor)], 127, total)
    if kind == "f32":
        return e.madd(own, factor, total)
    return e.madd_halves(own, factor, total)


def _multiplier(kind: str) -> Any:
    """``multiply(operands, turns)``: an int64 that depends on all sums."""
    form = kinds()[kind][0]

    @intrinsic
    def multiply(typingctx, operands, turns):
        def generate(context, builder, sig, values):
            e = Emit(builder)
            first = [e.load(values[0], form, i * VECTOR) for i in range(_sums())]
            totals = [e.variable(each) for each in first]
            with e.loop(values[1]) as loop:
                # Another factor in each turn: what stays the same is computed before the loop.
                which = e.b.and_(loop.index, e.count(OPERANDS - 1))
                factor = e.load(e.at(values[0], e.times(which, VECTOR)), form)
                for own, total in zip(first if kind == "int8" else first[:1] * _sums(), totals):
                    e.set(total, _step(e, kind, e.get(total), own, factor))
            return _folded(e, [e.get(total) for total in totals])

        return types.int64(types.int64, types.int64), generate

    return multiply


def multiply_add(kind: str) -> tuple[Kernel, int]:
    """A kernel, and its operations in a turn. Arguments: `OPERANDS` vectors, turns, and an int64
    for each thread."""
    multiply = _multiplier(kind)

    @kernel(key=("multiply_add", kind, _sums(), OPERANDS))
    def run(p, thread, threads):
        operands, turns, sink = args(p, 3)
        i64s(sink)[thread] = multiply(operands, turns)

    return run, kinds()[kind][1] * _sums()
