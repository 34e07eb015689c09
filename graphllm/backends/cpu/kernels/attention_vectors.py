"""The vector code of attention, over 16-lane vectors; see attention.py for what it is part of.

A tile of rows (queries of heads that share a kv head) meets up to SPLIT_KEYS keys. In every result
the order of operations is fixed by the depth alone: a score sums its products lane by lane along
the row, then folds the lanes by halves; an output adds the values key by key. The tile's size,
which is the target's choice, changes nothing, nor does it whether keys and values become float32 in
registers or were unpacked before: that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from ....graph.dtype import DTYPES
from ..runtime.isa import isa
from ..simd.emitter import F16, F32, F32S, I8, I32S, I64, LANES, Emit, Value

SPLIT_KEYS = 256  # keys, at multiples of it: the unit of the online softmax
S_ROW = SPLIT_KEYS * 4  # bytes of a row of scores
PAD = 32  # rows of queries, totals and unpacked keys are whole multiples of so many elements
# Rows, keys and column vectors that fit the registers together.
BLOCK_ROWS, TILE_KEYS, TILE_COLUMNS = ((4, 6), 4, 4) if isa().width == 64 else ((2,), 2, 2)
PREFETCH_KEYS = 24  # keys that are asked for before they are needed; a list is that much longer

_LINE = 64


def tuple_intrinsic(emit: Callable[..., Value | None], count: int, result: Any = types.none) -> Any:
    """An intrinsic of a tuple of ``count`` int64: ``emit(e, *operands)`` writes its code."""

    @intrinsic
    def made(typingctx, operands):
        def generate(context, builder, sig, values):
            parts = [builder.extract_value(values[0], i) for i in range(count)]
            value = emit(Emit(builder), *parts)
            return context.get_dummy_value() if value is None else value

        return result(types.UniTuple(int64, count)), generate

    return made


# ------------------------------------------------------------------------------------------ readers


def _whole_f32(e: Emit, address: Value) -> list[Value]:
    return [e.load(address, F32S)]


def _whole_f16(e: Emit, address: Value) -> list[Value]:
    return [e.load_f16(address, 2 * LANES * i) for i in range(2)]


def _whole_q8_0(e: Emit, address: Value) -> list[Value]:
    """d:f16, 32 int8. The products have 18 bits at most: exact."""
    scale = e.b.fpext(e.splat(e.load(address, F16)), F32S)
    found = []
    for i in range(2):
        q = e.load(address, ir.VectorType(I8, LANES), 2 + LANES * i)
        found.append(e.mul(e.to_f32(e.b.sext(q, I32S)), scale))
    return found


@dataclass(frozen=True)
class ElementReader:
    """How a pool's elements become float32: ``unit`` of them at a time, from ``nbytes`` bytes.

    ``element``: of a plain format, which may end in less than a unit; None for blocks.
    """

    unit: int
    nbytes: int
    whole: Callable[[Emit, Value], list[Value]]
    element: Any = None

    @property
    def vectors(self) -> int:
        return self.unit // LANES

    def some(self, e: Emit, address: Value, count: Value) -> list[Value]:
        """The first ``count`` elements of a unit, zeros after them; nothing beyond is read, as it
        may be NaN."""
        kind = ir.VectorType(self.element, self.unit)
        place = cgutils.alloca_once(e.b, kind)
        e.b.store(ir.Constant(kind, None), place)
        first = e.b.bitcast(place, self.element.as_pointer())
        with e.loop(count) as loop:
            offset = e.times(loop.index, self.nbytes // self.unit)
            e.b.store(e.load(e.at(address, offset), self.element), e.b.gep(first, [loop.index]))
        return self.whole(e, e.b.ptrtoint(place, I64))


READERS = {
    "f32": ElementReader(LANES, 4 * LANES, _whole_f32, F32),
    "f16": ElementReader(2 * LANES, 4 * LANES, _whole_f16, F16),
    "q8_0": ElementReader(DTYPES["q8_0"].block, DTYPES["q8_0"].nbytes, _whole_q8_0),
}


def shuffle(e: Emit, x: Value, y: Value, lanes: list[int]) -> Value:
    return e.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def fold(e: Emit, vectors: list[Value]) -> Value:
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
        vectors = [e.add(shuffle(e, x, y, low), shuffle(e, x, y, high)) for x, y in pairs]
        width = half
    return vectors[0]


def _zeros(e: Emit, count: int) -> list[Value]:
    return [e.variable(ir.Constant(F32S, None)) for _ in range(count)]


def _positive(e: Emit, value: Value) -> Value:
    return e.b.icmp_signed(">", value, e.count(0))


# ------------------------------------------------------------------------------------------- unpack


def _unpack(reader: ElementReader) -> Callable[..., None]:
    def emit(e, keys, first, last, whole, rest, target, t_row):
        """Rows first..last of a list as float32 rows at ``target``; zeros to the end of a unit."""
        with e.loop(e.b.sub(last, first)) as loop:
            at = e.at(keys, e.times(e.b.add(first, loop.index), 8))
            row, ahead = e.load(at, I64), e.load(at, I64, 8 * PREFETCH_KEYS)
            out = e.at(target, e.b.mul(loop.index, t_row))
            _unpack_row(e, reader, row, ahead, whole, rest, out)

    return emit


def _unpack_row(
    e: Emit, reader: ElementReader, row: Value, ahead: Value, whole: Value, rest: Value, out: Value
) -> None:
    with e.loop(whole) as step:
        offset = e.times(step.index, reader.nbytes)
        e.prefetch(e.at(ahead, offset))
        there = e.at(out, e.times(step.index, 4 * reader.unit))
        _store_all(e, reader.whole(e, e.at(row, offset)), there)
    if reader.element is not None:
        with e.b.if_then(_positive(e, rest)):
            source = e.at(row, e.times(whole, reader.nbytes))
            there = e.at(out, e.times(whole, 4 * reader.unit))
            _store_all(e, reader.some(e, source, rest), there)


def _store_all(e: Emit, vectors: list[Value], address: Value) -> None:
    for i, vector in enumerate(vectors):
        e.store(vector, address, 4 * LANES * i)


# ------------------------------------------------------------------------------------------- scores


def _scores(reader: ElementReader, height: int) -> Callable[..., None]:
    def emit(e, q, q_row, blocks, keys, groups, whole, rest, s):
        """s[row][key] = q[row] . key: blocks of ``height`` rows, groups of TILE_KEYS keys."""
        with e.loop(groups) as group:
            row_of, ahead = _group(e, keys, group.index)
            tile = _ScoreTile(e, reader, height, row_of, ahead, whole, rest)
            tile.emit(q, q_row, blocks, e.at(s, e.times(group.index, TILE_KEYS * 4)))

    return emit


def _unpacked_scores(reader: ElementReader, height: int) -> Callable[..., None]:
    def emit(e, q, q_row, blocks, keys, groups, whole, rest, s, room):
        """As `_scores`, with each group of keys unpacked once, to ``room``, for all rows."""
        unpacked = [e.at(room, e.times(q_row, i)) for i in range(TILE_KEYS)]
        steps = e.b.udiv(q_row, e.count(4 * LANES))
        with e.loop(groups) as group:
            row_of, ahead = _group(e, keys, group.index)
            for i, out in enumerate(unpacked):
                _unpack_row(e, reader, row_of[i], ahead[i], whole, rest, out)
            tile = _ScoreTile(e, READERS["f32"], height, unpacked, [], steps, e.count(0))
            tile.emit(q, q_row, blocks, e.at(s, e.times(group.index, TILE_KEYS * 4)))

    return emit


def _group(e: Emit, keys: Value, index: Value) -> tuple[list[Value], list[Value]]:
    """The rows of a group of keys, and those to ask for meanwhile."""
    at = e.at(keys, e.times(index, 8 * TILE_KEYS))
    row_of = [e.load(at, I64, 8 * i) for i in range(TILE_KEYS)]
    return row_of, [e.load(at, I64, 8 * (PREFETCH_KEYS + i)) for i in range(TILE_KEYS)]


class _ScoreTile:
    """A group of keys, and what meets it."""

    def __init__(
        self, e: Emit, reader: ElementReader, height: int, keys: list[Value], ahead: list[Value],
        whole: Value, rest: Value,
    ) -> None:  # fmt: skip
        self.e, self.reader, self.height, self.keys, self.ahead = e, reader, height, keys, ahead
        self.whole, self.rest = whole, rest

    def emit(self, q: Value, q_row: Value, blocks: Value, s: Value) -> None:
        """All blocks of rows at ``q``, to the scores' columns at ``s``."""
        e, reader, height = self.e, self.reader, self.height
        with e.loop(blocks) as block:
            first = e.b.mul(block.index, e.times(q_row, height))
            rows = [e.at(q, first, e.times(q_row, i)) for i in range(height)]
            sums = _zeros(e, height * TILE_KEYS)
            with e.loop(self.whole) as step:
                offset = e.times(step.index, reader.nbytes)
                for key in self.ahead:
                    e.prefetch(e.at(key, offset))
                loaded = [reader.whole(e, e.at(k, offset)) for k in self.keys]
                _multiply(e, rows, e.times(step.index, 4 * reader.unit), loaded, sums)
            if reader.element is not None:
                with e.b.if_then(_positive(e, self.rest)):
                    offset = e.times(self.whole, reader.nbytes)
                    loaded = [reader.some(e, e.at(k, offset), self.rest) for k in self.keys]
                    _multiply(e, rows, e.times(self.whole, 4 * reader.unit), loaded, sums)
            target = e.at(s, e.times(block.index, height * S_ROW))
            _store_scores(e, [e.get(v) for v in sums], target)


def _multiply(
    e: Emit, rows: list[Value], offset: Value, loaded: list[list[Value]], sums: list[Value]
) -> None:
    """Add to each sum the products of a row and a key, a unit of each."""
    for part in range(len(loaded[0])):
        for r, row in enumerate(rows):
            x = e.load(e.at(row, offset), F32S, 4 * LANES * part)
            for i, key in enumerate(loaded):
                total = sums[r * len(loaded) + i]
                e.set(total, e.madd(x, key[part], e.get(total)))


def _store_scores(e: Emit, sums: list[Value], target: Value) -> None:
    """Fold the sums, key after key of row after row, and store them a row at a time."""
    together = LANES // TILE_KEYS  # rows whose sums fill a vector
    for first in range(0, len(sums) // TILE_KEYS, together):
        some = sums[first * TILE_KEYS : (first + together) * TILE_KEYS]
        folded = fold(e, some)
        for r in range(len(some) // TILE_KEYS):
            lanes = [r * TILE_KEYS + i for i in range(TILE_KEYS)]
            e.store(shuffle(e, folded, folded, lanes), target, (first + r) * S_ROW)


# ------------------------------------------------------------------------------------------- values


def _values(reader: ElementReader, height: int) -> Callable[..., None]:
    strip = max(1, TILE_COLUMNS // reader.vectors)  # units

    def emit(e, s, blocks, values, first, last, whole, rest, total, t_row, a, b):
        """total[row] = total[row] * a[row] + b[row] * sum over keys first..last of s[row][key] *
        value, for ``whole`` units of columns and ``rest`` more elements."""
        wide = e.b.udiv(whole, e.count(strip))
        done = e.times(wide, strip)
        span = _ColumnStrip(e, reader, height, s, values, first, last, total, t_row, a, b)
        with e.loop(blocks) as block:
            with e.loop(wide) as column:
                span.emit(block.index, e.times(column.index, strip), strip, None)
            with e.loop(e.b.sub(whole, done)) as column:
                span.emit(block.index, e.b.add(done, column.index), 1, None)
            if reader.element is not None:
                with e.b.if_then(_positive(e, rest)):
                    span.emit(block.index, whole, 1, rest)

    return emit


class _ColumnStrip:
    """Some columns of a block of rows, through all keys of a piece."""

    def __init__(self, e: Emit, reader: ElementReader, height: int, *operands: Value) -> None:
        self.e, self.reader, self.height = e, reader, height
        self.s, self.values, self.first, self.last = operands[:4]
        self.total, self.t_row, self.a, self.b = operands[4:]

    def emit(self, block: Value, start: Value, units: int, rest: Value | None) -> None:
        """``units`` of columns from the unit ``start`` on; or ``rest`` elements of it."""
        e, reader, count = self.e, self.reader, units * self.reader.vectors
        sums = _zeros(e, self.height * count)
        weights = e.at(self.s, e.times(block, self.height * S_ROW), e.times(self.first, 4))
        keys = e.at(self.values, e.times(self.first, 8))
        offset = e.times(start, reader.nbytes)
        with e.loop(e.b.sub(self.last, self.first)) as key:
            at = e.at(keys, e.times(key.index, 8))
            row, ahead = (
                e.at(e.load(at, I64), offset),
                e.at(e.load(at, I64, 8 * PREFETCH_KEYS), offset),
            )
            for line in range(0, units * reader.nbytes, _LINE):
                e.prefetch(ahead, line)
            if rest is None:
                units_of = [reader.whole(e, e.at(row, u * reader.nbytes)) for u in range(units)]
            else:
                units_of = [reader.some(e, row, rest)]
            loaded = [vector for unit in units_of for vector in unit]
            for r in range(self.height):
                weight = e.broadcast_f32(e.at(weights, e.times(key.index, 4)), r * S_ROW)
                for c, value in enumerate(loaded):
                    place = sums[r * count + c]
                    e.set(place, e.madd(weight, value, e.get(place)))
        self._merge(block, e.times(start, 4 * reader.unit), count, [e.get(v) for v in sums])

    def _merge(self, block: Value, start: Value, count: int, sums: list[Value]) -> None:
        e = self.e
        for r in range(self.height):
            row = e.b.add(e.times(block, self.height), e.count(r))
            a, b = (e.broadcast_f32(e.at(x, e.times(row, 4))) for x in (self.a, self.b))
            target = e.at(self.total, e.b.mul(row, self.t_row), start)
            for c in range(count):
                _blend(e, e.at(target, c * LANES * 4), sums[r * count + c], a, b)


def _blend(e: Emit, target: Value, new: Value, a: Value, b: Value) -> None:
    e.store(e.madd(new, b, e.mul(e.load(target, F32S), a)), target)


def _merge_rows(e, total, part, vectors, a, b):
    """total = total * a + part * b, a and b addresses of one float32 each: as in `_values`."""
    a, b = e.broadcast_f32(a), e.broadcast_f32(b)
    with e.loop(vectors) as loop:
        at = e.times(loop.index, LANES * 4)
        _blend(e, e.at(total, at), e.load(e.at(part, at), F32S), a, b)


_TILES = [(kind, height) for kind in READERS for height in BLOCK_ROWS]
scores = {(k, h): tuple_intrinsic(_scores(READERS[k], h), 8) for k, h in _TILES}
unpacked_scores = {(k, h): tuple_intrinsic(_unpacked_scores(READERS[k], h), 9) for k, h in _TILES}
values = {(k, h): tuple_intrinsic(_values(READERS[k], h), 11) for k, h in _TILES}
unpack = {k: tuple_intrinsic(_unpack(READERS[k]), 7) for k in READERS}
merge_rows = tuple_intrinsic(_merge_rows, 5)
