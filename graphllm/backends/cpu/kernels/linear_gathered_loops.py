"""Loops of integer linears on AVX2, from gathered activations; see `linear_loops.make_wide_loops`.

Of few tokens, the activations of all columns are gathered, and the rows of a group multiplied where
they are packed, in order. Of many, those of a chunk of columns; weights are unpacked to panels.
"""

from __future__ import annotations

from typing import Any

from ..formats import FORMATS
from ..runtime.isa import isa
from ..runtime.jit import helper
from ..simd.emitter import VECTOR
from .linear_amx import GROUP_RESULTS
from .linear_integer import CHUNK
from .linear_microkernels import few_tokens_tile, gather, gathered_tiles, gathered_unpack
from .token_tiles import WideLoops, zero_results


def gathers() -> bool:
    """Whether the processor multiplies integers from gathered activations."""
    return isa().avx2 and not isa().avx512 and not isa().vnni


def multiplies_few(name: str) -> bool:
    """Whether a format's words are multiplied as they are unpacked: in order, and as bytes."""
    form = FORMATS[name]
    return form.block == 32 or (form.chunk == form.sub and not form.signed(isa()))


def _most_few(name: str) -> int:
    """Most tokens that are multiplied without panels: as many as take less time so."""
    form = FORMATS[name]
    if form.block == CHUNK:
        return 8
    return 7 if form.signed(isa()) and not form.in_place_tokens(isa()) else 12


def make_gathered_loops(name: str) -> WideLoops:
    """`make_wide_loops` for AVX2."""
    from ..simd.activation_records import RECORD_BYTES, TILE_TOKENS
    from ..simd.linear_gathered import MOST_TOKENS, PANEL_BYTES

    nbytes, many = MOST_TOKENS * RECORD_BYTES + PANEL_BYTES, _many_tokens(name)
    if not multiplies_few(name):
        return WideLoops(many, nbytes, MOST_TOKENS, 8, TILE_TOKENS, 1)
    few, most = _few_tokens(name), _most_few(name)

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        if count <= most:
            few(w, g, last, x, rows, k, space, c, count)
        else:
            many(w, g, last, x, rows, k, space, c, count)

    return WideLoops(gemm, nbytes, MOST_TOKENS, 2, TILE_TOKENS, 1)


def _many_tokens(name: str) -> Any:
    """The GEMM for at most `MOST_TOKENS` tokens: see `simd.linear_gathered`."""
    from ..simd.activation_records import RECORD_BYTES, TILE_TOKENS
    from ..simd.linear_gathered import MOST_TOKENS

    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    records = MOST_TOKENS * RECORD_BYTES

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        panel, blocks = space + records, k // block
        results = (count + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS * VECTOR
        for b in range(0, blocks, per_chunk):
            size = min(per_chunk, blocks - b)
            gather(code, x, k, b * block, size, rows, count, space)
            for group in range(g, last):
                to = c + (group - g) * GROUP_RESULTS
                if b == 0:
                    zero_results(to, results)
                gathered_unpack(code, w + (group * blocks + b) * nbytes, panel, size)
                ahead = w + ((group + 1) * blocks + b) * nbytes
                if group + 1 == last:
                    ahead = w + (g * blocks + b + per_chunk) * nbytes
                gathered_tiles(code, panel, size, space, count, to, ahead)

    return gemm


def _few_tiles(name: str) -> Any:
    """Make a helper that multiplies a chunk of a group with the records of ``count`` tokens, in
    tiles of equal sizes."""
    from ..simd.activation_records import META_BYTES, TILE_TOKENS

    code = FORMATS[name].code
    record = CHUNK * (2 if FORMATS[name].signed(isa()) else 1) + META_BYTES

    @helper
    def run(w, size, records, count, c):
        tiles, t = (count + TILE_TOKENS - 1) // TILE_TOKENS, 0
        for left in range(tiles, 0, -1):
            tokens, x, to = (count - t + left - 1) // left, records + t * record, c + t * VECTOR
            if tokens == 4:
                few_tokens_tile(code, 4, w, size, x, to)
            elif tokens == 3:
                few_tokens_tile(code, 3, w, size, x, to)
            else:  # or one token, the last of a pass, whose record is followed by a copy
                few_tokens_tile(code, 2, w, size, x, to)
            t += tokens

    return run


def _few_tokens(name: str) -> Any:
    """The GEMM for few tokens: see `simd.linear_few_tokens`."""
    from ..simd.activation_records import RECORD_BYTES, TILE_TOKENS
    from ..simd.linear_gathered import MOST_TOKENS

    form, tiles = FORMATS[name], _few_tiles(name)
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        padded, blocks = (count + TILE_TOKENS - 1) // TILE_TOKENS * TILE_TOKENS, k // block
        chunk_bytes, span = padded * RECORD_BYTES, MOST_TOKENS // padded * per_chunk
        for begin in range(0, blocks, span):  # as many columns as the space has records for
            end = min(blocks, begin + span)
            for b in range(begin, end, per_chunk):
                to, size = space + (b - begin) // per_chunk * chunk_bytes, min(per_chunk, end - b)
                gather(code, x, k, b * block, size, rows, count, to)
            for group in range(g, last):
                to = c + (group - g) * GROUP_RESULTS
                if begin == 0:
                    zero_results(to, padded * VECTOR)
                for b in range(begin, end, per_chunk):
                    records = space + (b - begin) // per_chunk * chunk_bytes
                    at = w + (group * blocks + b) * nbytes
                    tiles(at, min(per_chunk, end - b), records, count, to)

    return gemm


__all__ = ["gathers", "make_gathered_loops", "multiplies_few"]
