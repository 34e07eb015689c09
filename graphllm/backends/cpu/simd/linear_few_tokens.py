"""Code emitters of integer products of few tokens with AVX2; see `kernels.linear_microkernels`.

Activations are gathered as in `linear_gathered`, but weights are multiplied with all tokens of a
tile as they are unpacked. A panel would take more instructions than it saves for so few tokens, and
memory would be idle while one is multiplied.

Signed bytes are multiplied in int16, bytes 0 and 2 of each word and then bytes 1 and 3. Both stay
in the high halves of int16, which takes one instruction, so dots are 256 times as large; they fit
int32.
"""

from __future__ import annotations

from ..formats import Block32, Block256, by_code
from ..kernels.linear_blocks import factors_of, scales_of
from ..kernels.linear_integer import CHUNK
from .activation_records import activation_bytes, record_bytes
from .emitter import VECTOR, Emitter, Value
from .linear_gathered import add_blocks, add_super_block, add_to_totals, dots_of, starts_of

_AHEAD = 12 << 10  # bytes between what is loaded and what is prefetched


def tile(
    e: Emitter, code: int, tokens: int, w: Value, blocks: Value, records: Value, c: Value
) -> None:
    """Add the products of packed blocks, at most `CHUNK` columns, with ``tokens`` tokens, whose
    records begin at ``records``, to results at ``c``."""
    f = by_code(code)
    rows = [e.at(records, record_bytes(f, e) * t) for t in range(tokens)]
    if isinstance(f, Block256):
        _tile_k(e, f, w, rows, c)
    else:
        _tile_32(e, f, w, blocks, rows, c)


def _tile_32(e: Emitter, f: Block32, w: Value, blocks: Value, rows: list[Value], c: Value) -> None:
    size = activation_bytes(f, e)
    with e.loop(blocks) as loop:
        at = e.at(w, e.times(loop.index, f.nbytes))
        xs = [e.at(row, e.times(loop.index, 32 * size)) for row in rows]
        metas = [e.at(row, CHUNK * size) for row in rows]
        with e.prefetching(e.count(_AHEAD)):
            if f.signed(e.isa):
                dots = _signed_dots(e, f, at, xs)
            else:
                starts = starts_of(e, f, metas, loop.index)
                dots = dots_of(e, f, f.words(e, at), xs, e.i32(0x00010001), starts)
            factors = f.factors(e, at)
        add_blocks(e, f, loop.index, dots, factors, metas, c)


def _signed_dots(e: Emitter, f: Block32, at: Value, rows: list[Value]) -> list[Value]:
    """Dots of a block of signed bytes."""
    dots = [e.i32(0)] * len(rows)
    for j, word in f.words(e, at):
        for odd, values in enumerate((e.shl_i16(word, 8), e.mask(word, 0xFF00FF00))):
            dots = [
                e.keep(e.dot_i16(values, e.broadcast_i32(row, 4 * j + 32 * odd), dot))
                for row, dot in zip(rows, dots)
            ]
    return [e.sar(dot, 8) for dot in dots]


def _tile_k(e: Emitter, f: Block256, w: Value, rows: list[Value], c: Value) -> None:
    subs = CHUNK // f.sub
    totals, scales = e.stack_buffer(VECTOR * len(rows)), e.stack_buffer(VECTOR * subs)
    metas = [e.at(row, CHUNK) for row in rows]
    for t in range(len(rows)):
        e.store(e.i32(0), totals, VECTOR * t)
    with e.prefetching(e.count(_AHEAD)):
        for k, scale in enumerate(scales_of(e, f, w)):
            e.store(scale, scales, VECTOR * k)
        with e.loop(subs) as loop:
            at = e.at(w, f.words_at, e.times(loop.index, f.chunk_nbytes))
            xs = [e.at(row, e.times(loop.index, f.sub)) for row in rows]
            own = e.load(e.at(scales, e.times(loop.index, VECTOR)), streamed=False)
            starts = starts_of(e, f, metas, loop.index)
            add_to_totals(e, dots_of(e, f, f.words(e, at), xs, own, starts), totals)
        _, offsets, factors = factors_of(e, f, w)
    found = [e.load(totals, offset=VECTOR * t) for t in range(len(rows))]
    add_super_block(e, f, offsets if f.minima else [], factors, found, metas, c)


__all__ = ["tile"]
