"""linear: integer kernels for block formats, float kernels for every format.

Threads take chunks of groups, each of 16 interleaved weight rows. The order of every sum depends on
K and the format only, so a token's results have the same bits alone, in a batch, and for any number
of threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from .... import ops
from ....formats import ACTIVATIONS, activation_of
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..formats import FORMATS
from ..formats.row_formats import Float8Rows
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.isa import isa
from ..runtime.jit import Kernel, f32s, helper, i64s, kernel, load_i64, next_chunk
from ..simd.emitter import VECTOR
from .linear_loops import (
    GROUP_RESULTS,
    GROUP_ROWS,
    NEVER,
    PAIR_GROUPS,
    PASS_TOKENS,
    WIDE_GROUPS,
    WIDE_TOKENS,
    WideLoops,
    make_loops,
    make_wide_loops,
    no_gemv,
    zero_results,
)
from .linear_microkernels import workspace
from .weight_packing import pack, packed_bytes

# Largest chunk of weights that a thread takes, and how many chunks there should be per thread.
_CHUNK_BYTES, _CHUNKS_PER_THREAD = 128 << 10, 8
_ROUNDS = 4  # chunks for each thread below which tokens are split, too


def tile_shape(name: str, floating: bool) -> tuple[int, int]:
    """Return (groups, tokens) of a tile for a format: its accumulators and operands fill the
    registers.

    Groups share each activation that is loaded, tokens share each weight.
    """
    floating = floating or isinstance(FORMATS[name], Float8Rows)
    if isa().avx512 and (floating or not FORMATS[name].signed(isa())):
        return 3, 4
    if isa().avx2 and floating:
        return 1, 6
    return 1, 8 if isa().avx512 else 4 if isa().avx2 or not isa().x86 else 2


def results_bytes(tile_groups: int, wide: WideLoops) -> int:
    """Bytes of the results of a pass."""
    narrow = tile_groups * PASS_TOKENS * VECTOR
    return max(narrow, WIDE_GROUPS * GROUP_RESULTS) if wide.nbytes else narrow


@helper
def wide_tokens(tokens, least, unit, tail):
    """How many of ``tokens``, the first ones, the wide loops multiply; see `WideLoops`."""
    if tokens < least:
        return 0
    rest = tokens % unit
    return tokens if rest >= tail else tokens - rest


@helper
def wide_groups(groups, parts, threads):
    """Groups that share a chunk of gathered activations: many, yet so that threads end together
    that take chunks of each of ``parts`` parts of the tokens.

    Gathering a chunk is counted as half of a group's work, and waiting for the last thread as a
    quarter of a chunk.
    """
    best, least = PAIR_GROUPS, NEVER
    for by in range(PAIR_GROUPS, WIDE_GROUPS + 1, PAIR_GROUPS):
        chunks = (groups + by - 1) // by * parts
        time = (4 * ((chunks + threads - 1) // threads) + 1) * (2 * by + 1)
        if time <= least:
            best, least = by, time
    return best


@helper
def tokens_per_pass(tokens, tile_tokens, most):
    """Tokens per pass: equal parts of at most ``most``, in whole tiles; at least one tile."""
    most = most // tile_tokens * tile_tokens
    passes = max(tokens + most - 1, most) // most
    each = max(1, (tokens + passes - 1) // passes)
    return (each + tile_tokens - 1) // tile_tokens * tile_tokens


@helper
def token_parts(tokens, step, chunks, threads):
    """Parts of the tokens that are work items of their own: passes, if ``chunks`` of groups of rows
    are too few for threads to end together."""
    return (tokens + step - 1) // step if chunks < _ROUNDS * threads else 1


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


@helper
def _write_results(a, c, group_bytes, row_bytes, t, count, first, end):
    """Write the results of ``count`` tokens from ``t`` on for weight rows ``first`` to ``end``.

    Results of a group and of a token are ``group_bytes`` and ``row_bytes`` after those before them.
    """
    offsets = f32s(a.bias)
    for i in range(count):
        row = f32s(a.y + (t + i) * a.y_stride)
        before = f32s(a.added + (t + i) * a.added_stride)
        for at in range(first, end, GROUP_ROWS):
            results = f32s(c + i * row_bytes + (at - first) // GROUP_ROWS * group_bytes)
            for r in range(min(GROUP_ROWS, end - at)):
                value = results[r]
                value = value + offsets[at + r] if a.bias != 0 else value
                row[at + r] = before[at + r] + value if a.added != 0 else value


@cache
def _kernel(name: str, floating: bool, tile_groups: int, tile_tokens: int) -> Kernel:
    """The kernel for a format; see `make_loops`."""
    gemv, gemm, panels = make_loops(name, floating, tile_groups, tile_tokens)
    wide = make_wide_loops(name, floating)
    wide_gemm, most, least, unit, tail = wide.gemm, wide.tokens, wide.least, wide.unit, wide.tail
    has_gemv, panels = gemv is not no_gemv, max(panels, wide.nbytes)
    results = results_bytes(tile_groups, wide)
    stack_bytes = panels + results + 8 * WIDE_TOKENS

    @kernel(key=(FORMATS[name].cache_key, floating, tile_groups, tile_tokens))
    def linear(p, thread, threads):
        a = _read_linear(p)
        tokens, n, k, per = load_i64(a.tokens), a.n, a.k, a.chunk_groups
        groups, panel = (n + GROUP_ROWS - 1) // GROUP_ROWS, workspace(stack_bytes)
        c, rows = panel + panels, panel + panels + results
        single, many = has_gemv and tokens == 1, wide_tokens(tokens, least, unit, tail)
        step, by = tokens_per_pass(tokens - many, tile_tokens, PASS_TOKENS), tile_groups
        wide_step = tokens_per_pass(many, unit, most)
        if many > 0:  # the last part has the tokens after them, too
            parts = token_parts(many, wide_step, groups // WIDE_GROUPS, threads)
        else:
            parts = token_parts(max(tokens, 1), step, groups // by, threads)
        wide_by = wide_groups(groups, parts, threads)
        if not single:
            multiple = wide_by if many > 0 else by
            per = (per + multiple - 1) // multiple * multiple
            for t in range(max(step, wide_step)):
                i64s(rows)[t] = t * a.x_stride
        chunks, item = (groups + per - 1) // per * parts, next_chunk(p)
        while tokens > 0 and item < chunks:
            group, part = item // parts * per, item % parts
            last, span = min(group + per, groups), wide_step if many > 0 else step
            first, stop = part * span, tokens if part == parts - 1 else (part + 1) * span
            if single:
                for g in range(group, last):
                    zero_results(c, VECTOR)
                    gemv(a.w, g, a.x, k, c)
                    end = min(n, (g + 1) * GROUP_ROWS)
                    _write_results(a, c, VECTOR, VECTOR, 0, 1, g * GROUP_ROWS, end)
                item = next_chunk(p)
                continue
            for g in range(group, last if first < many else group, wide_by):
                after = min(last, g + wide_by)
                end = min(n, after * GROUP_ROWS)
                for t in range(first, min(stop, many), wide_step):
                    count = min(wide_step, many - t)
                    wide_gemm(a.w, g, after, a.x + t * a.x_stride, rows, k, panel, c, count)
                    _write_results(a, c, GROUP_RESULTS, VECTOR, t, count, g * GROUP_ROWS, end)
            for g in range(group, last if many < stop else group, by):
                end = min(n, min(last, g + by) * GROUP_ROWS)
                for t in range(max(first, many), stop, step):
                    count = min(step, stop - t)
                    zero_results(c, by * count * VECTOR)
                    # A tile may read its last group twice; the copy is not written.
                    gemm(a.w, g, last, a.x + t * a.x_stride, rows, k, panel, c, count)
                    _write_results(a, c, VECTOR, by * VECTOR, t, count, g * GROUP_ROWS, end)
            item = next_chunk(p)

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


def _integer_when(node: Tensor, options: Options) -> str | None:
    x, w = node.src[:2]
    assert x is not None and w is not None
    if not w.dtype.quantised:
        return f"w is {w.dtype}"
    if activation_of(w.dtype) is None:
        return f"{w.dtype} is multiplied as floats"
    if x.dtype == F32:
        return "linear is float" if options.linear == "float" else None
    return None if x.dtype == activation_of(w.dtype) else f"x is {x.dtype}, w {w.dtype}"


def _quantised(node: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    x, w, *rest = node.src
    if x is not None and w is not None and x.dtype == F32:
        kind = activation_of(w.dtype)
        assert kind is not None  # see `_integer_when`
        x = ops.quantise_act(x, dtype=kind.name)
    return (x, w, *rest)


RULES: dict[str, Any] = {"layout": {"x": ROWS}, "pack": {"w": pack}}
FLOAT: dict[str, Any] = {"dtypes": {"x": "f32", "w": FORMATS}, **RULES}
INTEGER: dict[str, Any] = {
    "dtypes": {"x": ("f32", *(kind.name for kind in ACTIVATIONS)), "w": FORMATS},
    "when": _integer_when,
    "lower": _quantised,
    **RULES,
}


@BACKEND.kernel("linear", name="linear_float", **FLOAT)
@BACKEND.kernel("linear", name="linear_integer", **INTEGER)
def linear(ctx: KernelContext) -> Launch:
    """Integer or float; the integer kernel is tried first."""
    return launch(ctx, ctx.x, ctx.w, ctx.op("bias"), ctx.out)
