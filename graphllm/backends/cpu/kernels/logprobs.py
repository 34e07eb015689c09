"""top_ids and logprobs: the most likely ids of a row, and log-probabilities of ids."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32s, helper, i32s, i64s, kernel, load_i64, next_chunk
from ..runtime.lazy_numba import float32, float64, int64
from ..simd.math import exp32, log64
from .argmax import (
    block_maxima_nan_greatest,
    largest_key,
    maxima_nbytes,
    row_arguments,
    value_of_key,
)
from .sampling_candidates import INF, MINUS_INF, largest_keys, sort_descending

_SUM = 4096  # logits whose weights are added in float32


class TopIdsArgs(NamedTuple):
    """Argument block of `top_ids`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int  # int32 [rows, n]
    scratch: int  # for each thread n int64, and two int32 lists of the width
    n: int


_read_top_ids = argument_reader(TopIdsArgs)


@kernel
def _top_ids(p, thread, threads):
    a = _read_top_ids(p)
    own = a.scratch + thread * (a.n + a.width) * 8
    order, keys = i64s(own), i32s(own + a.n * 8)
    ids = i32s(own + a.n * 8 + a.width * 4)
    row, rows = next_chunk(p), load_i64(a.rows)
    while row < rows:
        bits, y = i32s(a.logits + row * a.logits_stride), i32s(a.y + row * a.n * 4)
        maxima = i32s(a.maxima + row * a.blocks * 4)
        count = largest_keys(bits, a.width, maxima, a.blocks, a.n, ids, keys, False, bits)
        sort_descending(order, keys, count)
        for i in range(count):
            y[i] = ids[order[i] & 0xFFFFFFFF]
        row = next_chunk(p)


def _scratch(node: Tensor, options: Options) -> int:
    width = int(node.sources[0].shape[1])  # type: ignore[arg-type]
    return maxima_nbytes(node) + thread_count(options) * (int(node.attrs["n"]) + width) * 8


@BACKEND.kernel("top_ids", layout={"logits": "rows"}, scratch=_scratch)
def top_ids(ctx: KernelContext) -> list[Launch]:
    rows = row_arguments(ctx, "logits")
    block = TopIdsArgs(*rows, scratch=ctx.scratch + maxima_nbytes(ctx.node), n=ctx.attrs["n"])
    return [Launch(block_maxima_nan_greatest, rows), Launch(_top_ids, block)]


class LogprobsArgs(NamedTuple):
    """Argument block of `logprobs`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int  # float32 [rows, listed]
    ids: int  # int32 [rows, listed]
    listed: int
    biased: int  # the logits that the ids have; `logits` without biases
    biased_stride: int


_read_logprobs = argument_reader(LogprobsArgs)


@helper
def _log_sum(logits, width, top):
    """log of the sum of exp(logit - top)."""
    total, start = 0.0, 0
    while start < width:
        part = float32(0)
        for i in range(start, min(width, start + _SUM)):
            part += exp32(logits[i] - top)
        total += float64(part)
        start += _SUM
    return log64(total)


@kernel
def _logprobs(p, thread, threads):
    a = _read_logprobs(p)
    row, rows = next_chunk(p), load_i64(a.rows)
    while row < rows:
        logits, ids = f32s(a.logits + row * a.logits_stride), i32s(a.ids + row * a.listed * 4)
        y, biased = f32s(a.y + row * a.listed * 4), f32s(a.biased + row * a.biased_stride)
        key = largest_key(i32s(a.maxima + row * a.blocks * 4), a.blocks)
        valid, top, log_sum = MINUS_INF < key < INF, float32(0), 0.0
        if valid:
            top = value_of_key(key)
            log_sum = _log_sum(logits, a.width, top)
        for i in range(a.listed):
            token = int64(ids[i])
            y[i] = float32(np.nan)
            if valid and 0 <= token < a.width:
                y[i] = float32(float64(biased[token]) - float64(top) - log_sum)
        row = next_chunk(p)


@BACKEND.kernel(
    "logprobs", layout={"logits": "rows", "biased": "rows"},
    scratch=lambda node, options: maxima_nbytes(node),
)  # fmt: skip
def logprobs(ctx: KernelContext) -> list[Launch]:
    rows = row_arguments(ctx, "logits")
    biased = ctx.biased or ctx.logits
    block = LogprobsArgs(
        *rows, ids=ctx.need("ids").address, listed=ctx.ids.meta.inner[0],
        biased=biased.address, biased_stride=biased.row_stride,
    )  # fmt: skip
    return [Launch(block_maxima_nan_greatest, rows), Launch(_logprobs, block)]
