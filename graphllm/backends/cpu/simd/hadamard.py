"""Rotation of blocks of 16 floats, a vector each, bit for bit as `graphllm.ops.rotation`."""

from __future__ import annotations

from typing import Any

from ..runtime.lazy_numba import intrinsic, ir, types
from .emitter import F32S, I32S, LANES, VECTOR, Emitter, Value


def _rotated(e: Emitter, x: Value) -> Value:
    """The fast Walsh-Hadamard transform of the lanes of x, divided by 4.

    A product with 1 or -1 is exact, so `madd` has the bits of a sum or a difference.
    """
    for distance in (1, 2, 4, 8):
        other = ir.Constant(I32S, [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(F32S, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        x = e.madd(x, signs, e.b.shuffle_vector(x, x, other))
    return e.mul(x, e.f32(0.25))


@intrinsic
def rotate_blocks(typingctx, source, target, count):
    """Rotate ``count`` float32, whole blocks, from ``source`` to ``target``; may be equal."""

    def generate(context: Any, builder: Any, sig: Any, given: Any) -> Value:
        e = Emitter(builder)
        source, target, count = given
        with e.loop(e.b.sdiv(count, e.count(LANES))) as loop:
            at = e.times(loop.index, VECTOR)
            e.store(_rotated(e, e.load_f32(e.at(source, at))), e.at(target, at))
        return context.get_dummy_value()

    number = types.int64
    return types.none(number, number, number), generate
