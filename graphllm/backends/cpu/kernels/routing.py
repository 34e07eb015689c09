"""Routing of mixtures of experts: top_k, pick, sum_norm and combine (`graphllm.ops.experts`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....graph.tensor import Tensor
from ... import ROWS, Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (  # fmt: skip
    bits_f32,
    exact_helper,
    f32_of_bits,
    f32s,
    helper,
    i32s,
    kernel,
    load_i64,
    set_status,
)
from ..runtime.lazy_numba import float32, int32
from ..runtime.thread_pool import STATUS_ID
from .argmax import largest_key, sort_key
from .elementwise import CHUNK_COLUMNS, thread_range

_TAKEN_KEY = np.int32(-(2**31))  # below the keys of all numbers
_NAN_KEY = np.int32(2**31 - 1)  # above the keys of all numbers


@exact_helper
def _write_keys(row, bias, columns, keys):
    """Write the sort keys of row + bias, or of the row alone if the address ``bias`` is 0."""
    values, offsets = f32s(row), f32s(bias)
    for i in range(columns):
        value = values[i] + offsets[i] if bias != 0 else values[i]
        keys[i] = sort_key(bits_f32(value), _NAN_KEY)


@exact_helper
def _key_value(key):
    """The float32 with this sort key."""
    if key == _NAN_KEY:
        return f32_of_bits(int32(0x7FC00000))
    size = key if key >= int32(0) else int32(0) - key
    return f32_of_bits(size if key >= int32(0) else size | int32(-(2**31)))


@exact_helper
def _group_score(keys, count, best):
    """Key of the sum of the ``best`` largest of ``count`` numbers, summed in descending order."""
    total, last, at = float32(0), int32(2**31 - 1), -1
    for i in range(best):
        key, place = _TAKEN_KEY, 0
        for j in range(count):  # the largest of those that follow the last one in sorted order
            after = keys[j] < last or (keys[j] == last and j > at)
            if after and keys[j] > key:
                key, place = keys[j], j
        value = _key_value(key)
        total = value if i == 0 else total + value
        last, at = key, place
    return sort_key(bits_f32(total), _NAN_KEY)


@helper
def _take_largest(keys, count):
    """Return the index of the first largest key, and mark it as taken."""
    top, i = largest_key(keys, count), 0
    while keys[i] != top:
        i += 1
    keys[i] = _TAKEN_KEY
    return i


@helper
def _keep_best_groups(keys, size, groups, kept, best, scores):
    """Mark all keys as taken but those of the ``kept`` best groups of ``size`` keys."""
    for g in range(groups):
        scores[g] = _group_score(i32s(keys + 4 * g * size), size, best)
    for _ in range(kept):
        _take_largest(scores, groups)
    for i in range(groups * size):
        if scores[i // size] != _TAKEN_KEY:
            i32s(keys)[i] = _TAKEN_KEY


class TopKArgs(NamedTuple):
    """Argument block of `top_k`."""

    x: int
    x_stride: int
    bias: int  # 0: none
    y: int
    rows: int  # address of the live count
    columns: int
    k: int
    groups: int
    top_groups: int
    top_per_group: int  # numbers whose sum is the score of a group
    scratch: int  # keys of columns and groups for each thread


_read_top_k = argument_reader(TopKArgs)


@kernel
def _top_k(p, thread, threads):
    a = _read_top_k(p)
    columns, groups = a.columns, a.groups
    keys = a.scratch + thread * 4 * (columns + groups)
    scores = i32s(keys + 4 * columns)
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        _write_keys(a.x + row * a.x_stride, a.bias, columns, i32s(keys))
        if groups > 1:
            _keep_best_groups(
                keys, columns // groups, groups, a.top_groups, a.top_per_group, scores
            )
        for j in range(a.k):
            i32s(a.y)[row * a.k + j] = _take_largest(i32s(keys), columns)


def _keys_nbytes(node: Tensor, options: Options) -> int:
    columns = node.sources[0].shape[1]
    return 4 * thread_count(options) * (columns + node.attrs["groups"])


@BACKEND.kernel("top_k", layout={"x": ROWS}, scratch=_keys_nbytes)
def top_k(ctx: KernelContext) -> Launch:
    x, attrs = ctx.x, ctx.attrs
    block = TopKArgs(
        x=x.address,
        x_stride=x.row_stride,
        bias=ctx.address("bias"),
        y=ctx.out.address,
        rows=ctx.live(x.meta.rows),
        columns=x.width,
        k=attrs["k"],
        groups=attrs["groups"],
        top_groups=attrs["top_groups"],
        top_per_group=attrs["top_per_group"],
        scratch=ctx.scratch,
    )
    return Launch(_top_k, block)


class PickArgs(NamedTuple):
    """Argument block of `pick`."""

    x: int
    x_stride: int
    columns: int
    ids: int
    k: int
    y: int
    rows: int  # address of the live count


_read_pick = argument_reader(PickArgs)


@kernel
def _pick(p, thread, threads):
    a = _read_pick(p)
    index, target = i32s(a.ids), f32s(a.y)
    first, last = thread_range(load_i64(a.rows) * a.k, thread, threads)
    for i in range(first, last):
        if index[i] < 0 or index[i] >= a.columns:
            set_status(p, STATUS_ID)
        else:
            target[i] = f32s(a.x + i // a.k * a.x_stride)[index[i]]


@BACKEND.kernel("pick", layout={"x": ROWS})
def pick(ctx: KernelContext) -> Launch:
    x, ids, rows = ctx.x, ctx.ids, ctx.live(ctx.x.meta.rows)
    block = PickArgs(
        x.address, x.row_stride, x.width, ids.address, ids.width, ctx.out.address, rows
    )
    return Launch(_pick, block)


class SumNormArgs(NamedTuple):
    """Argument block of `sum_norm`."""

    x: int
    x_stride: int
    y: int
    rows: int  # address of the live count
    width: int
    eps: float


_read_sum_norm = argument_reader(SumNormArgs)


@kernel
def _sum_norm(p, thread, threads):
    a = _read_sum_norm(p)
    width = a.width
    first, last = thread_range(load_i64(a.rows), thread, threads)
    for row in range(first, last):
        source, target = f32s(a.x + row * a.x_stride), f32s(a.y + row * width * 4)
        total = float32(0)
        for i in range(width):
            total += source[i]
        total += a.eps
        for i in range(width):
            target[i] = source[i] / total


@BACKEND.kernel("sum_norm", layout={"x": ROWS})
def sum_norm(ctx: KernelContext) -> Launch:
    x, rows = ctx.x, ctx.live(ctx.x.meta.rows)
    block = SumNormArgs(x.address, x.row_stride, ctx.out.address, rows, x.width, ctx.attrs["eps"])
    return Launch(_sum_norm, block)


class CombineArgs(NamedTuple):
    """Argument block of `combine`: x [rows, k, width], weights [rows, k]."""

    x: int
    x_stride: int
    weights: int
    k: int
    y: int
    rows: int  # address of the live count
    width: int


_read_combine = argument_reader(CombineArgs)


@kernel
def _combine(p, thread, threads):
    a = _read_combine(p)
    width, k = a.width, a.k
    chunks = (width + CHUNK_COLUMNS - 1) // CHUNK_COLUMNS
    first, last = thread_range(load_i64(a.rows) * chunks, thread, threads)
    for item in range(first, last):
        row, column = item // chunks, item % chunks * CHUNK_COLUMNS
        target, factors = f32s(a.y + (row * width + column) * 4), f32s(a.weights + row * k * 4)
        count = min(CHUNK_COLUMNS, width - column)
        for i in range(count):
            target[i] = 0
        for j in range(k):
            source, factor = f32s(a.x + row * a.x_stride + (j * width + column) * 4), factors[j]
            for i in range(count):
                target[i] += source[i] * factor


@BACKEND.kernel("combine", layout={"y": ROWS})
def combine(ctx: KernelContext) -> Launch:
    y, (k, width) = ctx.y, ctx.y.meta.inner
    rows = ctx.live(y.meta.rows)
    block = CombineArgs(
        y.address, y.row_stride, ctx.weights.address, k, ctx.out.address, rows, width
    )
    return Launch(_combine, block)
