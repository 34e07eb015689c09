"""Loops of linear over matrices in row formats; see `linear_loops.make_loops`."""

from __future__ import annotations

from typing import Any

from ..formats import FORMATS
from ..formats.row_formats import BLOCK, STEP, Float8Rows
from ..runtime.isa import isa
from ..runtime.jit import helper, i64s
from ..simd.emitter import VECTOR
from .linear_amx import GROUP_RESULTS, PAIR_GROUPS, WIDE_TOKENS
from .linear_float import FLOAT_CHUNK
from .linear_microkernels import (
    amx_release,
    row_amx_configure,
    row_amx_gather,
    row_amx_tiles,
    row_finish,
    row_fused,
    row_fused_float,
    row_tile,
    row_unpack,
    tile_float,
    upcast_activations,
    workspace,
)
from .linear_rows import AMX_COLUMNS, AMX_TILES
from .token_tiles import (
    GROUP_ROWS,
    NO_WIDE_LOOPS,
    PASS_TOKENS,
    WideLoops,
    token_tiles,
    zero_results,
)

_CHUNK = 512  # columns per update of c: those of three groups fit the L1 cache
_FLOAT_PANEL = FLOAT_CHUNK * VECTOR
_COLUMN = GROUP_ROWS  # bytes of a column of a packed group


def _group(name: str) -> tuple[Any, Any]:
    """Helpers that return the bytes of a packed group of ``k`` columns, and the offset in it of the
    scales of column ``at``."""
    per = FORMATS[name].scale_columns

    @helper
    def scales(k, at):
        return (k + STEP - 1) // STEP * STEP * _COLUMN + (at // per * VECTOR if per != 0 else 0)

    @helper
    def nbytes(k):
        return scales(k, 0) + (k // per * VECTOR if per != 0 else VECTOR)

    return nbytes, scales


def make_row_loops(name: str, floating: bool, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """`linear_loops.make_loops` for row formats."""
    if floating or isinstance(FORMATS[name], Float8Rows):
        return _float(name, floating, groups, tokens)
    return _integer(name, groups, tokens)


def _integer(name: str, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """Sums of int8 products are kept as int32 at ``c`` until the end of the rows."""
    code, (group_bytes, scales) = FORMATS[name].code, _group(name)

    def make_tile(count: int) -> Any:
        @helper
        def run(left, panel, size, x, rows, at, k, c, ahead, step, lines):
            row_tile(code, groups, count, left, panel, size, x + at, rows, c)

        return run

    tiles = token_tiles(groups, tokens, make_tile)

    @helper
    def gemv(w, g, x, k, c):
        group = w + g * group_bytes(k)
        row_fused(code, group, k // BLOCK, x, c)
        place = workspace(VECTOR)  # the group's scales, and the offset of the only token
        i64s(place)[0], i64s(place)[1] = group + scales(k, 0), 0
        row_finish(code, 1, place, x, k, place + 8, 1, c, VECTOR, VECTOR)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for at in range(0, k, _CHUNK):
            for i in range(groups):
                i64s(panel)[i] = w + min(g + i, last - 1) * group_bytes(k) + at * _COLUMN
            size = min(_CHUNK, k - at) // BLOCK
            tiles(panel, size, x, rows, at, k, c, count, 0, 0, 0, 1)
        for i in range(groups):
            i64s(panel)[i] = w + min(g + i, last - 1) * group_bytes(k) + scales(k, 0)
        row_finish(code, groups, panel, x, k, rows, count, c, groups * VECTOR, VECTOR)

    return gemv, gemm, VECTOR


def _float(name: str, floating: bool, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """Weights, and activations that are not ``floating``, are upcast by chunks of columns."""
    form, (group_bytes, scales) = FORMATS[name], _group(name)
    code, per, panels = form.code, form.scale_columns, groups * _FLOAT_PANEL
    row_bytes = 4 * FLOAT_CHUNK  # of a token's upcast activations

    def make_tile(count: int) -> Any:
        @helper
        def run(left, panel, size, x, rows, at, k, c, ahead, step, lines):
            tile_float(
                groups, count, left, panel, _FLOAT_PANEL, size, x, rows, c, ahead, step, lines
            )

        return run

    tiles = token_tiles(groups, tokens, make_tile)

    @helper
    def upcast(row, at, k, size, to):
        d = row + k + (at // per * 4 if per != 0 else 0)
        upcast_activations(row + at, d, to, size)

    @helper
    def gemv(w, g, x, k, c):
        group, room = w + g * group_bytes(k), workspace(row_bytes)
        for at in range(0, k, FLOAT_CHUNK):
            size, row = min(FLOAT_CHUNK, k - at), x + 4 * at
            if not floating:
                row = room
                upcast(x, at, k, size, room)
            d = group + scales(k, at)
            row_fused_float(code, group + at * _COLUMN, d, size // BLOCK, row, c)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        upcast_rows = panel + panels
        offsets = upcast_rows + PASS_TOKENS * row_bytes
        for t in range(count if not floating else 0):
            i64s(offsets)[t] = t * row_bytes
        for at in range(0, k, FLOAT_CHUNK):
            size = min(FLOAT_CHUNK, k - at)
            for i in range(groups):
                group = w + min(g + i, last - 1) * group_bytes(k)
                target = panel + i * _FLOAT_PANEL
                row_unpack(code, group + at * _COLUMN, group + scales(k, at), target, size // BLOCK)
            ahead = w + g * group_bytes(k) + (at + FLOAT_CHUNK) * _COLUMN
            values, places = x + 4 * at, rows
            if not floating:
                values, places = upcast_rows, offsets
                for t in range(count):
                    upcast(x + i64s(rows)[t], at, k, size, upcast_rows + t * row_bytes)
            tiles(
                panel, size, values, places, at, k, c, count,
                ahead, group_bytes(k), FLOAT_CHUNK * _COLUMN, FLOAT_CHUNK // 8,
            )  # fmt: skip

    space = 0 if floating else PASS_TOKENS * (row_bytes + 8)
    return gemv, gemm, panels + space


def make_wide_row_loops(name: str, floating: bool) -> WideLoops:
    """`linear_loops.make_wide_loops` for row formats."""
    if floating or isinstance(FORMATS[name], Float8Rows) or not isa().amx:
        return NO_WIDE_LOOPS
    code, (group_bytes, scales) = FORMATS[name].code, _group(name)
    activations = WIDE_TOKENS // 16 * AMX_TILES

    @helper
    def gemm(w, g, last, x, rows, k, space, c, count):
        stride, places = group_bytes(k), space + activations
        row_amx_configure()
        for at in range(0, k, AMX_COLUMNS):
            steps = (min(AMX_COLUMNS, k - at) + STEP - 1) // STEP
            row_amx_gather(x + at, steps, rows, count, space)
            for first in range(g, last, PAIR_GROUPS):
                second = min(first + 1, last - 1)  # the last group may be read twice
                to = c + (first - g) * GROUP_RESULTS
                if at == 0:
                    for i in range(PAIR_GROUPS):
                        zero_results(to + i * GROUP_RESULTS, count * VECTOR)
                source, ahead = w + at * _COLUMN, w + (first + PAIR_GROUPS) * stride + at * _COLUMN
                if first + PAIR_GROUPS >= last:
                    ahead = w + g * stride + (at + AMX_COLUMNS) * _COLUMN
                row_amx_tiles(
                    source + first * stride, source + second * stride, steps, space, count, to,
                    GROUP_RESULTS, ahead, stride,
                )  # fmt: skip
        amx_release()
        for first in range(g, last, PAIR_GROUPS):
            for i in range(PAIR_GROUPS):
                i64s(places)[i] = w + min(first + i, last - 1) * stride + scales(k, 0)
            to = c + (first - g) * GROUP_RESULTS
            row_finish(code, PAIR_GROUPS, places, x, k, rows, count, to, VECTOR, GROUP_RESULTS)

    return WideLoops(gemm, activations + VECTOR, WIDE_TOKENS, 16, 16, 8)
