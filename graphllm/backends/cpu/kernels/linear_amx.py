"""Code emitters of the integer products of AMX; see `linear_microkernels` and `amx_operands`.

Tiles of activations are multiplied with tiles of weights, 16 tokens x 16 rows. The integers that
come out are those of the other instruction sets, and so are the float operations on them and their
order. A product is 32 columns deep for blocks of 32, and 256 for super-blocks. The vector units
work on the results of one product while the tile unit computes the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..formats import Block32, Block256, by_code
from ..simd import amx
from ..simd.amx import TILE_BYTES, TILE_ROWS, TileShape
from ..simd.emitter import F32S, VECTOR, Emitter, Value
from .amx_operands import (
    FACTORS,
    GROUP_PANEL,
    META,
    PART,
    PARTS,
    STEPS,
    SUMS,
    TOKEN_TILES,
    block_at,
    join_parts,
)
from .linear_integer import BLOCK32_PANEL, CHUNK

PAIR_TOKENS = 2 * TILE_ROWS  # tokens of two tiles
WIDE_TOKENS = 256  # most tokens of a pass: their results and activations stay in the L2 cache
PAIR_GROUPS = 2  # groups of weight rows that are multiplied in turn
# Bytes of a group's results [tokens][16]. A line more, since the processor takes a load from 4,096
# bytes after a pending store to depend on it.
GROUP_RESULTS = (WIDE_TOKENS + 1) * VECTOR
_RESULTS = PAIR_TOKENS * 2 * VECTOR  # bytes of four tiles: two vectors for each token
_RING = 2 * _RESULTS // TILE_BYTES  # tiles of results
_DISTANCE = 4  # blocks of 32 from a product to the use of its results; even
_C, _A, _B = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


def configure(e: Emitter, code: int) -> None:
    depth = 32 if by_code(code).block == 32 else VECTOR
    a, b = TileShape(TILE_ROWS, depth), TileShape(depth // 4, VECTOR)
    amx.configure(e, [TileShape(TILE_ROWS, VECTOR)] * 4 + [a] * 2 + [b] * 2)


def release(e: Emitter) -> None:
    amx.release(e)


def tiles(
    e: Emitter, code: int, panels: Value, blocks: Value, activations: Value, meta: Value,
    count: Value, c: Value, ahead: Value, stride: Value,
) -> None:  # fmt: skip
    """Add the products of the panels of two groups with ``count`` tokens to results at ``c``.

    Meanwhile, prefetch the same chunk of the groups at ``ahead`` and ``stride`` bytes after it.
    """
    f = by_code(code)
    following = [e.at(ahead, e.b.mul(stride, e.count(g))) for g in range(PAIR_GROUPS)]
    lines = CHUNK // f.block * f.nbytes // VECTOR

    def prefetch(index: Value, steps: Value) -> None:
        """Emit the prefetches of step ``index`` of ``steps``."""
        each = e.b.sdiv(e.b.add(e.count(lines - 1), steps), steps)
        first = e.b.mul(index, each)
        with e.b.if_then(e.b.icmp_signed("<", first, e.count(lines))), e.loop(each) as loop:
            for group in following:
                e.prefetch(e.at(group, e.times(e.b.add(first, loop.index), VECTOR)), level=2)

    pairs = e.b.sdiv(e.b.add(count, e.count(PAIR_TOKENS - 1)), e.count(PAIR_TOKENS))
    results = e.stack_buffer(2 * _RESULTS)
    if isinstance(f, Block256):
        _tiles_k(e, f, panels, activations, meta, pairs, c, results, prefetch)
    else:
        _tiles_32(e, f, panels, blocks, activations, meta, count, c, results, prefetch)


def _buffers(e: Emitter, results: Value, index: Value) -> tuple[Value, Value]:
    """Where the tiles of iteration ``index`` are stored, and those of the iteration before it."""
    odd = e.times(e.b.and_(index, e.count(1)), _RESULTS)
    return e.at(results, odd), e.b.sub(e.at(results, _RESULTS), odd)


def _zero_tiles(e: Emitter) -> None:
    for tile in (*_C, *_A, *_B):
        amx.zero(e, tile)


def _store_tiles(e: Emitter, to: Value) -> None:
    """Store the four tiles of results: of each token two vectors."""
    for i, tile in enumerate(_C):
        at = i // 2 * TILE_ROWS * 2 * VECTOR + i % 2 * VECTOR
        amx.store(e, tile, e.at(to, at), 2 * VECTOR)
        amx.zero(e, tile)


def _multiply(e: Emitter, a: Value, b: list[Value], unsigned: list[bool]) -> Iterator[None]:
    """Add the products of two tiles at ``a`` with those at ``b``; yields after each of them.

    Tiles are zeroed after their last use, which takes no time and frees their physical registers.
    Where two threads share a core, each has hardly more of these than the eight that the program
    names: loads and products would wait for the end of those before them.
    """
    (a0, a1), (b0, b1) = _A, _B
    amx.load(e, a0, a)
    amx.load(e, b0, b[0])
    amx.dot(e, _C[0], a0, b0, unsigned[0])
    yield
    amx.load(e, b1, b[1])
    amx.dot(e, _C[1], a0, b1, unsigned[1])
    amx.zero(e, a0)
    yield
    amx.load(e, a1, e.at(a, TOKEN_TILES))
    amx.dot(e, _C[2], a1, b0, unsigned[0])
    amx.zero(e, b0)
    yield
    amx.dot(e, _C[3], a1, b1, unsigned[1])
    amx.zero(e, a1)
    amx.zero(e, b1)
    yield


def _tiles_k(
    e: Emitter, f: Block256, panels: Value, activations: Value, meta: Value, pairs: Value, c: Value,
    results: Value, prefetch: Callable[[Value, Value], None],
) -> None:  # fmt: skip
    unsigned = PARTS[f.folding]
    split = len(unsigned) == 2  # the two tiles of weights are the parts of one group
    turns = PAIR_GROUPS if split else 1
    step = PART if split else GROUP_PANEL
    total = e.times(pairs, turns)
    rows = PAIR_TOKENS // STEPS // 4

    def place(index: Value) -> tuple[Value, Value]:
        """The pair of token tiles, and the group."""
        pair = e.b.ashr(index, e.count(turns - 1))
        return pair, e.b.sub(index, e.times(pair, turns))

    with e.loop(e.b.add(total, e.count(1))) as loop:
        to, old = _buffers(e, results, loop.index)
        more = e.b.icmp_signed("<", loop.index, total)
        some = e.b.icmp_signed(">", loop.index, e.count(0))
        pair, group = place(loop.index)
        a = e.at(activations, e.times(pair, 2 * TOKEN_TILES))
        b = e.at(panels, e.times(group, GROUP_PANEL))
        last_pair, last_group = place(e.b.sub(loop.index, e.count(1)))
        factors = _factors_k(e, f, e.at(panels, e.times(last_group, GROUP_PANEL)))
        first = e.at(c, e.times(last_pair, PAIR_TOKENS * VECTOR))
        first = e.at(first, e.times(last_group, GROUP_RESULTS))
        last_meta = e.at(meta, e.times(last_pair, PAIR_TOKENS * META))
        with e.b.if_then(more):
            _zero_tiles(e)
            prefetch(loop.index, total)
        with e.loop(STEPS) as steps:
            moved = e.times(steps.index, TILE_BYTES)
            products = _multiply(
                e, e.at(a, moved), [e.at(b, moved), e.at(b, moved, step)],
                unsigned if split else unsigned * 2,
            )  # fmt: skip
            for part in range(4):
                with e.b.if_then(more):
                    next(products)
                with e.b.if_then(some):
                    row = e.b.add(e.times(steps.index, 4 * rows), e.count(rows * part))
                    _finish_k(
                        e, f, rows, factors, e.at(old, e.times(row, 2 * VECTOR)),
                        e.at(last_meta, e.times(row, META)), e.at(first, e.times(row, VECTOR)),
                    )  # fmt: skip
        with e.b.if_then(more):
            _store_tiles(e, to)


def _factors_k(e: Emitter, f: Block256, panel: Value) -> list[tuple[list[Value], list[Value]]]:
    """Offsets and factors of a group, or of both whose results the tiles hold."""
    each, found = 128 // f.sub if f.minima else 0, []
    for g in range(PAIR_GROUPS // len(PARTS[f.folding])):
        at = e.at(panel, GROUP_PANEL * g + FACTORS)
        offsets = [e.load(at, offset=VECTOR * j) for j in range(each)]
        at = e.at(at, VECTOR * each)
        found.append((offsets, [e.load(at, F32S, VECTOR * j) for j in range(1 + f.minima)]))
    return found


def _finish_k(
    e: Emitter, f: Block256, rows: int, groups: list[tuple[list[Value], list[Value]]],
    results: Value, meta: Value, c: Value,
) -> None:  # fmt: skip
    """Add the contribution of a super-block to ``rows`` tokens, from the results of tiles."""
    for r in range(rows):
        totals = [e.load(results, offset=VECTOR * (2 * r + j)) for j in range(2)]
        if len(groups) == 1:
            totals = [join_parts(e, f.folding, *totals)]
        d, at = e.broadcast_f32(meta, META * r), VECTOR * r
        sums = [e.broadcast_i32(meta, META * r + SUMS + 4 * j) for j in range(len(groups[0][0]))]
        for total, (offsets, factors) in zip(totals, groups):
            offset = None
            for pair, s in zip(offsets, sums):
                offset = e.dot_i16(pair, s, offset)
            value = e.mul(f.join(e, total, offset, factors), d)
            e.store(e.add(e.load(c, F32S, at), value), c, at)
            at += GROUP_RESULTS


class _Products32:
    """Products of blocks of 32 of each tile of tokens with both groups, in a row.

    Consecutive products have tiles of their own: the results of one are stored while the next runs,
    since a store right after its product waits for it.
    """

    def __init__(
        self, e: Emitter, panels: Value, activations: Value, results: Value, blocks: Value,
        items: Value,
    ) -> None:  # fmt: skip
        """``blocks``, an even number: those of an item, which is a tile of tokens and a group."""
        self.e, self.panels, self.activations, self.results = e, panels, activations, results
        self.blocks, self.items = blocks, items
        self._item, self._block, self._step = (e.variable(e.count(0)) for _ in range(3))

    def old(self) -> Value:
        """Results of the product that is used in this step."""
        return self._place(_DISTANCE)

    def multiply(self, half: int) -> Iterator[None]:
        """Multiply the tiles of a block, and store the results of the product before; after the
        last product, multiply those of any other. ``half``: 0 and 1 alternate."""
        e, i, k = self.e, self.e.get(self._item), self.e.get(self._block)
        token_tile, group = _place_of(e, i)
        at = e.at(self.activations, e.times(token_tile, TOKEN_TILES))
        amx.zero(e, _C[half])
        amx.load(e, _A[half], block_at(e, at, k))
        yield
        panel = e.at(_panel(e, self.panels, group), e.times(k, BLOCK32_PANEL))
        amx.load(e, _B[half], panel)
        yield
        amx.store(e, _C[1 - half], self._place(1))
        amx.zero(e, _C[1 - half])
        yield
        amx.dot(e, _C[half], _A[half], _B[half], False)
        amx.zero(e, _A[half])
        amx.zero(e, _B[half])
        following = e.b.add(k, e.count(1))
        wrap = e.b.icmp_signed("==", following, self.blocks)
        e.set(self._block, e.b.select(wrap, e.count(0), following))
        i = e.b.select(wrap, e.b.add(i, e.count(1)), i)
        e.set(self._item, e.b.select(e.b.icmp_signed("<", i, self.items), i, e.count(0)))
        e.set(self._step, e.b.add(e.get(self._step), e.count(1)))
        yield

    def _place(self, before: int) -> Value:
        """Where the results of a product ``before`` this one are stored."""
        e = self.e
        step = e.b.sub(e.get(self._step), e.count(before))
        return e.at(self.results, e.times(e.b.and_(step, e.count(_RING - 1)), TILE_BYTES))


def _place_of(e: Emitter, item: Value) -> tuple[Value, Value]:
    """The tile of tokens, and the group."""
    return e.b.ashr(item, e.count(1)), e.b.and_(item, e.count(1))


def _tiles_32(
    e: Emitter, f: Block32, panels: Value, blocks: Value, activations: Value, meta: Value,
    count: Value, c: Value, results: Value, prefetch: Callable[[Value, Value], None],
) -> None:  # fmt: skip
    """One tile of tokens and one group at a time: the sums of its tokens fit the registers."""
    one = e.count(1)
    total = e.times(e.b.sdiv(e.b.add(count, e.count(TILE_ROWS - 1)), e.count(TILE_ROWS)), 2)
    pairs, odd = e.b.ashr(blocks, one), e.b.and_(blocks, one)
    products = _Products32(e, panels, activations, results, e.b.add(blocks, odd), total)
    with e.loop(_DISTANCE // 2):
        for half in range(2):
            [*products.multiply(half)]
    with e.loop(total) as loop:
        token_tile, group = _place_of(e, loop.index)
        own = e.at(meta, e.times(token_tile, TILE_ROWS * META))
        at = e.at(c, e.times(group, GROUP_RESULTS), e.times(token_tile, TILE_ROWS * VECTOR))
        sums = [e.variable(e.load(at, F32S, VECTOR * i)) for i in range(TILE_ROWS)]
        prefetch(loop.index, total)

        def multiply_and_add(half: int, index: Value) -> None:
            """Multiply, and meanwhile add an earlier product."""
            panel = e.at(_panel(e, panels, group), e.times(index, BLOCK32_PANEL))
            meta_at = e.at(own, e.times(index, 4))
            finish = _finish_32(e, f, sums, panel, products.old(), meta_at)
            for _ in products.multiply(half):
                next(finish)

        with e.loop(pairs) as each:
            for half in range(2):
                multiply_and_add(half, e.b.add(e.times(each.index, 2), e.count(half)))
        with e.b.if_then(e.b.icmp_signed("==", odd, one)):
            multiply_and_add(0, e.b.sub(blocks, one))
            [*products.multiply(1)]  # of no block, for an even number
        for i, total_of in enumerate(sums):
            e.store(e.get(total_of), at, VECTOR * i)


def _panel(e: Emitter, panels: Value, group: Value) -> Value:
    return e.at(panels, e.times(group, GROUP_PANEL))


def _finish_32(
    e: Emitter, f: Block32, sums: list[Value], panel: Value, results: Value, meta: Value
) -> Iterator[None]:
    """Add the contribution of a block to the sums of a tile's tokens, from its results; in four
    steps."""
    scale, *minimum = (e.load(panel, F32S, VECTOR * (8 + j)) for j in range(1 + f.has_minimum))
    for r, total in enumerate(sums):
        dot = e.to_f32(e.load(results, offset=VECTOR * r))
        value = e.mul(dot, e.mul(scale, e.broadcast_f32(meta, META * r)))
        value = e.add(e.get(total), value)
        if minimum:
            s = e.broadcast_f32(meta, META * r + SUMS)
            value = e.add(value, e.mul(minimum[0], s))
        e.set(total, value)
        if r % 4 == 3:
            yield


__all__ = ["GROUP_RESULTS", "PAIR_GROUPS", "PAIR_TOKENS", "WIDE_TOKENS", "configure", "release",
           "tiles"]  # fmt: skip
