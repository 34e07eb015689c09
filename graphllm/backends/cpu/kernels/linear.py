"""linear: integer kernels for block formats, float kernels for every format.

Threads take chunks of groups, each of 16 interleaved weight rows. The order of every sum depends on
K and the format only, so a token's results have the same bits alone, in a batch, and for any number
of threads.
"""

from __future__ import annotations

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
from .linear_loops import GROUP_ROWS, PASS_TOKENS, make_loops, no_gemv
from .linear_microkernels import workspace
from .weight_packing import pack, packed_bytes

# Largest chunk of weights that a thread takes, and how many chunks there should be per thread.
_CHUNK_BYTES, _CHUNKS_PER_THREAD = 128 << 10, 8


def tile_shape(name: str, floating: bool) -> tuple[int, int]:
    """Return (groups, tokens) of a tile for a format: its accumulators and operands fill the
    registers.

    Groups share each activation that is loaded, tokens share each weight.
    """
    if isa().avx512 and (floating or not FORMATS[name].signed(isa())):
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
    shape = tile_shape(w.dtype.name, floating)
    return Launch(_kernel(w.dtype.name, floating, *shape), block, overlaps_previous)


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
