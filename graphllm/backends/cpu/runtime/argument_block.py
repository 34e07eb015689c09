"""Argument blocks with named fields: one declaration for the launch that writes and the kernel.

    class ScaleArgs(NamedTuple):
        x: int  # address, f32 [count]
        y: int
        count: int
        factor: float

    read_scale_args = argument_reader(ScaleArgs)

    @kernel
    def scale(p, thread, threads):
        a = read_scale_args(p)
        for i in range(a.count):
            f32s(a.y)[i] = a.factor * f32s(a.x)[i]

    Launch(scale, ScaleArgs(x=..., y=..., count=..., factor=0.5))

Each field is one 64-bit word. An ``int`` field is an int64 (an address, a stride in bytes, a size);
a ``float`` field is a float32 in the low half of its word. A reader becomes one load per field that
the kernel uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_type_hints

from .jit import _low_f32, _word, f32_bits
from .lazy_numba import float32, int64, intrinsic, lazy, resolve, types


@cache
def _floats(block: type) -> tuple[bool, ...]:
    """Whether each field of the block is a float32."""
    hints = get_type_hints(block)
    return tuple(hints[name] is float for name in block._fields)  # type: ignore[attr-defined]


def argument_reader(block: type) -> Any:
    """Return a function ``read(p)`` that kernels call for the fields of the argument block at p.

    ``block`` is a NamedTuple whose fields are declared as int or float.
    """
    floats = _floats(block)

    def make() -> Any:
        if any(floats):
            kinds = [float32 if is_float else int64 for is_float in floats]
            return types.NamedTuple([resolve(kind) for kind in kinds], block)
        return types.NamedUniTuple(resolve(int64), len(floats), block)

    result = lazy(make)

    @intrinsic
    def read(typingctx, p):
        def generate(context, builder, sig, values):
            words = [builder.load(_word(builder, values[0], i)) for i in range(len(floats))]
            fields = [_low_f32(builder, w) if f else w for w, f in zip(words, floats)]
            return context.make_tuple(builder, sig.return_type, fields)

        return result(int64), generate

    return read


def argument_words(block: Sequence[Any]) -> list[int]:
    """Return the 64-bit words of an argument block, or of a plain sequence of words."""
    if not hasattr(block, "_fields"):
        return list(block)
    return [f32_bits(v) if f else v for v, f in zip(block, _floats(type(block)))]
