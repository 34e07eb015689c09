"""linear: integer kernels for block formats, float kernels for every format.

Threads take chunks of groups, each of 16 interleaved weight rows. The order of every sum depends on
K and the format only, so a token's results have the same bits alone, in a batch, and for any number
of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from .... import ops
from ....graph.dtype import F32, DType
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..formats import BLOCK_FORMATS, FORMATS
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.isa import isa
from ..runtime.jit import Kernel, f32s, helper, i64s, kernel, load_i64, next_chunk
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

GROUP_ROWS = 16  # weight rows that are interleaved in packed weights
PASS_TOKENS = 128  # tokens whose results fit the L1 cache; whole tiles
_AHEAD_GROUPS = 4  # groups whose chunks of columns are prefetched while one is multiplied
# Largest chunk of weights that a thread takes, and how many chunks there should be per thread.
_CHUNK_BYTES, _CHUNKS_PER_THREAD = 128 << 10, 8


def tile_shape(floating: bool) -> tuple[int, int]:
    """Return (groups, tokens) of a tile: its accumulators and operands fill the registers.

    Groups share each activation that is loaded, tokens share each weight.
    """
    if isa().vnni or (floating and isa().avx512):
        return 3, 4
    return 1, 8 if isa().avx512 else 4 if isa().avx2 or not isa().x86 else 2


@helper
def tokens_per_pass(tokens, tile_tokens):
    """Tokens per pass: equal parts of at most `PASS_TOKENS`, in whole tiles."""
    passes = max(tokens + PASS_TOKENS - 1, PASS_TOKENS) // PASS_TOKENS
    each = (tokens + passes - 1) // passes
    return (each + tile_tokens - 1) // tile_tokens * tile_tokens


@helper
def zero_results(c, count):
    """Zero ``count`` groups of accumulators at ``c``."""
    results = f32s(c)
    for i in range(count * GROUP_ROWS):
        results[i] = 0


@helper
def _write_results(c, width, count, y, stride, bias, added, added_stride, first, n):
    """Write the results of ``count`` tokens for weight rows ``first`` to ``first + width``.

    Rows from ``n`` on are left out. Adds the bias, and to each token its row of ``added``, unless
    the address is 0.
    """
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
    """Stands for the missing GEMV of formats whose GEMM also serves a single token."""


def _token_tiles(groups: int, tokens: int, make_tile: Callable[[int], Any]) -> Any:
    """Make a helper that goes over ``count`` tokens in tiles of ``tokens``, then of half as many.

    ``make_tile(tokens)`` makes ``tile(left, panel, size, x, rows, at, k, c, ahead, step, lines)``
    for ``size`` blocks from column ``at`` on, of ``k``; for the other arguments see
    `linear_microkernels`. All tiles together prefetch ``nbytes`` of each group from ``ahead`` on,
    spread evenly, as the loop of a tile has ``loops`` iterations: memory is read while the
    processor multiplies.
    """
    half, token_bytes = tokens // 2, groups * 4 * GROUP_ROWS
    large, small = make_tile(tokens), make_tile(half)

    @helper
    def run(panel, size, x, rows, at, k, c, count, ahead, step, nbytes, loops):
        iterations = (count + tokens - 1) // tokens * loops
        lines, t = (nbytes // VECTOR + iterations - 1) // iterations, 0
        while t + half < count:  # a large tile that is not full costs less than two small ones
            large(
                count - t, panel, size, x, rows + 8 * t, at, k, c + t * token_bytes, ahead, step,
                lines,
            )  # fmt: skip
            ahead, nbytes = ahead + lines * loops * VECTOR, nbytes - lines * loops * VECTOR
            lines = lines if nbytes > 0 else 0
            t += tokens
        if t < count:
            small(
                count - t, panel, size, x, rows + 8 * t, at, k, c + t * token_bytes, ahead, step,
                lines,
            )  # fmt: skip

    return run


def _following_chunk(groups: int) -> Any:
    """Make a helper that returns where the chunk of columns begins that is prefetched meanwhile.

    Its arguments are the first column, the columns of a chunk and of a row, and the first group of
    the present chunk; it counts in columns of the whole matrix.
    """
    chunks = max(1, _AHEAD_GROUPS // groups)

    @helper
    def following(at, chunk, columns, g):
        for _ in range(chunks):
            at += chunk
            if at >= columns:
                at, g = 0, g + groups
        return g * columns + at

    return following


def _integer(name: str, groups: int, tokens: int) -> tuple[Any, Any, int]:
    """`make_loops` for quantised activations."""
    form = FORMATS[name]
    code, block, nbytes, per_chunk = form.code, form.block, form.nbytes, CHUNK // form.block
    in_place = form.in_place(isa())
    per_sum, sum_bytes = (32, 4) if block == 32 else (16, 2)  # activations per sum, bytes of it
    loops = CHUNK // (32 if block == 32 else form.sub)  # iterations of a tile's loop

    def make_tile(count: int) -> Any:
        @helper
        def run(left, panel, size, x, rows, at, k, c, ahead, step, lines):
            d = x + k + at // block * 4
            s = x + k + k // block * 4 + at // per_sum * sum_bytes
            tile(code, groups, count, left, panel, size, x + at, d, s, rows, c, ahead, step, lines)

        return run

    tiles, following = _token_tiles(groups, tokens, make_tile), _following_chunk(groups)

    @helper
    def gemv(w, g, x, k, c):
        blocks = k // block
        fused(code, w + g * blocks * nbytes, blocks, x, x + k, x + k + 4 * blocks, c)

    @helper
    def gemm(w, g, last, x, rows, k, panel, c, count):
        for b in range(0, k // block, per_chunk):
            size = min(per_chunk, k // block - b)
            for i in range(groups):
                source = w + (min(g + i, last - 1) * (k // block) + b) * nbytes
                if in_place:
                    i64s(panel)[i] = source
                else:
                    unpack(code, source, panel + i * PANEL, size)
            ahead = w + following(b, per_chunk, k // block, g) * nbytes
            tiles(
                panel, size, x, rows, b * block, k, c, count,
                ahead, k // block * nbytes, per_chunk * nbytes, loops,
            )  # fmt: skip

    return gemv, gemm, groups * PANEL


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

    tiles, following = _token_tiles(groups, tokens, make_tile), _following_chunk(groups)

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
        ``gemm(w, g, last, x, rows, k, panel, c, count)`` for several, and the bytes of its panels.
    """
    return (_float if floating else _integer)(name, groups, tokens)


class LinearArgs(NamedTuple):
    """Argument block of `linear`: y = added + x w^T + bias, w [n, k] packed."""

    x: int
    x_stride: int
    w: int
    bias: int  # 0: none
    y: int
    y_stride: int
    added: int  # 0: none
    added_stride: int
    tokens: int  # address of the live count
    n: int
    k: int
    chunk_groups: int  # groups that a thread takes at a time


_read_linear = argument_reader(LinearArgs)


@cache
def _kernel(name: str, floating: bool, tile_groups: int, tile_tokens: int) -> Kernel:
    """The kernel for a format; see `make_loops`."""
    gemv, gemm, panels = make_loops(name, floating, tile_groups, tile_tokens)
    has_gemv, width = gemv is not no_gemv, tile_groups * GROUP_ROWS
    results = PASS_TOKENS * 4 * width
    stack_bytes = panels + results + 8 * PASS_TOKENS

    @kernel(key=(FORMATS[name].cache_key, floating, tile_groups, tile_tokens))
    def linear(p, thread, threads):
        a = _read_linear(p)
        tokens, n, k, per = load_i64(a.tokens), a.n, a.k, a.chunk_groups
        groups, panel = (n + GROUP_ROWS - 1) // GROUP_ROWS, workspace(stack_bytes)
        c, step = panel + panels, tokens_per_pass(tokens, tile_tokens)
        single, rows = has_gemv and tokens == 1, c + results
        if not single:
            per = (per + tile_groups - 1) // tile_groups * tile_groups
            for t in range(step):
                i64s(rows)[t] = t * a.x_stride
        group = next_chunk(p) * per
        while tokens > 0 and group < groups:
            last = min(group + per, groups)
            if single:
                for g in range(group, last):
                    zero_results(c, 1)
                    gemv(a.w, g, a.x, k, c)
                    _write_results(
                        c, GROUP_ROWS, 1, a.y, a.y_stride, a.bias, a.added, a.added_stride,
                        g * GROUP_ROWS, n,
                    )  # fmt: skip
            else:
                for g in range(group, last, tile_groups):
                    for t in range(0, tokens, step):
                        count = min(step, tokens - t)
                        row, to = a.x + t * a.x_stride, a.y + t * a.y_stride
                        before = a.added + t * a.added_stride if a.added != 0 else 0
                        zero_results(c, tile_groups * count)
                        # A tile may read its last group twice; the copy is not written.
                        gemm(a.w, g, last, row, rows, k, panel, c, count)
                        _write_results(
                            c, width, count, to, a.y_stride, a.bias, before, a.added_stride,
                            g * GROUP_ROWS, min(n, last * GROUP_ROWS),
                        )  # fmt: skip
            group = next_chunk(p) * per

    return linear


# ------------------------------------------------------------------------------------ registration


def launch(
    ctx: KernelContext, x: OperandRef, w: OperandRef, bias: OperandRef | None, out: OperandRef,
    added: OperandRef | None = None, overlaps_previous: bool = False,
) -> Launch:  # fmt: skip
    """Launch out = added + x w^T + bias: one linear, or one of several of a fused step."""
    n, k = w.meta.shape
    assert isinstance(n, int) and isinstance(k, int)
    block = LinearArgs(
        x=x.address,
        x_stride=x.row_stride,
        w=w.address,
        bias=address(bias),
        y=out.address,
        y_stride=out.row_stride,
        added=address(added),
        added_stride=added.row_stride if added else 0,
        tokens=ctx.live(x.meta.rows),
        n=n,
        k=k,
        chunk_groups=groups_per_chunk(w.meta, 1, ctx.threads),
    )
    floating = x.dtype == F32
    return Launch(_kernel(w.dtype.name, floating, *tile_shape(floating)), block, overlaps_previous)


def groups_per_chunk(w: Meta, matrices: int, threads: int) -> int:
    """Groups that a thread takes at a time, if ``matrices`` [N, K] of w [..., N, K] are read."""
    rows = w.shape[-2]
    assert isinstance(rows, int)
    groups = max(1, -(-rows // GROUP_ROWS))
    nbytes = max(1, packed_bytes(Meta.of(w.shape[-2:], w.dtype)) // groups)
    return max(1, min(matrices * groups // (_CHUNKS_PER_THREAD * threads), _CHUNK_BYTES // nbytes))


def activation_format(w: DType) -> str:
    """Format of the quantised activations that a weight format is multiplied with."""
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
    """Integer or float; the integer kernel is tried first."""
    return launch(ctx, ctx.x, ctx.w, ctx.op("bias"), ctx.out)
