"""linear on the CPU: integer kernels for block formats, float kernels for every format.

Work is shared out in chunks of 16-row groups. The order of every sum depends on K and the format
alone, so a token's results have the same bits alone, in a batch, and for any number of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from .... import ops
from ....graph.dtype import F32, DType
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..formats import BLOCK_FORMATS, FORMATS
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.isa import isa
from ..runtime.jit import Kernel, args, f32s, helper, i64s, kernel, load_i64, next_chunk
from ..simd.emitter import VECTOR
from .linear_float import FLOAT_CHUNK
from .linear_integer import CHUNK, PANEL
from .linear_microkernels import (
    fused,
    fused_float,
    tile,
    tile_float,
    unpack,
    unpack_float,
    workspace,
)
from .weight_packing import pack, packed_bytes

GROUP_ROWS = 16  # rows
PASS_TOKENS = 128  # whose results are kept in the first-level cache at a time; whole tiles
# A thread takes so many bytes of weights at a time, or fewer, so that each comes back a few times.
_CHUNK_BYTES, _CHUNKS_PER_THREAD = 128 << 10, 8


def tile_shape(floating: bool) -> tuple[int, int]:
    """(Groups, tokens) of a tile: as many accumulators as registers, less what else needs some.

    Groups share each activation that is read, tokens each weight.
    """
    if isa().vnni or (floating and isa().avx512):
        return 3, 4
    return 1, 8 if isa().avx512 else 4 if isa().avx2 or not isa().x86 else 2


@helper
def tokens_per_pass(tokens, many):
    """Tokens per pass: equal parts of at most `PASS_TOKENS`, in whole tiles of ``many``."""
    parts = max(tokens + PASS_TOKENS - 1, PASS_TOKENS) // PASS_TOKENS
    each = (tokens + parts - 1) // parts
    return (each + many - 1) // many * many


@helper
def zero_results(c, count):
    results = f32s(c)
    for i in range(count * GROUP_ROWS):
        results[i] = 0


@helper
def _write_results(c, width, count, y, stride, bias, added, added_stride, first, n):
    """Write ``count`` tokens' results for ``width`` rows, of which those from ``n`` on are not
    wanted; with the bias, and with a row of its own added for each token, unless their address is
    0."""
    results, offsets = f32s(c), f32s(bias)
    rows = min(n - first, width)
    for t in range(count):
        row, before = f32s(y + t * stride + 4 * first), f32s(added + t * added_stride + 4 * first)
        for r in range(rows):
            value = results[t * width + r]
            value = value + offsets[first + r] if bias != 0 else value
            row[r] = before[r] + value if added != 0 else value


@helper
def no_gemv(w, g, x, k, c):
    """Where one token is multiplied as several are."""


def _token_tiles(wide, many, make):
    """A helper that goes over ``count`` tokens by ``many``, and by half as many at the end.

    ``make(tokens)`` makes ``tile(left, panel, step, size, x, rows, columns before, columns, c)``;
    ``wide``: groups in a tile, whose panels are ``step`` bytes apart; ``rows``: see `microkernels`.
    """
    few, each = many // 2, wide * 4 * GROUP_ROWS
    large, small = make(many), make(few)

    @helper
    def run(panel, step, size, x, rows, at, k, c, count):
        t = 0
        while t + many <= count:
            large(many, panel, step, size, x, rows + 8 * t, at, k, c + t * each)
            t += many
        while t < count:
            small(count - t, panel, step, size, x, rows + 8 * t, at, k, c + t * each)
            t += few

    return run


def _integer(name: str, wide: int, many: int) -> tuple[Any, Any, int]:
    """`loops` of quantised activations."""
    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    per_sums, sum_bytes = (32, 4) if block == 32 else (16, 2)

    def make(tokens):
        @helper
        def run(left, panel, step, size, x, rows, at, k, c):
            d = x + k + at // block * 4
            s = x + k + k // block * 4 + at // per_sums * sum_bytes
            tile(code, wide, tokens, left, panel, size, x + at, d, s, rows, c)

        return run

    tiles = _token_tiles(wide, many, make)

    @helper
    def gemv(w, g, x, k, c):
        blocks = k // block
        fused(code, w + g * blocks * nbytes, blocks, x, x + k, x + k + 4 * blocks, c)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for b in range(0, k // block, per_chunk):
            size = min(per_chunk, k // block - b)
            for i in range(wide):
                source = w + (min(g + i, last - 1) * (k // block) + b) * nbytes
                unpack(code, source, panel + i * PANEL, size)
            tiles(panel, PANEL, size, x, rows, b * block, k, c, count)

    return gemv, gemm, wide * PANEL


def _float(name: str, wide: int, many: int) -> tuple[Any, Any, int]:
    """`loops` of float activations; weights in blocks have none for one token."""
    form = FORMATS[name]
    code, block, nbytes = form.code, form.block, form.nbytes
    chunk = max(FLOAT_CHUNK, block)
    each = chunk * VECTOR  # bytes of a panel

    def make(tokens):
        @helper
        def run(left, panel, step, size, x, rows, at, k, c):
            tile_float(wide, tokens, left, panel, step, size, x + 4 * at, rows, c)

        return run

    tiles = _token_tiles(wide, many, make)

    @helper
    def gemv(w, g, x, k, c):
        for at in range(0, k, chunk):
            fused_float(code, w + (g * k + at) * nbytes, min(chunk, k - at), x + 4 * at, c)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for at in range(0, k, chunk):
            size = min(chunk, k - at)
            for i in range(wide):
                source = w + (min(g + i, last - 1) * k + at) // block * nbytes
                unpack_float(code, source, panel + i * each, size // block)
            tiles(panel, each, size, x, rows, at, k, c, count)

    return gemv if block == 1 else no_gemv, gemm, wide * each


def make_loops(name: str, floating: bool, wide: int, many: int) -> tuple[Any, Any, int]:
    """What multiplies rows with a matrix of this format: helpers for one token (or `no_gemv`) and
    for several, and the bytes of panels that those need. ``wide``, ``many``: groups and tokens of a
    tile.

    ``one(w, g, x, k, c)`` and ``several(w, g, last, x, rows, k, panel, c, count)`` add to results
    at ``c``; ``g``: the first group, ``last``: the end of groups that may be read.
    """
    return (_float if floating else _integer)(name, wide, many)


@cache
def _kernel(name: str, floating: bool, wide: int, many: int) -> Kernel:
    """The kernel for a format; see `loops`."""
    gemv, gemm, panels = make_loops(name, floating, wide, many)
    has_gemv, width = gemv is not no_gemv, wide * GROUP_ROWS
    results = PASS_TOKENS * 4 * width
    room = panels + results + 8 * PASS_TOKENS

    @kernel(key=(FORMATS[name].cache_key, floating, wide, many))
    def linear(p, thread, threads):
        x, stride, w, bias, y, y_stride, added, added_stride, live, n, k, per = args(p, 12)
        tokens, groups, panel = load_i64(live), (n + GROUP_ROWS - 1) // GROUP_ROWS, workspace(room)
        c, step, single = panel + panels, tokens_per_pass(tokens, many), has_gemv and tokens == 1
        rows = c + results
        if not single:
            per = (per + wide - 1) // wide * wide
            for t in range(step):
                i64s(rows)[t] = t * stride
        group = next_chunk(p) * per
        while tokens > 0 and group < groups:
            last = min(group + per, groups)
            if single:
                for g in range(group, last):
                    zero_results(c, 1)
                    gemv(w, g, x, k, c)
                    _write_results(
                        c, GROUP_ROWS, 1, y, y_stride, bias, added, added_stride, g * GROUP_ROWS, n
                    )
            else:
                for g in range(group, last, wide):
                    for t in range(0, tokens, step):
                        count, row, to = min(step, tokens - t), x + t * stride, y + t * y_stride
                        before = added + t * added_stride if added != 0 else 0
                        zero_results(c, wide * count)
                        # Of the last groups some may be multiplied twice, and are not written.
                        gemm(w, g, last, row, rows, k, panel, c, count)
                        at, end = g * GROUP_ROWS, min(n, last * GROUP_ROWS)
                        _write_results(
                            c, width, count, to, y_stride, bias, before, added_stride, at, end
                        )
            group = next_chunk(p) * per

    return linear


# ------------------------------------------------------------------------------------ registration


def launch(
    ctx: KernelContext, x: OperandRef, w: OperandRef, bias: OperandRef | None, out: OperandRef,
    added: OperandRef | None = None, overlaps_previous: bool = False,
) -> Launch:  # fmt: skip
    """out = added + x w^T + bias: one linear, or one of several of a fused step."""
    n, k = w.meta.shape
    assert isinstance(n, int) and isinstance(k, int)
    per = groups_per_chunk(w.meta, 1, ctx.threads)
    words = [
        x.address, x.row_stride, w.address, address(bias), out.address,
        out.row_stride, *((added.address, added.row_stride) if added else (0, 0)),
        ctx.live(x.meta.rows), n, k, per,
    ]  # fmt: skip
    floating = x.dtype == F32
    return Launch(_kernel(w.dtype.name, floating, *tile_shape(floating)), words, overlaps_previous)


def groups_per_chunk(w: Meta, matrices: int, threads: int) -> int:
    """Groups that a thread takes at a time where so many [N, K] of w [..., N, K] are read."""
    rows = w.shape[-2]
    assert isinstance(rows, int)
    groups = max(1, -(-rows // GROUP_ROWS))
    nbytes = max(1, packed_bytes(Meta.of(w.shape[-2:], w.dtype)) // groups)
    return max(1, min(matrices * groups // (_CHUNKS_PER_THREAD * threads), _CHUNK_BYTES // nbytes))


def activation_format(w: DType) -> str:
    """The quantised activations that the weight's format is multiplied with."""
    return "a8_32" if w.block == 32 else "a8_256"


def _integer_when(node: Tensor, options: Options) -> str | None:
    x, w = node.src[:2]
    assert x is not None and w is not None
    if x.dtype == F32:
        return "linear is float" if options.linear == "float" else None
    return None if x.dtype.name == activation_format(w.dtype) else f"x is {x.dtype}, w {w.dtype}"


def _quantised(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    if x is not None and w is not None and x.dtype == F32:
        x = ops.quantise_act(x, dtype=activation_format(w.dtype))
    return (x, w, *rest)


RULES: dict[str, Any] = {"layout": {"x": ROWS}, "pack": {"w": pack}}
FLOAT: dict[str, Any] = {"dtypes": {"x": "f32", "w": FORMATS}, **RULES}
INTEGER: dict[str, Any] = {
    "dtypes": {"x": ("f32", "a8_32", "a8_256"), "w": BLOCK_FORMATS},
    "when": _integer_when,
    "lower": _quantised,
    **RULES,
}


@BACKEND.kernel("linear", name="linear_float", **FLOAT)
@BACKEND.kernel("linear", name="linear_integer", **INTEGER)
def linear(ctx: KernelContext) -> Launch:
    """Integer, which is asked first, or float."""
    return launch(ctx, ctx.x, ctx.w, ctx.op("bias"), ctx.out)
