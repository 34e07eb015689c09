"""Code emitters of operands of AMX: activations and unpacked weights of a chunk of columns.

Activations are gathered into tiles of 16 tokens x 64 columns. Weights of blocks of 32 are unpacked
to signed bytes. In super-blocks the scales of sub-blocks are multiplied into the weights; where the
products do not fit a byte they are split into a low part and a multiple of a high part (see
`Block256.folding`), each of which is multiplied with the activations.
"""

from __future__ import annotations

from ..formats import Block256, by_code
from ..simd.amx import TILE_BYTES, TILE_ROWS
from ..simd.emitter import F32, I8, I32, I64, VECTOR, Emitter, Value
from ..simd.vectors import vector
from .linear_blocks import pair_sums
from .linear_integer import BLOCK32_PANEL, CHUNK

STEPS = CHUNK // VECTOR  # tiles of a chunk's columns
TOKEN_TILES = STEPS * TILE_BYTES  # bytes of 16 tokens' activations
META = VECTOR  # bytes of a token's scales and sums
SUMS = VECTOR // 2  # their place
CHUNK_BYTES = CHUNK + META  # of a token
PART = CHUNK // 4 * VECTOR  # bytes of a part of a group's scaled weights
FACTORS = 2 * PART  # place of offsets and factors
GROUP_PANEL = FACTORS + 10 * VECTOR  # bytes of a group's panel


# ----------------------------------------------------------------------------------- activations


def gather(
    e: Emitter, code: int, x: Value, k: Value, at: Value, blocks: Value, rows: Value,
    count: Value, tiles: Value, meta: Value,
) -> None:  # fmt: skip
    """Copy ``blocks`` blocks from column ``at`` on of ``count`` rows of ``k`` activations, at the
    offsets ``rows``, to ``tiles``, their scales and sums to ``meta``."""
    f = by_code(code)
    first = e.b.sdiv(at, e.count(f.block))
    scales = e.at(k, e.times(first, 4))
    sums = e.at(k, e.times(e.b.sdiv(k, e.count(f.block)), 4))
    sums = e.at(sums, e.times(first, 4 if f.block == 32 else 32))
    with e.loop(count) as loop:
        row = e.at(x, e.load(e.at(rows, e.times(loop.index, 8)), I64))
        q, d, s = (e.at(row, offset) for offset in (at, scales, sums))
        to, place = _tile_row(e, tiles, loop.index), e.at(meta, e.times(loop.index, META))
        if isinstance(f, Block256):
            for step in range(STEPS):
                e.store(e.load(q, offset=VECTOR * step), to, TILE_BYTES * step)
            e.store(e.load(d, F32), place)
            if f.minima:
                e.store(pair_sums(e, f, s), place, SUMS)
        else:
            _gather_blocks(e, blocks, q, d, s, to, place)


def _tile_row(e: Emitter, tiles: Value, token: Value) -> Value:
    """Address of the first 64 bytes of a token's activations."""
    tile = e.b.sdiv(token, e.count(TILE_ROWS))
    row = e.b.sub(token, e.times(tile, TILE_ROWS))
    return e.at(tiles, e.times(tile, TOKEN_TILES), e.times(row, VECTOR))


def _gather_blocks(
    e: Emitter, blocks: Value, q: Value, d: Value, s: Value, to: Value, place: Value
) -> None:
    """Copy blocks of 32, and to ``place`` their scales and scaled sums."""
    floats = vector(F32, 8)
    whole = e.b.icmp_signed("==", blocks, e.count(CHUNK // 32))
    with e.b.if_else(whole) as (then, otherwise):
        with then:
            for step in range(STEPS):
                e.store(e.load(q, offset=VECTOR * step), to, TILE_BYTES * step)
            scale, total = e.load(d, floats), e.load(s, vector(I32, 8))
            e.store(scale, place)
            e.store(e.mul(e.b.sitofp(total, floats), scale), place, SUMS)
        with otherwise, e.loop(blocks) as loop:
            four = e.times(loop.index, 4)
            scale, total = e.load(e.at(d, four), F32), e.load(e.at(s, four), I32)
            e.store(
                e.load(e.at(q, e.times(loop.index, 32)), vector(I8, 32)),
                block_at(e, to, loop.index),
            )
            e.store(scale, e.at(place, four))
            e.store(e.mul(e.b.sitofp(total, F32), scale), e.at(place, four), SUMS)


def block_at(e: Emitter, to: Value, block: Value) -> Value:
    """Address of a block of 32 activations: two are side by side in a tile."""
    half = e.b.and_(block, e.count(1))
    pair = e.b.sub(block, half)
    return e.at(to, e.times(pair, TILE_BYTES // 2), e.times(half, 32))


# --------------------------------------------------------------------------------------- weights


def unpack(e: Emitter, code: int, w: Value, panel: Value, blocks: Value) -> None:
    """Unpack blocks of a group, at most `CHUNK` columns, to its panel."""
    f = by_code(code)
    if isinstance(f, Block256):
        return _unpack_k(e, f, w, panel)
    with e.loop(blocks) as loop:
        source = e.at(w, e.times(loop.index, f.nbytes))
        target = e.at(panel, e.times(loop.index, BLOCK32_PANEL))
        for j, word in f.words(e, source):
            e.store(_less(e, word, f.zero_point(e)), target, VECTOR * j)
        for j, factor in enumerate(f.factors(e, source), 8):
            e.store(factor, target, VECTOR * j)


def _less(e: Emitter, word: Value, number: int) -> Value:
    """Subtract a number from each byte."""
    return e.add_bytes(word, -number & 0xFF) if number else word


def _unpack_k(e: Emitter, f: Block256, w: Value, panel: Value) -> None:
    subs, each, zero = f.block // f.sub, f.chunk // f.sub, 0 if f.minima else f.zero_point(e)
    operands = e.stack_buffer(2 * VECTOR * subs)  # of the multiplications with each scale
    for k in range(subs):
        pair = e.byte_pairs(f.scale_bytes(e, w, k // 4), f.place(k), f.signed_scales)
        for i, operand in enumerate(_operands(e, f.folding, pair)):
            e.store(operand, operands, VECTOR * (2 * k + i))
    with e.loop(f.block // f.chunk) as loop:
        source = e.at(w, f.words_at, e.times(loop.index, f.chunk_nbytes))
        target = e.at(panel, e.times(loop.index, f.chunk // 4 * VECTOR))
        scales = e.at(operands, e.times(loop.index, 2 * VECTOR * each))
        for j, word in f.words(e, source):
            pair = [e.load(scales, offset=VECTOR * (4 * j // f.sub * 2 + i)) for i in range(2)]
            for part, scaled in enumerate(_scaled(e, f.folding, word, pair, zero)):
                e.store(scaled, target, PART * part + VECTOR * j)
    factors = f.factors(e, w)
    if f.folding == "negated":
        factors = [e.sub(e.f32(-0.0), factor) for factor in factors]
    for j, found in enumerate([*(f.offsets(e, w) if f.minima else []), *factors]):
        e.store(found, panel, FACTORS + VECTOR * j)


# Whether the bytes of each part of scaled weights are unsigned, by `Block256.folding`.
PARTS = {"byte": [True], "negated": [False], "scale": [True, True], "product": [True, False]}
_SCALE_BITS, _PRODUCT_BITS = 3, 8  # of the low part


def _operands(e: Emitter, folding: str, scale: Value) -> list[Value]:
    """What `_scaled` multiplies with, from a scale as a pair of int16."""
    if folding == "byte":
        return [scale]
    if folding == "scale":
        low = e.mask(scale, ((1 << _SCALE_BITS) - 1) * 0x00010001)
        return [low, e.mask(e.shr(scale, _SCALE_BITS), 0x00FF00FF)]
    if folding == "negated":
        return [e.negative_i16(scale)]
    return [scale, e.mask(e.shl(scale, 8), 0xFF00FF00)]


def _scaled(e: Emitter, folding: str, q: Value, scale: list[Value], zero: int) -> list[Value]:
    """The parts of (q - ``zero``) * scale, for four bytes q in each lane."""
    if folding == "byte":  # no carry from one byte to the next
        return [e.multiply_i16(q, scale[0])]
    if folding == "scale":
        return [e.multiply_i16(q, part) for part in scale]
    q = _less(e, q, zero)
    odd = e.mask(q, 0xFF00FF00)
    if folding == "negated":
        return [_bytes(e, e.multiply_i16(q, scale[0]), e.multiply_i16(odd, scale[0]))]
    # Of q << 8 and scale << 8 the product's high half is q * scale.
    odd = e.multiply_high_i16(odd, scale[1])
    even = e.multiply_high_i16(e.mask(e.shl(q, 8), 0xFF00FF00), scale[0])
    low = _bytes(e, e.multiply_i16(q, scale[0]), e.mask(e.shl(odd, 8), 0xFF00FF00))
    return [low, _bytes(e, even, odd)]


def _bytes(e: Emitter, even: Value, odd: Value) -> Value:
    """The low bytes of each pair of ``even``, the high ones of ``odd``."""
    return e.b.or_(e.mask(even, 0x00FF00FF), e.mask(odd, 0xFF00FF00))


def join_parts(e: Emitter, folding: str, low: Value, high: Value) -> Value:
    """The sum that the sums of two parts stand for."""
    return e.b.add(low, e.shl(high, _SCALE_BITS if folding == "scale" else _PRODUCT_BITS))
