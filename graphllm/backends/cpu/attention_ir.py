"""The vector code of attention, over 16-lane vectors; see attention.py for what it is part of.

A tile of rows (queries of heads that share a kv head) meets up to PIECE keys. In every result the
order of operations is fixed by the depth alone: a score sums its products lane by lane along the
row and then folds the lanes by halves; an output adds the values key by key. The tile's size, which
is the target's choice, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import float32, int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from .isa import isa
from .simd import F16, F32, F32S, I64, LANES, Emit, Value

PIECE = 256  # keys, at multiples of it: the unit of the online softmax
S_ROW = PIECE * 4  # bytes of a row of scores
ROWS = 16  # of a tile at most
# Rows, keys and column vectors that fit the registers together.
TILE_ROWS, TILE_KEYS, TILE_COLUMNS = (4, 4, 4) if isa().width == 64 else (2, 2, 2)

_LINE = 64
_AHEAD = 8  # keys
_NUMBER = {F32: types.float32, I64: types.int64}


def _micro(emit: Callable[..., Value | None], count: int, result: Any = types.none) -> Any:
    """An intrinsic of a tuple of ``count`` int64: ``emit(e, *operands)`` writes its code."""

    @intrinsic
    def micro(typingctx, operands):
        def generate(context, builder, sig, values):
            parts = [builder.extract_value(values[0], i) for i in range(count)]
            value = emit(Emit(builder), *parts)
            return context.get_dummy_value() if value is None else value

        return result(types.UniTuple(int64, count)), generate

    return micro


def _load(e: Emit, half: bool, address: Value) -> Value:
    return e.halves(address) if half else e.load(address, F32S)


def _load_some(e: Emit, half: bool, address: Value, count: Value) -> Value:
    """The first ``count`` lanes, zeros after them; nothing beyond is read, as it may be NaN."""
    element, size = (F16, 2) if half else (F32, 4)
    kind = ir.VectorType(element, LANES)
    place = cgutils.alloca_once(e.b, kind)
    e.b.store(ir.Constant(kind, None), place)
    first = e.b.bitcast(place, element.as_pointer())
    with e.loop(count) as loop:
        value = e.load(e.at(address, e.times(loop.index, size)), element)
        e.b.store(value, e.b.gep(first, [loop.index]))
    loaded = e.b.load(place)
    return e.b.fpext(loaded, F32S) if half else loaded


def _shuffle(e: Emit, x: Value, y: Value, lanes: list[int]) -> Value:
    return e.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def _fold(e: Emit, vectors: list[Value]) -> Value:
    """The sums of the lanes of up to 16 vectors, in the lanes of one. Lane i meets lane i + 8, then
    i + 4, i + 2, i + 1, whatever the count of vectors."""
    width = LANES
    while width > 1:
        half = width // 2
        starts = range(0, 2 * LANES, width)  # of the segments in a pair of vectors
        low = [s + i for s in starts for i in range(half)]
        high = [lane + half for lane in low]
        if len(vectors) % 2:
            vectors = [*vectors, vectors[-1]]
        pairs = zip(vectors[::2], vectors[1::2])
        vectors = [e.add(_shuffle(e, x, y, low), _shuffle(e, x, y, high)) for x, y in pairs]
        width = half
    return vectors[0]


def _zeros(e: Emit, count: int) -> list[Value]:
    return [e.variable(ir.Constant(F32S, None)) for _ in range(count)]


# ------------------------------------------------------------------------------------------- scores


def _scores(half: bool) -> Callable[..., None]:
    size = 2 if half else 4

    def emit(e, q, q_row, blocks, keys, groups, whole, rest, s):
        """s[row][key] = q[row] . key, for blocks of TILE_ROWS rows and groups of TILE_KEYS keys."""
        with e.loop(groups) as group:
            at = e.at(keys, e.times(group.index, 8 * TILE_KEYS))
            rows_of_keys = [e.load(at, I64, 8 * i) for i in range(TILE_KEYS)]
            _prefetch_rows(e, at, whole, size)
            with e.loop(blocks) as block:
                first = e.b.mul(block.index, e.times(q_row, TILE_ROWS))
                rows = [e.at(q, first, e.times(q_row, i)) for i in range(TILE_ROWS)]
                sums = _zeros(e, TILE_ROWS * TILE_KEYS)
                with e.loop(whole) as step:
                    offset = e.times(step.index, LANES * size)
                    loaded = [_load(e, half, e.at(k, offset)) for k in rows_of_keys]
                    _multiply(e, rows, e.times(step.index, LANES * 4), loaded, sums)
                with e.b.if_then(e.b.icmp_signed(">", rest, e.count(0))):
                    offset = e.times(whole, LANES * size)
                    loaded = [_load_some(e, half, e.at(k, offset), rest) for k in rows_of_keys]
                    _multiply(e, rows, e.times(whole, LANES * 4), loaded, sums)
                folded = _fold(e, [e.get(v) for v in sums])
                target = e.at(s, e.times(block.index, TILE_ROWS * S_ROW))
                target = e.at(target, e.times(group.index, TILE_KEYS * 4))
                for r in range(TILE_ROWS):
                    lanes = [r * TILE_KEYS + i for i in range(TILE_KEYS)]
                    e.store(_shuffle(e, folded, folded, lanes), target, r * S_ROW)

    return emit


def _prefetch_rows(e: Emit, at: Value, whole: Value, size: int) -> None:
    """The keys that come _AHEAD of those at ``at``; the list is that much longer."""
    lines = e.b.add(e.b.lshr(e.times(whole, LANES * size), e.count(6)), e.count(1))
    for i in range(TILE_KEYS):
        row = e.load(at, I64, 8 * (_AHEAD + i))
        with e.loop(lines) as line:
            e.prefetch(e.at(row, e.times(line.index, _LINE)))


def _multiply(
    e: Emit, rows: list[Value], offset: Value, loaded: list[Value], sums: list[Value]
) -> None:
    for r, row in enumerate(rows):
        x = e.load(e.at(row, offset), F32S)
        for i, k in enumerate(loaded):
            total = sums[r * len(loaded) + i]
            e.set(total, e.madd(x, k, e.get(total)))


# ------------------------------------------------------------------------------------------- values


def _values(half: bool) -> Callable[..., None]:
    size = 2 if half else 4

    def emit(e, s, blocks, values, first, last, columns, rest, total, t_row, a, b):
        """total[row] = total[row] * a[row] + b[row] * sum over keys first..last of s[row][key] *
        value, for ``columns`` whole vectors and ``rest`` more elements."""
        wide = e.b.udiv(columns, e.count(TILE_COLUMNS))
        done = e.times(wide, TILE_COLUMNS)
        span = _Span(e, s, values, first, last, total, t_row, a, b)
        with e.loop(blocks) as block:
            with e.loop(wide) as column:
                start = e.times(column.index, TILE_COLUMNS * LANES)
                span.emit(half, size, block.index, start, TILE_COLUMNS, None)
            with e.loop(e.b.sub(columns, done)) as column:
                start = e.times(e.b.add(done, column.index), LANES)
                span.emit(half, size, block.index, start, 1, None)
            with e.b.if_then(e.b.icmp_signed(">", rest, e.count(0))):
                span.emit(half, size, block.index, e.times(columns, LANES), 1, rest)

    return emit


class _Span:
    """Some columns of a block of rows, through all keys of a piece."""

    def __init__(self, e: Emit, *operands: Value) -> None:
        self.e = e
        self.s, self.values, self.first, self.last = operands[:4]
        self.total, self.t_row, self.a, self.b = operands[4:]

    def emit(
        self, half: bool, size: int, block: Value, start: Value, count: int, rest: Value | None
    ) -> None:
        e = self.e
        sums = _zeros(e, TILE_ROWS * count)
        weights = e.at(self.s, e.times(block, TILE_ROWS * S_ROW), e.times(self.first, 4))
        keys = e.at(self.values, e.times(self.first, 8))
        with e.loop(e.b.sub(self.last, self.first)) as key:
            row = e.at(e.load(e.at(keys, e.times(key.index, 8)), I64), e.times(start, size))
            if rest is None:
                loaded = [_load(e, half, e.at(row, c * LANES * size)) for c in range(count)]
            else:
                loaded = [_load_some(e, half, row, rest)]
            for r in range(TILE_ROWS):
                weight = e.all_f32(e.at(weights, e.times(key.index, 4)), r * S_ROW)
                for c, value in enumerate(loaded):
                    place = sums[r * count + c]
                    e.set(place, e.madd(weight, value, e.get(place)))
        self._merge(block, start, count, [e.get(v) for v in sums])

    def _merge(self, block: Value, start: Value, count: int, sums: list[Value]) -> None:
        e = self.e
        for r in range(TILE_ROWS):
            row = e.b.add(e.times(block, TILE_ROWS), e.count(r))
            a, b = (e.all_f32(e.at(x, e.times(row, 4))) for x in (self.a, self.b))
            target = e.at(self.total, e.b.mul(row, self.t_row), e.times(start, 4))
            for c in range(count):
                _blend(e, e.at(target, c * LANES * 4), sums[r * count + c], a, b)


def _blend(e: Emit, target: Value, new: Value, a: Value, b: Value) -> None:
    e.store(e.madd(new, b, e.mul(e.load(target, F32S), a)), target)


def _merge_rows(e, total, part, vectors, a, b):
    """total = total * a + part * b, a and b addresses of one float32 each: as in `_values`."""
    a, b = e.all_f32(a), e.all_f32(b)
    with e.loop(vectors) as loop:
        at = e.times(loop.index, LANES * 4)
        _blend(e, e.at(total, at), e.load(e.at(part, at), F32S), a, b)


def _largest(e, row, vectors):
    """The largest of a row of whole vectors; NaN is passed over."""
    best = e.variable(e.f32(float("-inf")))
    with e.loop(vectors) as loop:
        x = e.load(e.at(row, e.times(loop.index, LANES * 4)), F32S)
        e.set(best, _larger(e, x, e.get(best)))
    x, half = e.get(best), LANES // 2
    while half:
        x = _larger(e, _shuffle(e, x, x, [(i + half) % LANES for i in range(LANES)]), x)
        half //= 2
    return e.b.extract_element(x, ir.Constant(ir.IntType(32), 0))


def _larger(e: Emit, x: Value, y: Value) -> Value:
    return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)


def _sum(e, row, vectors):
    """The sum of a row of whole vectors, lane by lane and then by halves."""
    total = e.variable(ir.Constant(F32S, None))
    with e.loop(vectors) as loop:
        x = e.load(e.at(row, e.times(loop.index, LANES * 4)), F32S)
        e.set(total, e.add(e.get(total), x))
    folded = _fold(e, [e.get(total)])
    return e.b.extract_element(folded, ir.Constant(ir.IntType(32), 0))


scores = {half: _micro(_scores(half), 8) for half in (False, True)}
values = {half: _micro(_values(half), 11) for half in (False, True)}
merge_rows = _micro(_merge_rows, 5)
largest, total = _micro(_largest, 2, float32), _micro(_sum, 2, float32)
AHEAD = _AHEAD + TILE_KEYS  # entries that a list of keys must have after the last
