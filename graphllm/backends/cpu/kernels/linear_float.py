"""Code emitters of the float microkernels; see `linear_microkernels`."""

from __future__ import annotations

from collections.abc import Callable

from ..formats import FORMATS, PackedFormat, by_code
from ..simd.emitter import F32, F32S, I64, LANES, VECTOR, Emitter, Value
from .linear_integer import token_rows

FLOAT_CHUNK = 128  # columns per update of c: the panels of two groups fit the L1 cache
FLOAT_PANEL = FLOAT_CHUNK * VECTOR
WIDE_FLOAT_GROUPS, WIDE_FLOAT_TOKENS = 2, 12  # of a tile of gathered activations
FLOAT_ROW = 4 * FLOAT_CHUNK  # bytes of a token's gathered activations
_UNROLL = 8  # elements of plain formats in an iteration of a loop
_FEW_TOKENS = 2  # of a tile that waits for memory: weights are prefetched into L2, else into L1


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
    level = 2 if tokens <= _FEW_TOKENS else 1

    def body(first: Value, count: int) -> None:
        if count > 1:
            e.prefetch_lines(following, e.b.sdiv(first, e.count(count)), lines, level)
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


def gather(e: Emitter, x: Value, rows: Value, count: Value, columns: Value, to: Value) -> None:
    """Copy ``columns`` columns of ``count`` tokens' activations for `gathered_tile`.

    Tiles are whole: the last token may be repeated.
    """
    last, by = e.b.sub(count, e.count(1)), e.count(WIDE_FLOAT_TOKENS)
    tiles = e.b.sdiv(e.b.add(last, by), by)
    with e.loop(e.times(tiles, WIDE_FLOAT_TOKENS)) as loop:
        token = e.b.select(e.b.icmp_signed("<", loop.index, last), loop.index, last)
        row = e.at(x, e.load(e.at(rows, e.times(token, 8)), I64))
        target = e.at(to, e.times(loop.index, FLOAT_ROW))
        whole = e.b.sdiv(columns, e.count(LANES))
        with e.loop(whole) as each:
            at = e.times(each.index, VECTOR)
            e.store(e.load(e.at(row, at), F32S), e.at(target, at))
        done = e.times(whole, LANES)
        with e.loop(e.b.sub(columns, done)) as each:
            at = e.times(e.b.add(done, each.index), 4)
            e.store(e.load(e.at(row, at), F32), e.at(target, at))


def gathered_tile(
    e: Emitter, lines: int, panel: Value, columns: Value, x: Value, c: Value, pitch: Value,
    ahead: Value, step: Value,
) -> None:  # fmt: skip
    """c += two panels times activations of a tile of tokens, copied by `gather`.

    Results of groups are ``pitch`` bytes apart. Activations need one address, so that the other
    registers hold 24 sums. The same operations in the same order as `tile`.
    """
    groups, tokens = range(WIDE_FLOAT_GROUPS), range(WIDE_FLOAT_TOKENS)
    for g in groups:
        for line in range(lines):
            e.prefetch(e.at(ahead, e.times(step, g)), VECTOR * line, level=2)
    accs = [[e.variable(e.f32(0.0)) for _ in groups] for _ in tokens]

    def body(first: Value, count: int) -> None:
        weights, values = e.at(panel, e.times(first, VECTOR)), e.at(x, e.times(first, 4))
        following = e.at(x, e.times(first, 4 * WIDE_FLOAT_TOKENS))
        results = e.at(c, e.times(first, VECTOR * WIDE_FLOAT_TOKENS // FLOAT_CHUNK))
        for k in range(count):
            if k * 4 * WIDE_FLOAT_TOKENS % VECTOR < 4 * WIDE_FLOAT_TOKENS:
                e.prefetch(following, FLOAT_ROW * WIDE_FLOAT_TOKENS + 4 * WIDE_FLOAT_TOKENS * k)
            if k in (0, 1) and count > 1:
                e.prefetch(e.at(results, e.times(pitch, k)), VECTOR * WIDE_FLOAT_TOKENS)
            e.keep_order()
            each = [e.load(weights, F32S, VECTOR * k + FLOAT_PANEL * g) for g in groups]
            for t in tokens:
                one = e.broadcast_f32(values, FLOAT_ROW * t + 4 * k)
                for weight, total in zip(each, accs[t]):
                    e.set(total, e.madd(weight, one, e.get(total)))

    _steps(e, FORMATS["f32"], columns, body)
    for g in groups:
        to = e.at(c, e.times(pitch, g))
        for t in tokens:
            e.store(e.add(e.load(to, F32S, VECTOR * t), e.get(accs[t][g])), to, VECTOR * t)


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
