"""Vector code of attention, over 16-lane vectors; see attention.py for its part.

A tile of rows (queries of heads that share a kv head) is multiplied with up to SPLIT_KEYS keys. The
depth alone fixes the order of operations of every result: a score sums its products lane by lane
along the row, then folds the lanes by halves; an output adds the values key by key. The size of the
tile depends on the target and does not affect results; neither does unpacking keys and values to
float32 in memory instead of in registers, as the conversion is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runtime.isa import isa
from ..runtime.lazy_numba import int64, intrinsic, ir, types
from ..simd.emitter import F32, F32S, I32, I32S, I64, LANES, Emitter, Value
from .pool_elements import READERS, ElementReader

SPLIT_KEYS = 256  # keys of a split, the unit of the online softmax
S_ROW = SPLIT_KEYS * 4  # bytes of a row of scores
PAD = 32  # rows of queries, totals and unpacked keys are padded to a multiple of it
# Rows, keys and column vectors of a tile: together they fit the registers.
BLOCK_ROWS, TILE_KEYS, TILE_COLUMNS = ((4, 6), 4, 4) if isa().width == 64 else ((2,), 2, 2)
PREFETCH_KEYS = 24  # prefetch distance; lists of addresses are that much longer

_LINE = 64


def tuple_intrinsic(emit: Callable[..., Value | None], count: int, result: Any = None) -> Any:
    """Make an intrinsic that takes a tuple of ``count`` int64 and runs ``emit(e, *operands)``."""

    @intrinsic
    def run(typingctx, operands):
        def generate(context, builder, sig, values):
            parts = [builder.extract_value(values[0], i) for i in range(count)]
            value = emit(Emitter(builder), *parts)
            return context.get_dummy_value() if value is None else value

        return (result or types.none)(types.UniTuple(int64, count)), generate

    return run


def shuffle(e: Emitter, x: Value, y: Value, lanes: list[int]) -> Value:
    return e.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))


def fold(e: Emitter, vectors: list[Value]) -> Value:
    """Sum the lanes of each of up to 16 vectors; the sums are the lanes of one vector.

    Lane i is added to lane i + 8, then i + 4, i + 2, i + 1, whatever the number of vectors.
    """
    width = LANES
    while width > 1:
        half = width // 2
        starts = range(0, 2 * LANES, width)  # of segments in a pair of vectors
        low = [s + i for s in starts for i in range(half)]
        high = [lane + half for lane in low]
        if len(vectors) % 2:
            vectors = [*vectors, vectors[-1]]
        pairs = zip(vectors[::2], vectors[1::2])
        vectors = [e.add(shuffle(e, x, y, low), shuffle(e, x, y, high)) for x, y in pairs]
        width = half
    return vectors[0]


def _zeros(e: Emitter, count: int) -> list[Value]:
    return [e.variable(ir.Constant(F32S, None)) for _ in range(count)]


def _positive(e: Emitter, value: Value) -> Value:
    return e.b.icmp_signed(">", value, e.count(0))


# ------------------------------------------------------------------------------------------- unpack


def _unpack(reader: ElementReader) -> Callable[..., None]:
    def emit(
        e: Emitter, keys: Value, first: Value, last: Value, units: Value, rest: Value,
        target: Value, total_stride: Value,
    ) -> None:  # fmt: skip
        """Unpack rows ``first`` to ``last`` of a list to float32, zero-padded to whole units."""
        with e.loop(e.b.sub(last, first)) as loop:
            at = e.at(keys, e.times(e.b.add(first, loop.index), 8))
            row, ahead = e.load(at, I64), e.load(at, I64, 8 * PREFETCH_KEYS)
            out = e.at(target, e.b.mul(loop.index, total_stride))
            _unpack_row(e, reader, row, ahead, units, rest, out)

    return emit


def _unpack_row(
    e: Emitter,
    reader: ElementReader,
    row: Value,
    ahead: Value,
    units: Value,
    rest: Value,
    out: Value,
) -> None:
    scale = reader.scale_of(e, row, units)
    with e.loop(units) as step:
        offset = e.times(step.index, reader.nbytes)
        e.prefetch(e.at(ahead, offset))
        there = e.at(out, e.times(step.index, 4 * reader.unit))
        _store_all(e, reader.load_scaled(e, e.at(row, offset), scale), there)
    if reader.element is not None:
        with e.b.if_then(_positive(e, rest)):
            source = e.at(row, e.times(units, reader.nbytes))
            there = e.at(out, e.times(units, 4 * reader.unit))
            _store_all(e, reader.load_partial(e, source, rest), there)


def _store_all(e: Emitter, vectors: list[Value], address: Value) -> None:
    for i, vector in enumerate(vectors):
        e.store(vector, address, 4 * LANES * i)


# ------------------------------------------------------------------------------------------- scores


def _scores(reader: ElementReader, height: int) -> Callable[..., None]:
    def emit(
        e: Emitter, q: Value, q_stride: Value, blocks: Value, keys: Value, groups: Value,
        units: Value, rest: Value, s: Value,
    ) -> None:  # fmt: skip
        """s[row][key] = q[row] . key, in blocks of ``height`` rows and groups of TILE_KEYS keys."""
        with e.loop(groups) as group:
            row_of, ahead = _group(e, keys, group.index)
            tile = _ScoreTile(e, reader, height, row_of, ahead, units, rest)
            tile.emit(q, q_stride, blocks, e.at(s, e.times(group.index, TILE_KEYS * 4)))

    return emit


def _unpacked_scores(reader: ElementReader, height: int) -> Callable[..., None]:
    def emit(
        e: Emitter, q: Value, q_stride: Value, blocks: Value, keys: Value, groups: Value,
        units: Value, rest: Value, s: Value, out: Value,
    ) -> None:  # fmt: skip
        """As `_scores`, but each group of keys is unpacked once for all rows, to ``out``."""
        unpacked = [e.at(out, e.times(q_stride, i)) for i in range(TILE_KEYS)]
        steps = e.b.udiv(q_stride, e.count(4 * LANES))
        with e.loop(groups) as group:
            row_of, ahead = _group(e, keys, group.index)
            for row, next_row, target in zip(row_of, ahead, unpacked):
                _unpack_row(e, reader, row, next_row, units, rest, target)
            tile = _ScoreTile(e, READERS["f32"], height, unpacked, [], steps, e.count(0))
            tile.emit(q, q_stride, blocks, e.at(s, e.times(group.index, TILE_KEYS * 4)))

    return emit


def _group(e: Emitter, keys: Value, index: Value) -> tuple[list[Value], list[Value]]:
    """Addresses of a group of keys, and of the keys to prefetch meanwhile."""
    at = e.at(keys, e.times(index, 8 * TILE_KEYS))
    row_of = [e.load(at, I64, 8 * i) for i in range(TILE_KEYS)]
    return row_of, [e.load(at, I64, 8 * (PREFETCH_KEYS + i)) for i in range(TILE_KEYS)]


class _ScoreTile:
    """Scores of a group of keys with all rows."""

    def __init__(
        self, e: Emitter, reader: ElementReader, height: int, keys: list[Value], ahead: list[Value],
        units: Value, rest: Value,
    ) -> None:  # fmt: skip
        self.e, self.reader, self.height, self.keys, self.ahead = e, reader, height, keys, ahead
        self.units, self.rest = units, rest

    def emit(self, q: Value, q_stride: Value, blocks: Value, s: Value) -> None:
        """Emit the scores of all blocks of rows at ``q``, to the columns at ``s``."""
        e, reader, height = self.e, self.reader, self.height
        scales = [reader.scale_of(e, key, self.units) for key in self.keys]
        with e.loop(blocks) as block:
            first = e.b.mul(block.index, e.times(q_stride, height))
            rows = [e.at(q, first, e.times(q_stride, i)) for i in range(height)]
            sums = _zeros(e, height * TILE_KEYS)
            with e.loop(self.units) as step:
                offset = e.times(step.index, reader.nbytes)
                for key in self.ahead:
                    e.prefetch(e.at(key, offset))
                addresses = [e.at(key, offset) for key in self.keys]
                loaded = [reader.load_scaled(e, *x) for x in zip(addresses, scales)]
                _multiply(e, rows, e.times(step.index, 4 * reader.unit), loaded, sums)
            if reader.element is not None:
                with e.b.if_then(_positive(e, self.rest)):
                    offset = e.times(self.units, reader.nbytes)
                    loaded = [reader.load_partial(e, e.at(k, offset), self.rest) for k in self.keys]
                    _multiply(e, rows, e.times(self.units, 4 * reader.unit), loaded, sums)
            target = e.at(s, e.times(block.index, height * S_ROW))
            _store_scores(e, [e.get(v) for v in sums], target)


def _multiply(
    e: Emitter, rows: list[Value], offset: Value, loaded: list[list[Value]], sums: list[Value]
) -> None:
    """Add the products of a unit of a row and of a key to each sum."""
    for part in range(len(loaded[0])):
        for r, row in enumerate(rows):
            x = e.load(e.at(row, offset), F32S, 4 * LANES * part)
            for i, key in enumerate(loaded):
                total = sums[r * len(loaded) + i]
                e.set(total, e.madd(x, key[part], e.get(total)))


def _store_scores(e: Emitter, sums: list[Value], target: Value) -> None:
    """Fold the sums, ordered by row and then key, and store them a row at a time."""
    together = LANES // TILE_KEYS  # rows whose sums fill a vector
    for first in range(0, len(sums) // TILE_KEYS, together):
        some = sums[first * TILE_KEYS : (first + together) * TILE_KEYS]
        folded = fold(e, some)
        for r in range(len(some) // TILE_KEYS):
            lanes = [r * TILE_KEYS + i for i in range(TILE_KEYS)]
            e.store(shuffle(e, folded, folded, lanes), target, (first + r) * S_ROW)


# ------------------------------------------------------------------------------------------ softmax

_MIN_EXPONENT = -87.0  # e^x is zero below it, where it would be subnormal
_LOG2E = 1.4426950408889634
# The first part has 16 bits, so its product with an integer is exact.
_LN2 = (0.693145751953125, 1.42860682030941723212e-6)
# Adding _ROUND leaves the nearest integer in the low bits.
_ROUND, _ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
_FACTORS = tuple(1.0 / f for f in (5040, 720, 120, 24, 6, 2, 1, 1))
_STEP = LANES * 4  # bytes


def exp(e: Emitter, x: Value) -> Value:
    """e^x for x <= 0, accurate to about one unit in the last place; NaN stays NaN."""
    shifted = e.madd(x, e.f32(_LOG2E), e.f32(_ROUND))
    n = e.sub(shifted, e.f32(_ROUND))
    r = e.madd(n, e.f32(-_LN2[1]), e.madd(n, e.f32(-_LN2[0]), x))
    p = e.f32(_FACTORS[0])
    for factor in _FACTORS[1:]:
        p = e.madd(p, r, e.f32(factor))
    power = e.b.sub(e.b.bitcast(shifted, I32S), e.i32(_ROUND_BITS - 127))
    p = e.mul(p, e.b.bitcast(e.shl(power, 23), F32S))
    return e.b.select(e.b.fcmp_ordered("<", x, e.f32(_MIN_EXPONENT)), e.f32(0.0), p)


def larger(e: Emitter, x: Value, y: Value) -> Value:
    """Maximum lane by lane; y where x is NaN."""
    return e.b.select(e.b.fcmp_ordered(">", x, y), x, y)


def _largest(e: Emitter, x: Value) -> Value:
    """Broadcast the largest lane to every lane."""
    half = LANES // 2
    while half:
        x = larger(e, shuffle(e, x, x, [(i + half) % LANES for i in range(LANES)]), x)
        half //= 2
    return x


def _first(e: Emitter, x: Value) -> Value:
    return e.b.extract_element(x, ir.Constant(I32, 0))


def _softmax_row(
    e: Emitter, row: Value, first: Value, count: Value, low: Value, high: Value, scale: Value,
    top: Value, total: Value,
) -> None:  # fmt: skip
    """Emit the softmax weights of a row of scores, exp(scale * (score - maximum)), in place.

    The row is ``count`` vectors from vector ``first`` on; elements outside low..high (counted from
    the start of the row) get the weight zero. The maximum and the sum are stored at the addresses
    ``top`` and ``total``. NaN is not the maximum, but makes the sum NaN.
    """
    lanes: Any = ir.Constant(I32S, list(range(LANES)))
    low, size = (e.splat(e.b.trunc(v, I32)) for v in (low, e.b.sub(high, low)))
    start, minus_inf = e.at(row, e.times(first, _STEP)), e.f32(float("-inf"))
    scale = e.splat(e.b.bitcast(e.b.trunc(scale, I32), F32))
    begin = e.b.sub(e.b.add(e.splat(e.b.trunc(e.times(first, LANES), I32)), lanes), low)
    best = e.variable(minus_inf)
    with e.loop(count) as loop:
        at = e.at(start, e.times(loop.index, _STEP))
        place = e.b.add(begin, e.splat(e.b.trunc(e.times(loop.index, LANES), I32)))
        inside = e.b.icmp_unsigned("<", place, size)
        x = e.b.select(inside, e.mul(e.load(at, F32S), scale), minus_inf)
        e.store(x, at)
        e.set(best, larger(e, x, e.get(best)))
    largest = _largest(e, e.get(best))
    finite = e.b.select(e.b.fcmp_ordered("==", largest, minus_inf), e.f32(0.0), largest)
    sums = e.variable(e.f32(0.0))
    with e.loop(count) as loop:
        at = e.at(start, e.times(loop.index, _STEP))
        x = exp(e, e.sub(e.load(at, F32S), finite))
        e.store(x, at)
        e.set(sums, e.add(e.get(sums), x))
    folded = fold(e, [e.get(sums)])
    broken = e.b.fcmp_unordered("uno", folded, folded)  # all scores may be NaN
    e.store(_first(e, folded), total)
    e.store(_first(e, e.b.select(broken, finite, largest)), top)


# ------------------------------------------------------------------------------------------- values


def _values(reader: ElementReader, height: int) -> Callable[..., None]:
    strip = max(1, TILE_COLUMNS // reader.vectors)  # units

    def emit(
        e: Emitter, s: Value, blocks: Value, values: Value, first: Value, last: Value, units: Value,
        rest: Value, total: Value, total_stride: Value, old: Value, new: Value,
    ) -> None:  # fmt: skip
        """total[row] = total[row] * old[row] + new[row] * sum over keys of s[row][key] * value.

        Keys are ``first`` to ``last``; columns are ``units`` units and ``rest`` more elements.
        """
        strips = e.b.udiv(units, e.count(strip))
        done = e.times(strips, strip)
        operands = s, values, first, last, total, total_stride, old, new
        columns = _ColumnStrip(e, reader, height, *operands)
        with e.loop(blocks) as block:
            with e.loop(strips) as column:
                columns.emit(block.index, e.times(column.index, strip), strip, None, units)
            with e.loop(e.b.sub(units, done)) as column:
                columns.emit(block.index, e.b.add(done, column.index), 1, None, units)
            if reader.element is not None:
                with e.b.if_then(_positive(e, rest)):
                    columns.emit(block.index, units, 1, rest, units)

    return emit


class _ColumnStrip:
    """Some columns of the totals of a block of rows, over all keys of a split."""

    def __init__(self, e: Emitter, reader: ElementReader, height: int, *operands: Value) -> None:
        self.e, self.reader, self.height = e, reader, height
        self.s, self.values, self.first, self.last = operands[:4]
        self.total, self.total_stride, self.old, self.new = operands[4:]

    def emit(
        self, block: Value, start: Value, units: int, rest: Value | None, row_units: Value
    ) -> None:
        """Emit ``units`` of columns from unit ``start`` on, or only ``rest`` elements of it.

        ``row_units``: whole units of a row.
        """
        e, reader, count = self.e, self.reader, units * self.reader.vectors
        sums = _zeros(e, self.height * count)
        weights = e.at(self.s, e.times(block, self.height * S_ROW), e.times(self.first, 4))
        keys = e.at(self.values, e.times(self.first, 8))
        offset = e.times(start, reader.nbytes)
        with e.loop(e.b.sub(self.last, self.first)) as key:
            at = e.at(keys, e.times(key.index, 8))
            whole_row = e.load(at, I64)
            row, ahead = e.at(whole_row, offset), e.at(e.load(at, I64, 8 * PREFETCH_KEYS), offset)
            for line in range(0, units * reader.nbytes, _LINE):
                e.prefetch(ahead, line)
            if rest is None:
                scale, nbytes = reader.scale_of(e, whole_row, row_units), reader.nbytes
                places = [e.at(row, u * nbytes) for u in range(units)]
                units_of = [reader.load_scaled(e, place, scale) for place in places]
            else:
                units_of = [reader.load_partial(e, row, rest)]
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
            a, b = (e.broadcast_f32(e.at(x, e.times(row, 4))) for x in (self.old, self.new))
            target = e.at(self.total, e.b.mul(row, self.total_stride), start)
            for c in range(count):
                _blend(e, e.at(target, c * LANES * 4), sums[r * count + c], a, b)


def _blend(e: Emitter, target: Value, new: Value, a: Value, b: Value) -> None:
    e.store(e.madd(new, b, e.mul(e.load(target, F32S), a)), target)


def _merge_rows(e: Emitter, total: Value, part: Value, vectors: Value, a: Value, b: Value) -> None:
    """total = total * a + part * b as in `_values`; a and b are addresses of a float32 each."""
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
softmax_row = tuple_intrinsic(_softmax_row, 8)
