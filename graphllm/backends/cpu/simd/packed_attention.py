"""Vector code of `kernels.packed_attention`, with a lane for each query.

Keys and values are read where they are, an element at a time, which a multiply-add broadcasts. So
the softmax needs no sums or maxima across lanes. An element of the scores adds products in the
order of the columns, an element of the result in the order of the keys, whatever the tiles are.
"""

from __future__ import annotations

from typing import Any

from ..kernels.attention_vectors import exp, larger, shuffle, tuple_intrinsic
from ..kernels.pool_elements import READERS
from ..runtime.isa import isa
from .emitter import F32, F32S, I32, LANES, VECTOR, Emitter, Value

_WIDE = isa().avx512
# Keys whose scores are sums in registers: of large tiles, of small ones.
_KEYS = (8, 4) if _WIDE else (4,)
# Rows of the result that are sums in registers, and their vectors of columns.
RESULT_ROWS, _COLUMNS = (8, 2) if _WIDE else (4, 1)
_UNROLL = 4  # columns of a query in an iteration


def _transposed(e: Emitter, rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors: swap quadrants of blocks of 16, 8, 4 and 2 rows and lanes."""
    step = LANES // 2
    while step:
        low = [i if not i & step else LANES + i - step for i in range(LANES)]
        high = [i + step if not i & step else LANES + i for i in range(LANES)]
        found = list(rows)
        for i in (i for i in range(LANES) if not i & step):
            found[i] = shuffle(e, rows[i], rows[i + step], low)
            found[i + step] = shuffle(e, rows[i], rows[i + step], high)
        rows, step = found, step // 2
    return rows


def _clamped(e: Emitter, rows: Value, index: Value, count: Value, stride: Value) -> Value:
    """Address of row ``index``, or of the last of ``count`` rows if there is none."""
    last = e.b.sub(count, e.count(1))
    inside = e.b.icmp_signed("<", index, last)
    return e.at(rows, e.b.mul(e.b.select(inside, index, last), stride))


def load_queries(vectors: int) -> Any:
    def emit(
        e: Emitter, q: Value, stride: Value, count: Value, blocks: Value, scale: Value, to: Value
    ) -> None:
        """to[column][query] = query * scale, for ``blocks`` of 16 columns of ``count`` queries.

        The last query is read again in place of missing ones.
        """
        factor = e.splat(e.b.bitcast(e.b.trunc(scale, I32), F32))
        with e.loop(blocks) as block:
            offset = e.times(block.index, VECTOR)
            target = e.at(to, e.times(block.index, LANES * vectors * VECTOR))
            for v in range(vectors):
                lanes = (e.count(v * LANES + lane) for lane in range(LANES))
                places = [_clamped(e, q, lane, count, stride) for lane in lanes]
                rows = [e.mul(e.load(e.at(at, offset), F32S), factor) for at in places]
                for i, column in enumerate(_transposed(e, rows)):
                    e.store(column, target, (i * vectors + v) * VECTOR)

    return tuple_intrinsic(emit, 6)


def scores(vectors: int) -> Any:
    def emit(
        e: Emitter, q: Value, depth: Value, keys: Value, stride: Value, count: Value, to: Value
    ) -> None:
        """to[key][query] = key . query for ``count`` keys. ``q``: result of `load_queries`.

        The last tile is whole: scores of the last key follow those of all keys.
        """
        done = e.count(0)
        for size, least in zip(_KEYS, (*_KEYS[1:], _KEYS[-1])):
            rest = e.b.add(e.b.sub(count, done), e.count(least - 1))
            tiles = e.b.sdiv(rest, e.count(size))
            with e.loop(tiles) as tile:
                first = e.b.add(done, e.times(tile.index, size))
                rows = [_clamped(e, keys, e.b.add(first, e.count(i)), count, stride)
                        for i in range(size)]  # fmt: skip
                sums = _score_tile(e, vectors, q, depth, rows)
                target = e.at(to, e.times(first, vectors * VECTOR))
                for i, value in enumerate(sums):
                    e.store(value, target, i * VECTOR)
            done = e.b.add(done, e.times(tiles, size))

    return tuple_intrinsic(emit, 6)


def _score_tile(e: Emitter, vectors: int, q: Value, depth: Value, keys: list[Value]) -> list[Value]:
    """Dot products of each key with all queries, ordered by key and then vector."""
    sums = [[e.variable(e.f32(0.0)) for _ in range(vectors)] for _ in keys]

    def columns(first: Value, count: int) -> None:
        at, offset = e.at(q, e.times(first, vectors * VECTOR)), e.times(first, 4)
        for column in range(count):
            queries = [e.load(at, F32S, (column * vectors + v) * VECTOR) for v in range(vectors)]
            for key, totals in zip(keys, sums):
                one = e.broadcast_f32(e.at(key, offset), 4 * column)
                for query, total in zip(queries, totals):
                    e.set(total, e.madd(one, query, e.get(total)))

    whole = e.b.sdiv(depth, e.count(_UNROLL))
    with e.loop(whole) as loop:
        columns(e.times(loop.index, _UNROLL), _UNROLL)
    done = e.times(whole, _UNROLL)
    with e.loop(e.b.sub(depth, done)) as loop:
        columns(e.b.add(done, loop.index), 1)
    return [e.get(total) for totals in sums for total in totals]


def softmax(vectors: int) -> Any:
    def emit(e: Emitter, scores: Value, count: Value, top: Value, total: Value, old: Value) -> None:
        """Turn the scores [key][query] of a split into weights exp(score - maximum).

        Updates the maxima at ``top`` and the sums at ``total`` of the queries, and writes the
        factors of the results of earlier splits to ``old``. NaN is not the maximum, but makes the
        sum NaN.
        """
        before = [e.load(top, F32S, v * VECTOR) for v in range(vectors)]
        best = [e.variable(x) for x in before]
        with e.loop(count) as key:
            at = e.at(scores, e.times(key.index, vectors * VECTOR))
            for v, place in enumerate(best):
                e.set(place, larger(e, e.load(at, F32S, v * VECTOR), e.get(place)))
        minus_inf, finite, sums = e.f32(float("-inf")), [], []
        for v, (place, x) in enumerate(zip(best, before)):
            y = e.get(place)
            e.store(y, top, v * VECTOR)
            hidden = e.b.fcmp_ordered("==", y, minus_inf)  # no key of this or an earlier split
            finite.append(e.b.select(hidden, e.f32(0.0), y))
            factor = exp(e, e.sub(x, finite[-1]))
            e.store(factor, old, v * VECTOR)
            sums.append(e.variable(e.mul(e.load(total, F32S, v * VECTOR), factor)))
        with e.loop(count) as key:
            at = e.at(scores, e.times(key.index, vectors * VECTOR))
            for v, (most, place) in enumerate(zip(finite, sums)):
                weight = exp(e, e.sub(e.load(at, F32S, v * VECTOR), most))
                e.store(weight, at, v * VECTOR)
                e.set(place, e.add(e.get(place), weight))
        for v, place in enumerate(sums):
            e.store(e.get(place), total, v * VECTOR)

    return tuple_intrinsic(emit, 5)


def add_values(vectors: int) -> Any:
    reader = READERS["f32"]

    def emit(
        e: Emitter, weights: Value, blocks: Value, values: Value, stride: Value, count: Value,
        units: Value, rest: Value, result: Value, result_stride: Value, old: Value,
    ) -> None:  # fmt: skip
        """result[query] = result[query] * old[query] + sum of weights[key][query] * values[key].

        ``blocks``: of `RESULT_ROWS` queries. Columns are ``units`` vectors and ``rest`` more.
        """

        def columns(block: Value, first: Value, number: int, partial: bool = False) -> None:
            offset = e.times(first, VECTOR)
            sums = [[e.variable(e.f32(0.0)) for _ in range(number)] for _ in range(RESULT_ROWS)]
            own, source = e.at(weights, e.times(block, RESULT_ROWS * 4)), e.at(values, offset)
            with e.loop(count) as key:
                at = e.at(source, e.b.mul(key.index, stride))
                weight = e.at(own, e.times(key.index, vectors * VECTOR))
                if partial:
                    loaded = reader.load_partial(e, at, rest)
                else:
                    loaded = [e.load(at, F32S, c * VECTOR) for c in range(number)]
                for r, totals in enumerate(sums):
                    one = e.broadcast_f32(weight, 4 * r)
                    for value, total in zip(loaded, totals):
                        e.set(total, e.madd(one, value, e.get(total)))
            for r, totals in enumerate(sums):
                row = e.b.add(e.times(block, RESULT_ROWS), e.count(r))
                factor = e.broadcast_f32(e.at(old, e.times(row, 4)))
                target = e.at(result, e.b.mul(row, result_stride), offset)
                for c, total in enumerate(totals):
                    before = e.load(target, F32S, c * VECTOR)
                    e.store(e.madd(before, factor, e.get(total)), target, c * VECTOR)

        whole = e.b.sdiv(units, e.count(_COLUMNS))
        done = e.times(whole, _COLUMNS)
        with e.loop(blocks) as block:
            with e.loop(whole) as strip:
                columns(block.index, e.times(strip.index, _COLUMNS), _COLUMNS)
            if _COLUMNS > 1:
                with e.loop(e.b.sub(units, done)) as unit:
                    columns(block.index, e.b.add(done, unit.index), 1)
            with e.b.if_then(e.b.icmp_signed(">", rest, e.count(0))):
                columns(block.index, units, 1, partial=True)

    return tuple_intrinsic(emit, 10)
