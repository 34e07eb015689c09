"""Code emitters of the float microkernels; see `linear_microkernels`."""

from __future__ import annotations

from collections.abc import Callable

from ..formats import FORMATS, PackedFormat, by_code
from ..simd.emitter import F32S, VECTOR, Emitter, Value
from .linear_integer import token_rows

FLOAT_CHUNK = 128  # columns per update of c: the panels of two groups fit the L1 cache
FLOAT_PANEL = FLOAT_CHUNK * VECTOR
_UNROLL = 8  # elements of plain formats in an iteration of a loop


def _steps(e: Emitter, f: PackedFormat, blocks: Value, body: Callable[[Value, int], None]) -> None:
    """Emit ``body(first block, count)`` for all blocks; plain formats by 8, then one by one."""
    by = _UNROLL if f.block == 1 else 1
    whole = e.b.sdiv(blocks, e.count(by))
    with e.loop(whole) as loop:
        body(e.times(loop.index, by), by)
    if by > 1:
        done = e.times(whole, by)
        with e.loop(e.b.sub(blocks, done)) as loop:
            body(e.b.add(done, loop.index), 1)


def _prefetch(e: Emitter, at: Value, nbytes: int, i: int) -> None:
    """Prefetch ahead of block ``i`` of ``nbytes`` bytes, if a cache line begins with it."""
    if i * nbytes % VECTOR == 0:
        for line in range(0, nbytes, VECTOR):
            e.prefetch_ahead(at, i * nbytes + line)


def unpack(e: Emitter, code: int, w: Value, panel: Value, blocks: Value) -> None:
    f = by_code(code)

    def body(first: Value, count: int) -> None:
        target = e.at(panel, e.times(first, f.block * VECTOR))
        source = e.at(w, e.times(first, f.nbytes))
        for i in range(count):
            for k, value in f.values(e, e.at(source, i * f.nbytes)):
                e.store(value, target, VECTOR * (i + k))

    _steps(e, f, blocks, body)


def tile(
    e: Emitter, groups: int, tokens: int, left: Value, panel: Value, width: Value, columns: Value,
    x: Value, offsets: Value, c: Value, ahead: Value, step: Value, lines: Value,
) -> None:  # fmt: skip
    rows = token_rows(e, tokens, left, offsets)
    accs = [[e.variable(e.f32(0.0)) for _ in range(groups)] for _ in rows]
    following = [e.at(ahead, e.times(step, g)) for g in range(groups)]

    def body(first: Value, count: int) -> None:
        if count > 1:
            e.prefetch_lines(following, e.b.sdiv(first, e.count(count)), lines)
        weights = [e.at(panel, e.times(first, VECTOR), e.times(width, g)) for g in range(groups)]
        values = [e.at(x, e.times(first, 4), row) for row in rows]
        for k in range(count):
            each = [e.load(at, F32S, VECTOR * k) for at in weights]
            for value, totals in zip(values, accs):
                one = e.broadcast_f32(value, 4 * k)
                for weight, total in zip(each, totals):
                    e.set(total, e.madd(weight, one, e.get(total)))

    _steps(e, FORMATS["f32"], columns, body)
    for i, acc in enumerate(acc for totals in accs for acc in totals):
        e.store(e.add(e.load(c, F32S, VECTOR * i), e.get(acc)), c, VECTOR * i)


def fused(e: Emitter, code: int, w: Value, columns: Value, x: Value, c: Value) -> None:
    f = by_code(code)
    acc = e.variable(e.f32(0.0))

    def body(first: Value, count: int) -> None:
        source, row = e.at(w, e.times(first, f.nbytes)), e.at(x, e.times(first, 4))
        for k in range(count):
            _prefetch(e, source, f.nbytes, k)
            ((_, weight),) = f.values(e, e.at(source, k * f.nbytes))
            e.set(acc, e.madd(weight, e.broadcast_f32(row, 4 * k), e.get(acc)))

    _steps(e, f, columns, body)
    e.store(e.add(e.load(c, F32S), e.get(acc)), c)
