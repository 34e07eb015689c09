"""Records of activations that integer products on AVX2 are computed from, and their emitters.

The activations of a chunk of columns are gathered once for several groups of weight rows, in the
form in which their products take the fewest instructions:

- Signed weights are multiplied in int16, by a widening product and an addition for two columns. A
  sign, a product of bytes, a widening product and an addition for four columns are as many
  instructions, but three of them need the two ports that multiply.
- Dots of a block or sub-block with a zero point start at minus the zero point times sums of
  activations in pairs. The sum of all its words then fits int16, and is widened and scaled once.

A token's record has its activations, then its scales, sums and starts (`META_SCALES` and
following), by block of 32 or by super-block.
"""

from __future__ import annotations

from ..formats import Block32, Block256, by_code
from ..kernels.linear_blocks import pair_sums
from ..kernels.linear_integer import CHUNK
from ..runtime.lazy_numba import ir
from .emitter import F32, I16, I32, I64, LANES, VECTOR, Emitter, Value
from .vectors import vector

TILE_TOKENS = 4  # records are gathered for whole tiles
META_SCALES, META_SUMS, META_STARTS, META_BYTES = 0, 32, 64, 128  # after the activations
RECORD_BYTES = 2 * CHUNK + META_BYTES  # of the largest record
_BLOCKS = CHUNK // 32
_MOST_BYTE = 127  # largest magnitude of an activation


def activation_bytes(f: Block32 | Block256, e: Emitter) -> int:
    """Bytes of an activation in a record."""
    return 2 if f.signed(e.isa) else 1


def record_bytes(f: Block32 | Block256, e: Emitter) -> int:
    return CHUNK * activation_bytes(f, e) + META_BYTES


def is_centred(f: Block32 | Block256, e: Emitter) -> bool:
    """Whether dots of blocks of 32 or of sub-blocks start at minus the zero point times sums of
    activations, so that they fit int16."""
    if isinstance(f, Block256):
        return not f.minima and f.has_offsets(e)
    zero = f.zero_point(e)
    most = 16 * _MOST_BYTE * max(zero, f.largest - zero)  # of an int16 lane: 16 of 32 columns
    return zero != 0 and not f.signed(e.isa) and most < 1 << 15


def gather(
    e: Emitter, code: int, x: Value, k: Value, at: Value, blocks: Value, rows: Value,
    count: Value, records: Value,
) -> None:  # fmt: skip
    """Gather ``blocks`` blocks from column ``at`` on of ``count`` rows of ``k`` activations, at the
    offsets ``rows``, into records; whole tiles, so the last token may be repeated."""
    f = by_code(code)
    first, meta = e.b.sdiv(at, e.count(f.block)), CHUNK * activation_bytes(f, e)
    scales = e.at(k, e.times(first, 4))
    sums = e.at(k, e.times(e.b.sdiv(k, e.count(f.block)), 4))
    sums = e.at(sums, e.times(first, 4 if f.block == 32 else 32))
    last = e.b.sub(count, e.count(1))
    with e.loop(e.times(tiles_of(e, count), TILE_TOKENS)) as loop:
        token = e.b.select(e.b.icmp_signed("<", loop.index, last), loop.index, last)
        row = e.at(x, e.load(e.at(rows, e.times(token, 8)), I64))
        to = e.at(records, e.times(loop.index, record_bytes(f, e)))
        q, d, s = (e.at(row, offset) for offset in (at, scales, sums))
        with e.loop(_BLOCKS if f.block == CHUNK else blocks) as each:
            _gather_values(e, f, q, to, each.index)
            if f.block == 32:
                _gather_block(e, f, q, d, s, e.at(to, meta), each.index)
        if isinstance(f, Block256):
            e.store(e.load(d, F32), to, meta + META_SCALES)
            if f.minima:
                e.store(pair_sums(e, f, s), to, meta + META_SUMS)
            if is_centred(f, e):
                _gather_starts(e, f, q, e.at(to, meta + META_STARTS))


def tiles_of(e: Emitter, count: Value) -> Value:
    return e.b.sdiv(e.b.add(count, e.count(TILE_TOKENS - 1)), e.count(TILE_TOKENS))


def _gather_values(e: Emitter, f: Block32 | Block256, q: Value, to: Value, block: Value) -> None:
    """Copy 32 activations; as int16, those of even columns come first."""
    at, words = e.times(block, 32), vector(I16, 16)
    values = e.load(e.at(q, at), words)
    if not f.signed(e.isa):
        return e.store(values, e.at(to, at))
    eight = ir.Constant(words, [8] * words.count)
    for odd, moved in enumerate((e.b.shl(values, eight), values)):
        e.store(e.b.ashr(moved, eight), e.at(to, e.times(at, 2)), 32 * odd)


def _gather_block(
    e: Emitter, f: Block32, q: Value, d: Value, s: Value, meta: Value, block: Value
) -> None:
    """Copy the scale of a block of 32, and derive what its sum is needed for."""
    four = e.times(block, 4)
    scale, place = e.load(e.at(d, four), F32), e.at(meta, four)
    e.store(scale, place, META_SCALES)
    total = e.load(e.at(s, four), I32)
    if f.has_minimum:
        e.store(e.mul(e.b.sitofp(total, F32), scale), place, META_SUMS)
    if is_centred(f, e):
        e.store(_start_of_block(e, f, e.at(q, e.times(block, 32))), place, META_STARTS)
    elif zero := f.zero_point(e):
        e.store(e.b.mul(total, I32(-zero)), place, META_STARTS)


def _start_of_block(e: Emitter, f: Block32, q: Value) -> Value:
    """As `_gather_starts`, of the 32 activations at ``q``."""
    half = e.load(q, vector(I32, LANES // 2))
    lanes = ir.Constant(vector(I32, LANES), [*range(LANES // 2)] * 2)
    values = e.b.shuffle_vector(half, half, lanes)
    sums = e.multiply_bytes(e.i32(0x01010101 * f.zero_point(e)), values, False)
    for apart in (1, 2, 4):
        sums = e.add_i16(sums, e.select_lanes(sums, [lane ^ apart for lane in range(LANES)]))
    return e.b.extract_element(e.negative_i16(sums), I32(0))


def _gather_starts(e: Emitter, f: Block256, q: Value, starts: Value) -> None:
    """Starts of the dots of a super-block: of the columns of each sub-block whose products are
    added in the low and in the high int16 of a lane, minus the zero point times the sum."""
    assert f.sub == 16, "the products of four words are added to a start"
    with e.loop(CHUNK // VECTOR) as loop:
        values = e.load(e.at(q, e.times(loop.index, VECTOR)))
        sums = e.multiply_bytes(e.i32(0x01010101 * f.offset), values, False)
        for apart in (1, 2):  # after that each of four lanes has their sum
            others = [lane ^ apart for lane in range(LANES)]
            sums = e.add_i16(sums, e.select_lanes(sums, others))
        first = ir.Constant(vector(I32, 4), [0, 4, 8, 12])
        found = e.negative_i16(sums)
        e.store(e.b.shuffle_vector(found, found, first), e.at(starts, e.times(loop.index, 16)))


__all__ = ["META_BYTES", "META_SCALES", "META_STARTS", "META_SUMS", "RECORD_BYTES", "TILE_TOKENS",
           "activation_bytes", "gather", "is_centred", "record_bytes", "tiles_of"]  # fmt: skip
