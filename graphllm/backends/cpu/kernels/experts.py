"""Mixtures of experts on the CPU: the choice, products of each token with a few of many matrices,
the sum. And head_linear, whose tokens meet all matrices, each with a row of its own.

For the products, tokens are sorted by the matrix that they meet, so that each is read once, and
unpacked once for many tokens. Rows and results stay where they are: a table tells the loops of
`linear` where. Those do the same for a token whatever its company, so its bits depend on K and the
format alone.
"""

from __future__ import annotations

from functools import cache
from math import prod

from numba import float32, int32

from ....backends.alignment import aligned
from ....graph.dtype import F32
from ....graph.tensor import Meta, Tensor
from ... import ROWS, Options
from ...kernel_context import address
from .. import BACKEND
from ..formats import FORMATS
from ..runtime.device import KernelContext, Launch, OperandRef
from ..runtime.isa import thread_count
from ..runtime.jit import (  # fmt: skip
    Kernel,
    args,
    as_f32,
    bits_f32,
    exact_helper,
    f32_bits,
    f32_of_bits,
    f32s,
    helper,
    i32s,
    i64s,
    kernel,
    load_i64,
    next_chunk,
    set_status,
)
from ..runtime.thread_pool import STATUS_ID
from . import linear
from .elementwise import CHUNK_COLUMNS, thread_range
from .linear import GROUP_ROWS, PASS_TOKENS
from .linear_microkernels import workspace
from .sampling import largest_key, sort_key
from .weight_packing import packed_bytes

# ----------------------------------------------------------------------------------------- routing

_TAKEN_KEY = int32(-(2**31))  # below the keys of all numbers
_NAN_KEY = int32(2**31 - 1)  # above them


@exact_helper
def _write_keys(row, bias, columns, keys):
    """Keys of row + bias, of the row alone where the bias's address is 0."""
    values, more = f32s(row), f32s(bias)
    for i in range(columns):
        value = values[i] + more[i] if bias != 0 else values[i]
        keys[i] = sort_key(bits_f32(value), _NAN_KEY)


@exact_helper
def _key_value(key):
    """The number whose key this is."""
    if key == _NAN_KEY:
        return f32_of_bits(int32(0x7FC00000))
    size = key if key >= int32(0) else int32(0) - key
    return f32_of_bits(size if key >= int32(0) else size | int32(-(2**31)))


@exact_helper
def _group_score(keys, count, best):
    """The key of the sum of the ``best`` largest of ``count`` numbers, the largest first."""
    total, last, at = float32(0), int32(2**31 - 1), -1
    for i in range(best):
        key, place = _TAKEN_KEY, 0
        for j in range(count):  # those after the last one, in the order in which they are taken
            after = keys[j] < last or (keys[j] == last and j > at)
            if after and keys[j] > key:
                key, place = keys[j], j
        value = _key_value(key)
        total = value if i == 0 else total + value
        last, at = key, place
    return sort_key(bits_f32(total), _NAN_KEY)


@helper
def _take_largest(keys, count):
    """The first of the largest keys, which is not to be taken again."""
    top, i = largest_key(keys, count), 0
    while keys[i] != top:
        i += 1
    keys[i] = _TAKEN_KEY
    return i


@helper
def _keep_best_groups(keys, size, groups, kept, best, worth):
    """Leave the ``kept`` best groups of ``size`` keys."""
    for g in range(groups):
        worth[g] = _group_score(i32s(keys + 4 * g * size), size, best)
    for _ in range(kept):
        _take_largest(worth, groups)
    for i in range(groups * size):
        if worth[i // size] != _TAKEN_KEY:
            i32s(keys)[i] = _TAKEN_KEY


@kernel
def _top_k(p, thread, threads):
    x, stride, bias, y, rows_at, columns, k, groups, kept, best, work = args(p, 11)
    keys = work + thread * 4 * (columns + groups)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    for row in range(first, last):
        _write_keys(x + row * stride, bias, columns, i32s(keys))
        if groups > 1:
            _keep_best_groups(keys, columns // groups, groups, kept, best, i32s(keys + 4 * columns))
        for j in range(k):
            i32s(y)[row * k + j] = _take_largest(i32s(keys), columns)


def _keys_nbytes(node: Tensor, options: Options) -> int:
    columns = node.sources[0].shape[1]
    return 4 * thread_count(options) * (columns + node.attrs["groups"])


@BACKEND.kernel("top_k", layout={"x": ROWS}, scratch=_keys_nbytes)
def top_k(ctx: KernelContext) -> Launch:
    x, attrs = ctx.x, ctx.attrs
    words = [x.address, x.row_stride, ctx.address("bias"), ctx.out.address]
    words += [ctx.live(x.meta.rows), x.width, attrs["k"], attrs["groups"], attrs["top_groups"]]
    return Launch(_top_k, [*words, attrs["top_per_group"], ctx.scratch])


@kernel
def _pick(p, thread, threads):
    x, stride, columns, ids, k, y, rows_at = args(p, 7)
    index, target = i32s(ids), f32s(y)
    first, last = thread_range(load_i64(rows_at) * k, thread, threads)
    for i in range(first, last):
        if index[i] < 0 or index[i] >= columns:
            set_status(p, STATUS_ID)
        else:
            target[i] = f32s(x + i // k * stride)[index[i]]


@BACKEND.kernel("pick", layout={"x": ROWS})
def pick(ctx: KernelContext) -> Launch:
    x, ids = ctx.x, ctx.ids
    words = [x.address, x.row_stride, x.width, ids.address, ids.width, ctx.out.address]
    return Launch(_pick, [*words, ctx.live(x.meta.rows)])


@kernel
def _sum_norm(p, thread, threads):
    x, stride, y, rows_at, width, eps = args(p, 6)
    first, last = thread_range(load_i64(rows_at), thread, threads)
    for row in range(first, last):
        source, target = f32s(x + row * stride), f32s(y + row * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i]
        total += as_f32(eps)
        for i in range(width):
            target[i] = source[i] / total


@BACKEND.kernel("sum_norm", layout={"x": ROWS})
def sum_norm(ctx: KernelContext) -> Launch:
    x = ctx.x
    words = [x.address, x.row_stride, ctx.out.address, ctx.live(x.meta.rows), x.width]
    return Launch(_sum_norm, [*words, f32_bits(ctx.attrs["eps"])])


@kernel
def _combine(p, thread, threads):
    x, stride, weights, k, y, rows_at, width = args(p, 7)
    pieces = (width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
    first, last = thread_range(load_i64(rows_at) * pieces, thread, threads)
    for item in range(first, last):
        row, column = item // pieces, item % pieces * CHUNK_COLUMNS
        target, factors = f32s(y + (row * width + column) * 4), f32s(weights + row * k * 4)
        count = min(CHUNK_COLUMNS, width - column)
        for i in range(count):
            target[i] = 0
        for j in range(k):
            source, factor = f32s(x + row * stride + (j * width + column) * 4), factors[j]
            for i in range(count):
                target[i] += source[i] * factor


@BACKEND.kernel("combine", layout={"y": ROWS})
def combine(ctx: KernelContext) -> Launch:
    y = ctx.y
    words = [y.address, y.row_stride, ctx.weights.address, y.meta.inner[0], ctx.out.address]
    return Launch(_combine, [*words, ctx.live(y.meta.rows), y.meta.inner[1]])


# ---------------------------------------------------------------------------------------- products

_STACK = 8 << 10  # bytes to sort in: for a few tokens, so that steps need not wait for each other


@helper
def _sort_by_matrix(p, ids, pairs, experts, names, begin, order):
    """Pairs of a token and one of its experts by expert, in ``order``: those of expert e from
    begin[e] to begin[e + 1]. The count of experts that are named, and in ``names`` which."""
    for e in range(experts + 2):
        begin[e] = 0
    for i in range(pairs):
        e = ids[i]
        if e < 0 or e >= experts:
            set_status(p, STATUS_ID)
        else:
            begin[e + 2] += 1
    count = 0
    for e in range(experts):
        if begin[e + 2] > 0:
            names[count] = e
            count += 1
        begin[e + 2] += begin[e + 1]
    for i in range(pairs):
        e = ids[i]
        if e >= 0 and e < experts:  # begin[e + 1] is where its next pair goes
            order[begin[e + 1]] = i
            begin[e + 1] += 1
    return count


@helper
def _locate_pairs(order, first, count, matrix, each, stride, line, wide, rows, places):
    """Where rows and results lie of ``count`` pairs from ``first`` on; of those of the tokens with
    one matrix, if ``order`` is 0."""
    for i in range(count):
        pair = i32s(order)[first + i] if order != 0 else (first + i) * each + matrix
        i64s(rows)[i] = pair // each * stride + pair % each * line
        i64s(places)[i] = pair * wide


@helper
def _write_results(c, width, count, y, places, bias, first, n):
    """Write ``count`` tokens' results for ``width`` rows, of which those from ``n`` on are not
    wanted, with the bias unless its address is 0."""
    results, offsets, at = f32s(c), f32s(bias), i64s(places)
    rows = min(n - first, width)
    for t in range(count):
        row = f32s(y + at[t] + 4 * first)
        for r in range(rows):
            value = results[t * width + r]
            row[r] = value + offsets[first + r] if bias != 0 else value


@cache
def _kernel(name: str, floating: bool, wide: int, many: int) -> Kernel:
    """The kernel for a format; see `linear.loops`. ``ids``: 0 where token t meets each matrix j
    with its own row j; ``work``: where each thread has ``own`` bytes to sort in, or 0 if its stack
    will do."""
    gemv, gemm, panels = linear.make_loops(name, floating, wide, many)
    has_gemv, width = gemv is not linear.no_gemv, wide * GROUP_ROWS
    results, table = PASS_TOKENS * 4 * width, 8 * PASS_TOKENS
    room = panels + results + 2 * table + _STACK

    @kernel(key=(FORMATS[name].cache_key, floating, wide, many))
    def expert_products(p, thread, threads):
        x, stride, line, w, nbytes, bias, y, live, each, n, k, per = args(p, 12)
        ids, matrices, work, own = args(p + 96, 4)
        tokens, groups, panel = load_i64(live), (n + GROUP_ROWS - 1) // GROUP_ROWS, workspace(room)
        c = panel + panels
        rows, places = c + results, c + results + table
        work = work + thread * own if work != 0 else places + table
        named, begin = i32s(work), i32s(work + 4 * matrices)
        order, count = work + 8 * (matrices + 1) if ids != 0 else 0, matrices
        if ids != 0:
            count = _sort_by_matrix(
                p, i32s(ids), tokens * each, matrices, named, begin, i32s(order)
            )
        chunks = (groups + per - 1) // per
        item = next_chunk(p)
        while tokens > 0 and item < count * chunks:
            matrix, group = item // chunks, item % chunks * per
            last, first, end = min(group + per, groups), 0, tokens
            if ids != 0:
                matrix = named[matrix]
                first, end = begin[matrix], begin[matrix + 1]
            a, offsets = w + matrix * nbytes, bias + matrix * n * 4 if bias != 0 else 0
            step = linear.tokens_per_pass(end - first, many)
            for t in range(first, end, step):
                some = min(step, end - t)
                _locate_pairs(order, t, some, matrix, each, stride, line, 4 * n, rows, places)
                if has_gemv and end - first == 1:
                    for g in range(group, last):
                        linear.zero_results(c, 1)
                        gemv(a, g, x + i64s(rows)[0], k, c)
                        _write_results(c, GROUP_ROWS, 1, y, places, offsets, g * GROUP_ROWS, n)
                else:
                    for g in range(group, last, wide):
                        linear.zero_results(c, wide * some)
                        # Of the last groups some may be multiplied twice, and are not written.
                        gemm(a, g, last, x, rows, k, panel, c, some)
                        at = min(n, last * GROUP_ROWS)
                        _write_results(c, width, some, y, places, offsets, g * GROUP_ROWS, at)
            item = next_chunk(p)

    return expert_products


def _sorting_nbytes(node: Tensor) -> int:
    """Bytes that a thread sorts in, beyond its stack: names, begins, pairs."""
    _, w, ids = node.sources[:3]
    pairs = prod(ids.meta.bound().shape)  # type: ignore[arg-type]
    nbytes = 4 * (2 * int(w.shape[0]) + 2 + pairs)  # type: ignore[arg-type]
    return aligned(nbytes) if nbytes > _STACK else 0


def _scratch(node: Tensor, options: Options) -> int:
    return thread_count(options) * _sorting_nbytes(node)


def _launch(
    ctx: KernelContext, ids: OperandRef | None, each: int, line: int, per: int, own: int
) -> Launch:
    """``each``: results of a token; ``line``: bytes between its rows; ``own``: see `_kernel`."""
    x, w = ctx.x, ctx.w
    matrices, n, k = w.meta.shape
    floating = x.dtype == F32
    wide, many = linear.tile_shape(floating)
    words = [
        x.address, x.row_stride, line, w.address, packed_bytes(Meta.of((n, k), w.dtype)),
        ctx.address("bias") if ids is not None else 0, ctx.out.address,
        ctx.live(x.meta.rows), each, n, k, -(-per // wide) * wide,
        address(ids), matrices, ctx.scratch if own else 0, own,
    ]  # fmt: skip
    return Launch(_kernel(w.dtype.name, floating, wide, many), words)


@BACKEND.kernel("expert_linear", name="experts_float", scratch=_scratch, **linear.FLOAT)
@BACKEND.kernel("expert_linear", name="experts_integer", scratch=_scratch, **linear.INTEGER)
def expert_linear(ctx: KernelContext) -> Launch:
    x, ids = ctx.x.meta, ctx.ids
    each = ids.meta.inner[0]
    line = x.strides[1] if x.ndim == 3 else 0
    per = linear.groups_per_chunk(ctx.w.meta, each, ctx.threads)
    return _launch(ctx, ids, each, line, per, _sorting_nbytes(ctx.node))


@BACKEND.kernel("head_linear", name="heads_float", **linear.FLOAT)
@BACKEND.kernel("head_linear", name="heads_integer", **linear.INTEGER)
def head_linear(ctx: KernelContext) -> Launch:
    heads = ctx.w.meta.shape[0]
    per = linear.groups_per_chunk(ctx.w.meta, heads, ctx.threads)
    return _launch(ctx, None, heads, ctx.x.meta.strides[1], per, 0)
