"""Loops over the columns of interleaved weight rows and over tokens: see `make_loops`."""

from __future__ import annotations

from typing import Any

from ....formats import ROW_FORMATS
from ..formats import FORMATS
from ..runtime.isa import isa
from ..runtime.jit import helper, i64s
from ..simd.emitter import VECTOR
from .amx_operands import CHUNK_BYTES, GROUP_PANEL
from .linear_amx import GROUP_RESULTS, PAIR_GROUPS, PAIR_TOKENS, WIDE_TOKENS
from .linear_float import (
    FLOAT_CHUNK,
    FLOAT_PANEL,
    FLOAT_ROW,
    WIDE_FLOAT_GROUPS,
    WIDE_FLOAT_TOKENS,
)
from .linear_gathered_loops import gathers, make_gathered_loops, multiplies_few
from .linear_integer import CHUNK, PANEL
from .linear_microkernels import (
    amx_configure,
    amx_gather,
    amx_release,
    amx_tiles,
    amx_unpack,
    fused,
    fused_float,
    gather_floats,
    gathered_float_tile,
    tile,
    tile_float,
    unpack,
    unpack_float,
)
from .linear_row_loops import make_row_loops, make_wide_row_loops
from .token_tiles import (
    GROUP_ROWS,
    NEVER,
    NO_WIDE_LOOPS,
    PASS_TOKENS,
    WIDE_GROUPS,
    WideLoops,
    following_chunk,
    no_gemm,
    no_gemv,
    token_tiles,
    zero_results,
)

_CHUNKS_AHEAD = 3  # between a chunk of columns that is multiplied in place, and the one prefetched
_WIDE_FLOATS = WIDE_TOKENS // WIDE_FLOAT_TOKENS * WIDE_FLOAT_TOKENS  # tokens of a pass


def _integer(name: str, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """`make_loops` for quantised activations."""
    form = FORMATS[name]
    code, block, nbytes, most = form.code, form.block, form.nbytes, form.in_place_tokens(isa())

    @helper
    def gemv(w, g, x, k, c):
        blocks = k // block
        fused(code, w + g * blocks * nbytes, blocks, x, x + k, x + k + 4 * blocks, c)

    if gathers() and multiplies_few(name):
        return gemv, no_gemm, 0
    if most == 0:
        return gemv, _unpacking_gemm(name, groups, tokens), groups * PANEL
    in_place = _in_place_gemm(name, groups, tokens)
    if most >= PASS_TOKENS:
        return gemv, in_place, groups * PANEL
    unpacking = _unpacking_gemm(name, groups, tokens)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        if count <= most:
            in_place(w, g, last, x, rows, k, panel, c, count)
        else:
            unpacking(w, g, last, x, rows, k, panel, c, count)

    return gemv, gemm, groups * PANEL


def _integer_tiles(name: str, groups: int, tokens: int, in_place: bool) -> Any:
    """Make the tiles of tokens of the GEMMs of `_integer`."""
    form = FORMATS[name]
    code, block, place = form.code, form.block, int(in_place)
    per_sum, sum_bytes = (32, 4) if block == 32 else (16, 2)  # activations per sum, bytes of it

    def make_tile(count: int) -> Any:
        @helper
        def run(left, panel, size, x, rows, at, k, c, ahead, step, lines):
            d = x + k + at // block * 4
            s = x + k + k // block * 4 + at // per_sum * sum_bytes
            tile(
                code, place, groups, count, left, panel, size, x + at, d, s, rows, c,
                ahead, step, lines,
            )  # fmt: skip

        return run

    return token_tiles(groups, tokens, make_tile)


def _unpacking_gemm(name: str, groups: int, tokens: int) -> Any:
    """Make the GEMM of `_integer` that unpacks weights to panels."""
    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    loops = CHUNK // (32 if block == 32 else form.sub)  # iterations of a tile's loop
    tiles, following = _integer_tiles(name, groups, tokens, False), following_chunk(groups)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for b in range(0, k // block, per_chunk):
            size = min(per_chunk, k // block - b)
            for i in range(groups):
                source = w + (min(g + i, last - 1) * (k // block) + b) * nbytes
                unpack(code, source, panel + i * PANEL, size)
            ahead = w + following(b, per_chunk, k // block, g) * nbytes
            tiles(
                panel, size, x, rows, b * block, k, c, count,
                ahead, k // block * nbytes, per_chunk * nbytes, loops,
            )  # fmt: skip

    return gemm


def _in_place_gemm(name: str, groups: int, tokens: int) -> Any:
    """Make the GEMM of `_integer` that multiplies packed weights.

    Each load of a chunk prefetches the same place of a later chunk, so chunks have equal sizes.
    """
    form = FORMATS[name]
    block, nbytes, most = form.block, form.nbytes, CHUNK // form.block
    tiles = _integer_tiles(name, groups, tokens, True)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        blocks = k // block
        chunks = (blocks + most - 1) // most
        size = (blocks + chunks - 1) // chunks
        for b in range(0, blocks, size):
            for i in range(groups):
                i64s(panel)[i] = w + (min(g + i, last - 1) * blocks + b) * nbytes
            at, group = b, g
            for _ in range(_CHUNKS_AHEAD):
                at += size
                if at >= blocks:
                    at, group = 0, group + groups
            tiles(
                panel, min(size, blocks - b), x, rows, b * block, k, c, count,
                w + (group * blocks + at) * nbytes, 0, 0, 1,
            )  # fmt: skip

    return gemm


def _float(name: str, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """`make_loops` for float activations; block formats have no GEMV."""
    form = FORMATS[name]
    code, block, nbytes = form.code, form.block, form.nbytes
    chunk = max(FLOAT_CHUNK, block)
    panel_bytes = chunk * VECTOR

    def make_tile(count: int) -> Any:
        @helper
        def run(left, panel, size, x, rows, at, k, c, ahead, step, lines):
            tile_float(
                groups, count, left, panel, panel_bytes, size, x + 4 * at, rows, c,
                ahead, step, lines,
            )  # fmt: skip

        return run

    tiles, following = token_tiles(groups, tokens, make_tile), following_chunk(groups)

    @helper
    def gemv(w, g, x, k, c):
        for at in range(0, k, chunk):
            fused_float(code, w + (g * k + at) * nbytes, min(chunk, k - at), x + 4 * at, c)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for at in range(0, k, chunk):
            size = min(chunk, k - at)
            for i in range(groups):
                source = w + (min(g + i, last - 1) * k + at) // block * nbytes
                unpack_float(code, source, panel + i * panel_bytes, size // block)
            ahead = w + following(at, chunk, k, g) // block * nbytes
            tiles(
                panel, size, x, rows, at, k, c, count,
                ahead, k // block * nbytes, chunk // block * nbytes, chunk // 8,
            )  # fmt: skip

    return gemv if block == 1 else no_gemv, gemm, groups * panel_bytes


def make_loops(name: str, floating: bool, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """Make the loops that multiply rows with a matrix of a format.

    Both helpers add to accumulators at ``c``. ``g`` is the first group; ``last`` is the end of the
    groups that may be read.

    Args:
        name: weight format.
        floating: whether activations are float32.
        groups: groups of weight rows in a tile.
        tokens: tokens in a tile.

    Returns:
        ``gemv(w, g, x, k, c)`` for one token (or `no_gemv`),
        ``gemm(w, g, last, x, rows, k, panel, c, count)`` for several (or `no_gemm`, if those of
        `make_wide_loops` serve all of them), and the bytes of its panels.
    """
    if name in ROW_FORMATS:
        return make_row_loops(name, floating, groups, tokens)
    return (_float if floating else _integer)(name, groups, tokens)


def make_wide_loops(name: str, floating: bool) -> WideLoops:
    """Make the loops for many tokens; on targets without them, a function that is never called."""
    if name in ROW_FORMATS:
        return make_wide_row_loops(name, floating)
    if floating and isa().avx512 and FORMATS[name].block <= FLOAT_CHUNK:
        return _gathered_floats(name)
    if not floating and isa().amx:
        return _amx(name)
    if not floating and gathers():
        return make_gathered_loops(name)
    return NO_WIDE_LOOPS


def _gathered_floats(name: str) -> WideLoops:
    """`make_wide_loops` for float activations on AVX-512: see `linear_float.gathered_tile`."""
    form, by, most = FORMATS[name], WIDE_FLOAT_GROUPS, _WIDE_FLOATS
    code, block, nbytes, unit = form.code, form.block, form.nbytes, WIDE_FLOAT_TOKENS
    chunk_bytes, rows_bytes = FLOAT_CHUNK // block * nbytes, most * FLOAT_ROW
    lines = -(-chunk_bytes // VECTOR * unit // most)  # that a tile prefetches of each group

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        panel, row = space + rows_bytes, k // block * nbytes
        for at in range(0, k, FLOAT_CHUNK):
            size, offset = min(FLOAT_CHUNK, k - at), at // block * nbytes
            gather_floats(x + 4 * at, rows, count, size, space)
            for first in range(g, last, by):
                to = c + (first - g) * GROUP_RESULTS
                for i in range(by):  # the last group may be read twice
                    source = w + min(first + i, last - 1) * row + offset
                    unpack_float(code, source, panel + i * FLOAT_PANEL, size // block)
                    if at == 0:
                        zero_results(
                            to + i * GROUP_RESULTS, (count + unit - 1) // unit * unit * VECTOR
                        )
                ahead = w + (first + by) * row + offset
                if first + by >= last:
                    ahead = w + g * row + offset + chunk_bytes
                for t in range(0, count, unit):
                    gathered_float_tile(
                        lines, panel, size, space + t * FLOAT_ROW, to + t * VECTOR, GROUP_RESULTS,
                        ahead + t // unit * lines * VECTOR, row,
                    )  # fmt: skip

    return WideLoops(gemm, rows_bytes + by * FLOAT_PANEL, most, 2 * unit, unit, 8)


def _amx(name: str) -> WideLoops:
    """`make_wide_loops` for AMX: see `linear_amx`."""
    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    panels = WIDE_TOKENS * CHUNK_BYTES

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        meta, panel = space + WIDE_TOKENS * CHUNK, space + panels
        blocks = k // block
        amx_configure(code)
        for b in range(0, blocks, per_chunk):
            size = min(per_chunk, blocks - b)
            amx_gather(code, x, k, b * block, size, rows, count, space, meta)
            for first in range(g, last, PAIR_GROUPS):
                for i in range(PAIR_GROUPS):  # the last group may be read twice
                    source = w + (min(first + i, last - 1) * blocks + b) * nbytes
                    amx_unpack(code, source, panel + i * GROUP_PANEL, size)
                to = c + (first - g) * GROUP_RESULTS
                if b == 0:
                    for i in range(PAIR_GROUPS):
                        zero_results(to + i * GROUP_RESULTS, count * VECTOR)
                if first + PAIR_GROUPS < last:
                    ahead = w + ((first + PAIR_GROUPS) * blocks + b) * nbytes
                else:
                    ahead = w + (g * blocks + b + per_chunk) * nbytes
                amx_tiles(code, panel, size, space, meta, count, to, ahead, blocks * nbytes)
        amx_release()

    space_bytes = panels + PAIR_GROUPS * GROUP_PANEL
    if block == 32:
        return WideLoops(gemm, space_bytes, WIDE_TOKENS, 32, PAIR_TOKENS // 2, 12)
    least = 20 if form.folding in ("byte", "negated") else 28
    return WideLoops(gemm, space_bytes, WIDE_TOKENS, least, PAIR_TOKENS, least)


__all__ = ["GROUP_RESULTS", "GROUP_ROWS", "NEVER", "PAIR_GROUPS", "PAIR_TOKENS", "PASS_TOKENS",
           "WIDE_GROUPS", "WIDE_TOKENS", "WideLoops", "make_loops", "make_wide_loops", "no_gemv",
           "zero_results"]  # fmt: skip
