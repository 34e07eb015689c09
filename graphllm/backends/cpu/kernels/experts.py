"""expert_linear and head_linear: products of each token with a few of many matrices.

expert_linear sorts tokens by the matrix that they are multiplied with, so that each matrix is read
once, and unpacked once for many tokens. Rows and results stay in place: tables hold their offsets
for the loops of `linear`. Those treat a token alike whatever else is in its batch, so its bits
depend on K and the format only. In head_linear every token is multiplied with all matrices, with a
row of its own for each.

With `Options.low_mem`, experts stay in the mapped file. Each thread packs a few groups of their
rows to a window of its scratch memory and multiplies them there, by the same loops: results have
the same bits.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from ....backends.alignment import aligned
from ....formats import ROW_FORMATS
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import Options
from ...kernel_context import address
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.jit import Kernel, f32s, helper, i32s, i64s, kernel, load_i64, next_chunk, set_status
from ..runtime.thread_pool import STATUS_ID
from ..simd.emitter import VECTOR
from . import linear
from .linear_loops import (
    GROUP_RESULTS,
    GROUP_ROWS,
    PASS_TOKENS,
    WIDE_GROUPS,
    WIDE_TOKENS,
    make_loops,
    make_wide_loops,
    no_gemv,
    zero_results,
)
from .linear_microkernels import workspace
from .weight_packing import group_packer, keep_mapped, packed_bytes

# Bytes of stack for sorting. They suffice for a few tokens, whose steps then use no scratch memory
# and need no barrier because of it.
_SORT_STACK_BYTES = 8 << 10


@helper
def _sort_by_matrix(p, ids, pairs, matrices, names, begin, order):
    """Sort pairs of a token and one of its matrices by matrix.

    Writes the numbers of pairs to ``order``, those of matrix e from ``begin[e]`` to
    ``begin[e + 1]``, and the matrices that occur to ``names``. Returns how many occur.
    """
    for e in range(matrices + 2):
        begin[e] = 0
    for i in range(pairs):
        e = ids[i]
        if e < 0 or e >= matrices:
            set_status(p, STATUS_ID)
        else:
            begin[e + 2] += 1
    count = 0
    for e in range(matrices):
        if begin[e + 2] > 0:
            names[count] = e
            count += 1
        begin[e + 2] += begin[e + 1]
    for i in range(pairs):
        e = ids[i]
        if e >= 0 and e < matrices:  # begin[e + 1] is where its next pair goes
            order[begin[e + 1]] = i
            begin[e + 1] += 1
    return count


class ExpertArgs(NamedTuple):
    """Argument block of expert_linear and head_linear: ``matrices`` packed matrices [n, k]."""

    x: int
    x_stride: int  # bytes from token to token
    line: int  # bytes between a token's rows for its matrices, 0: one row for all
    w: int
    matrix_bytes: int
    row_bytes: int  # stored; of matrices in a mapped file
    group_bytes: int  # of 16 packed rows
    bias: int  # 0: none
    y: int
    tokens: int  # address of the live count
    per_token: int  # results of a token
    n: int
    k: int
    chunk_groups: int  # groups that a thread takes at a time
    ids: int  # matrices of each token, 0: all of them
    matrices: int
    scratch: int
    thread_scratch: int  # bytes of it for each thread: for sorting, then for packed groups
    sort_bytes: int  # of scratch, for sorting; 0: the stack suffices


_read_experts = argument_reader(ExpertArgs)


@helper
def _write_offsets(a, order, first, count, matrix, rows, places):
    """Write the byte offsets of rows and results of ``count`` pairs from ``first`` on.

    Without an ``order`` (0) these are the pairs of consecutive tokens with one matrix.
    """
    for i in range(count):
        pair = i32s(order)[first + i] if order != 0 else (first + i) * a.per_token + matrix
        i64s(rows)[i] = pair // a.per_token * a.x_stride + pair % a.per_token * a.line
        i64s(places)[i] = pair * 4 * a.n


@helper
def _write_results(a, c, group_bytes, row_bytes, count, places, matrix, group, last):
    """Write the results of ``count`` pairs for groups ``group`` to ``last`` of a matrix.

    Results of a group and of a pair are ``group_bytes`` and ``row_bytes`` after those before them.
    Adds the bias, if there is one.
    """
    offsets = f32s(a.bias + matrix * a.n * 4)
    first, end = group * GROUP_ROWS, min(a.n, last * GROUP_ROWS)
    for t in range(count):
        row = f32s(a.y + i64s(places)[t])
        for at in range(first, end, GROUP_ROWS):
            results = f32s(c + t * row_bytes + (at - first) // GROUP_ROWS * group_bytes)
            for r in range(min(GROUP_ROWS, end - at)):
                row[at + r] = results[r] + offsets[at + r] if a.bias != 0 else results[r]


def _window_packer(name: str, mapped: bool) -> Any:
    """A helper that returns where packed groups ``group`` to ``last`` of a matrix are, as the
    address of its group 0. Those in a ``mapped`` file are packed to ``window`` first."""
    block, pack_group = FORMATS[name].block, group_packer(name)

    @helper
    def in_place(a, w, group, last, window):
        return w

    @helper
    def packed(a, w, group, last, window):
        for g in range(group, last):
            row, to = g * GROUP_ROWS, window + (g - group) * a.group_bytes
            rows = min(GROUP_ROWS, a.n - row)
            pack_group(w + row * a.row_bytes, a.row_bytes, rows, a.k // block, to)
        return window - group * a.group_bytes

    return packed if mapped else in_place


@cache
def _kernel(name: str, floating: bool, tile_groups: int, tile_tokens: int, mapped: bool) -> Kernel:
    """The kernel for a format; see `linear_loops.make_loops`. ``mapped``: see `Options.low_mem`."""
    gemv, gemm, panels = make_loops(name, floating, tile_groups, tile_tokens)
    wide = make_wide_loops(name, floating)
    wide_gemm, most, least, unit, tail = wide.gemm, wide.tokens, wide.least, wide.unit, wide.tail
    has_gemv, panels = gemv is not no_gemv, max(panels, wide.nbytes)
    results, table = linear.results_bytes(tile_groups, wide), 8 * WIDE_TOKENS
    stack_bytes = panels + results + 2 * table + _SORT_STACK_BYTES
    packed_groups = _window_packer(name, mapped)

    @kernel(key=(FORMATS[name].cache_key, floating, tile_groups, tile_tokens, mapped))
    def expert_products(p, thread, threads):
        a = _read_experts(p)
        ids, matrices, n, k, per = a.ids, a.matrices, a.n, a.k, a.chunk_groups
        tokens, groups = load_i64(a.tokens), (n + GROUP_ROWS - 1) // GROUP_ROWS
        pairs = tokens * a.per_token
        panel = workspace(stack_bytes)
        c, rows, places = panel + panels, panel + panels + results, panel + panels + results + table
        own = a.scratch + thread * a.thread_scratch
        work, window = own if a.sort_bytes != 0 else places + table, own + a.sort_bytes
        names, begin = i32s(work), i32s(work + 4 * matrices)
        order, count = work + 8 * (matrices + 1) if ids != 0 else 0, matrices
        wide_by = linear.wide_groups(groups * matrices, 1, threads)
        if pairs >= least * matrices:
            per = (per + wide_by - 1) // wide_by * wide_by
        if ids != 0:
            count = _sort_by_matrix(p, i32s(ids), pairs, matrices, names, begin, i32s(order))
        chunks, item = (groups + per - 1) // per, next_chunk(p)
        while tokens > 0 and item < count * chunks:
            matrix, group = item // chunks, item % chunks * per
            last, first, end = min(group + per, groups), 0, tokens
            if ids != 0:
                matrix = names[matrix]
                first, end = begin[matrix], begin[matrix + 1]
            w = packed_groups(a, a.w + matrix * a.matrix_bytes, group, last, window)
            many = first + linear.wide_tokens(end - first, least, unit, tail)
            step = linear.tokens_per_pass(many - first, unit, most)
            for t in range(first, many, step):
                some = min(step, many - t)
                _write_offsets(a, order, t, some, matrix, rows, places)
                for g in range(group, last, wide_by):
                    stop = min(last, g + wide_by)
                    wide_gemm(w, g, stop, a.x, rows, k, panel, c, some)
                    _write_results(a, c, GROUP_RESULTS, VECTOR, some, places, matrix, g, stop)
            step = linear.tokens_per_pass(end - many, tile_tokens, PASS_TOKENS)
            for t in range(many, end, step):
                some = min(step, end - t)
                _write_offsets(a, order, t, some, matrix, rows, places)
                single = has_gemv and end - first == 1
                by = 1 if single else tile_groups
                for g in range(group, last, by):
                    stop = min(last, g + by)
                    zero_results(c, by * some * VECTOR)
                    if single:
                        gemv(w, g, a.x + i64s(rows)[0], k, c)
                    else:  # a tile may read its last group twice; the copy is not written
                        gemm(w, g, last, a.x, rows, k, panel, c, some)
                    _write_results(a, c, VECTOR, by * VECTOR, some, places, matrix, g, stop)
            item = next_chunk(p)

    return expert_products


def _sorting_nbytes(node: Tensor) -> int:
    """Bytes of scratch that a thread needs for sorting: names, begins, pairs; 0: none."""
    _, w, ids = node.sources[:3]
    pairs = prod(ids.meta.bound().shape)  # type: ignore[arg-type]
    nbytes = 4 * (2 * int(w.shape[0]) + 2 + pairs)  # type: ignore[arg-type]
    return aligned(nbytes) if nbytes > _SORT_STACK_BYTES else 0


def _window_nbytes(w: Meta) -> int:
    """Bytes of the groups that a thread packs at a time, from a weight in a mapped file."""
    return aligned(WIDE_GROUPS * FORMATS[w.dtype.name].group_nbytes(w.shape[-1]))


def _scratch(node: Tensor, options: Options) -> int:
    return thread_count(options) * _sorting_nbytes(node)


def _mapped_scratch(node: Tensor, options: Options) -> int:
    w = node.sources[1].meta
    return thread_count(options) * (_sorting_nbytes(node) + _window_nbytes(w))


def _launch(
    ctx: KernelContext, ids: OperandRef | None, per_token: int, line: int,
    sort_bytes: int = 0, mapped: bool = False,
) -> Launch:  # fmt: skip
    """Launch the products; for the arguments see `ExpertArgs` and `_kernel`."""
    x, w = ctx.x, ctx.w
    matrices, n, k = w.meta.shape
    floating, form = x.dtype == F32, FORMATS[w.dtype.name]
    tile_groups, tile_tokens = linear.tile_shape(w.dtype.name, floating)
    chunk_groups = 1 if mapped else linear.groups_per_chunk(w.meta, per_token, ctx.threads)
    row_bytes = w.dtype.row_nbytes(k)
    block = ExpertArgs(
        x=x.address,
        x_stride=x.row_stride,
        line=line,
        w=w.address,
        matrix_bytes=n * row_bytes if mapped else packed_bytes(Meta.of((n, k), w.dtype)),
        row_bytes=row_bytes,
        group_bytes=form.group_nbytes(k),
        bias=ctx.address("bias") if ids is not None else 0,
        y=ctx.out.address,
        tokens=ctx.live(x.meta.rows),
        per_token=per_token,
        n=n,
        k=k,
        chunk_groups=-(-chunk_groups // tile_groups) * tile_groups,
        ids=address(ids),
        matrices=matrices,
        scratch=ctx.scratch,
        thread_scratch=sort_bytes + (_window_nbytes(w.meta) if mapped else 0),
        sort_bytes=sort_bytes,
    )
    return Launch(_kernel(w.dtype.name, floating, tile_groups, tile_tokens, mapped), block)


def _low_mem_when(node: Tensor, options: Options) -> str | None:
    return None if options.low_mem else "low_mem is off"


def _low_mem_integer_when(node: Tensor, options: Options) -> str | None:
    return _low_mem_when(node, options) or linear.INTEGER["when"](node, options)


_MAPPED: dict[str, Any] = {"scratch": _mapped_scratch, "pack": {"w": keep_mapped}}
_MAPPED_FLOAT = linear.FLOAT | _MAPPED | {"when": _low_mem_when}
_MAPPED_INTEGER = linear.INTEGER | _MAPPED | {"when": _low_mem_integer_when}


@BACKEND.kernel("expert_linear", name="experts_mapped_float", **_MAPPED_FLOAT)
@BACKEND.kernel("expert_linear", name="experts_mapped_integer", **_MAPPED_INTEGER)
def expert_linear_mapped(ctx: KernelContext) -> Launch:
    return _launch_experts(ctx, mapped=True)


@BACKEND.kernel("expert_linear", name="experts_float", scratch=_scratch, **linear.FLOAT)
@BACKEND.kernel("expert_linear", name="experts_integer", scratch=_scratch, **linear.INTEGER)
def expert_linear(ctx: KernelContext) -> Launch:
    return _launch_experts(ctx, mapped=False)


def _launch_experts(ctx: KernelContext, mapped: bool) -> Launch:
    x, ids = ctx.x.meta, ctx.ids
    line = x.strides[1] if x.ndim == 3 else 0
    return _launch(ctx, ids, ids.meta.inner[0], line, _sorting_nbytes(ctx.node), mapped)


def _heads_integer_when(node: Tensor, options: Options) -> str | None:
    x, w = node.sources[:2]
    if x.dtype == F32 and w.dtype.name in ROW_FORMATS:  # see the op
        return f"heads of {w.dtype} are multiplied as floats"
    return linear.INTEGER["when"](node, options)


@BACKEND.kernel("head_linear", name="heads_float", **linear.FLOAT)
@BACKEND.kernel(
    "head_linear", name="heads_integer", **linear.INTEGER | {"when": _heads_integer_when}
)
def head_linear(ctx: KernelContext) -> Launch:
    return _launch(ctx, None, ctx.w.meta.shape[0], ctx.x.meta.strides[1])
