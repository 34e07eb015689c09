"""filter_logits: a list of candidates of each row, which one filter after another shortens.

Filters compare sort keys (see argmax.py); the k largest logits are found as for `sample`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....graph.tensor import Tensor
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (
    bits_f32,
    f32s,
    f64s,
    helper,
    i32s,
    i64s,
    kernel,
    load_i64,
    next_chunk,
)
from ..runtime.lazy_numba import float32, float64, int64
from .argmax import (
    MAX_KEY,
    block_maxima_nan_greatest,
    largest_key,
    maxima_nbytes,
    row_arguments,
    sort_key,
    value_of_key,
)
from .noise import NoiseKey, xtc_number
from .sampling_candidates import (
    INF,
    MINUS_INF,
    SORT_LIMIT,
    largest_keys,
    mass_cut,
    softmax_weights,
)

_COLUMNS = 6  # of the settings


class FilterArgs(NamedTuple):
    """Argument block of `filter_logits`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int  # float32 [rows, width]
    scratch: int
    thread_scratch: int  # bytes of it for each thread
    settings: int  # float32 [rows, _COLUMNS]
    top_k: int  # this and the following: a value per row
    seed: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    sample_index: int


_read_filter = argument_reader(FilterArgs)


@helper
def _sigma(logits, width):
    """Standard deviation of the logits that are not -inf, float64."""
    count, total = 0, 0.0
    for i in range(width):
        if logits[i] > float32(-np.inf):
            count += 1
            total += float64(logits[i])
    mean, squares = total / count, 0.0
    for i in range(width):
        if logits[i] > float32(-np.inf):
            squares += (float64(logits[i]) - mean) ** 2
    return np.sqrt(squares / count)


@helper
def _keep_reaching(logits, ids, keys, count, floor):
    """Keep candidates with logits of at least ``floor``; returns their count."""
    kept = 0
    for i in range(count):
        if float64(logits[ids[i]]) >= floor:
            ids[kept], keys[kept] = ids[i], keys[i]
            kept += 1
    return kept


@helper
def _keep_mass(scores, ids, keys, weights, count, share, order):
    """Keep the candidates with the largest scores whose weights reach a share of all."""
    cut, last = mass_cut(scores, weights, count, share, 0.0, order)
    kept = 0
    for i in range(count):
        if scores[i] > cut or (scores[i] == cut and i <= last):
            ids[kept], keys[kept], weights[kept] = ids[i], keys[i], weights[i]
            kept += 1
    return kept


@helper
def _score_typical(logits, ids, weights, count, peak, scores):
    """Write larger scores for candidates closer to the mean information content."""
    total, mean = 0.0, 0.0
    for i in range(count):
        if weights[i] > 0:
            total += weights[i]
            mean += weights[i] * (float64(logits[ids[i]]) - peak)
    mean /= total
    for i in range(count):
        distance = float32(abs(float64(logits[ids[i]]) - peak - mean))
        scores[i] = -bits_f32(distance)


@helper
def _keep_min_p(ids, keys, weights, count, min_p):
    """Keep candidates with weights of at least ``min_p``; returns their count."""
    kept = 0
    for i in range(count):
        if weights[i] >= min_p:
            ids[kept], keys[kept], weights[kept] = ids[i], keys[i], weights[i]
            kept += 1
    return kept


@helper
def _exclude_top(ids, keys, weights, count, threshold):
    """Exclude all but the last of the candidates that reach a threshold; returns the count left."""
    total = 0.0
    for i in range(count):
        total += weights[i]
    least, last = MAX_KEY, int64(-1)
    for i in range(count):
        if weights[i] >= threshold * total and MINUS_INF < keys[i] <= least:
            least, last = keys[i], int64(i)
    kept = 0
    for i in range(count):
        if not weights[i] >= threshold * total or i == last:
            ids[kept] = ids[i]
            kept += 1
    return kept


@helper
def _candidates(bits, width, maxima, blocks, k, ids, keys):
    """Write indices and keys of the k largest logits, or of all; returns their count."""
    if 0 < k < width:
        return largest_keys(bits, width, maxima, blocks, k, ids, keys, False, bits)
    for i in range(width):
        ids[i], keys[i] = i, sort_key(bits[i], MAX_KEY)
    return width


@helper
def _are_off(settings, k, width):
    """Whether no filter excludes an id, by the columns of `FILTERS` and top-k."""
    s = settings
    shares = s[0] <= float32(0) and s[1] >= float32(1) and s[2] >= float32(1)
    xtc = s[4] > float32(0) and s[5] <= float32(0.5)
    return shares and s[3] <= float32(0) and not xtc and not 0 < k < width


@kernel
def _filter_logits(p, thread, threads):
    a = _read_filter(p)
    width, blocks = a.width, a.blocks
    own = a.scratch + thread * a.thread_scratch
    weights, order = f64s(own), i64s(own + width * 8)
    own += (width + SORT_LIMIT) * 8
    ids, keys, scores = i32s(own), i32s(own + width * 4), i32s(own + width * 8)
    row, rows = next_chunk(p), load_i64(a.rows)
    while row < rows:
        at = a.logits + row * a.logits_stride
        logits, y, maxima = f32s(at), f32s(a.y + row * width * 4), i32s(a.maxima + row * blocks * 4)
        key = largest_key(maxima, blocks)
        s = f32s(a.settings + row * _COLUMNS * 4)
        k = int64(i32s(a.top_k)[row])
        faulty = key >= INF or key == MINUS_INF  # `sample` reports it
        if faulty or _are_off(s, k, width):
            for i in range(width):
                y[i] = logits[i]
            row = next_chunk(p)
            continue
        count = _candidates(i32s(at), width, maxima, blocks, k, ids, keys)
        peak = float64(value_of_key(key))
        if s[0] > float32(0):
            floor = peak - float64(s[0]) * _sigma(logits, width)
            count = _keep_reaching(logits, ids, keys, count, floor)
        softmax_weights(logits, ids, keys, count, peak, weights)
        if s[1] < float32(1):
            _score_typical(logits, ids, weights, count, peak, scores)
            count = _keep_mass(scores, ids, keys, weights, count, float64(s[1]), order)
            peak = float64(value_of_key(largest_key(keys, count)))
            softmax_weights(logits, ids, keys, count, peak, weights)
        if s[2] < float32(1):
            count = _keep_mass(keys, ids, keys, weights, count, float64(s[2]), order)
        if s[3] > float32(0):
            count = _keep_min_p(ids, keys, weights, count, float64(s[3]))
        noise = NoiseKey(i64s(a.seed)[row], i32s(a.count)[row], i32s(a.sample_index)[row])
        if s[5] <= float32(0.5) and xtc_number(noise) < float64(s[4]):
            count = _exclude_top(ids, keys, weights, count, float64(s[5]))
        for i in range(width):
            y[i] = float32(-np.inf)
        for i in range(count):
            y[ids[i]] = logits[ids[i]]
        row = next_chunk(p)


def _thread_nbytes(width: int) -> int:
    """Bytes of weights, order, ids, keys and scores of one thread."""
    return -(-(width * 20 + SORT_LIMIT * 8) // 64) * 64


def _scratch(node: Tensor, options: Options) -> int:
    width = int(node.sources[0].shape[1])  # type: ignore[arg-type]
    return maxima_nbytes(node) + thread_count(options) * _thread_nbytes(width)


@BACKEND.kernel("filter_logits", layout={"logits": "rows"}, scratch=_scratch)
def filter_logits(ctx: KernelContext) -> list[Launch]:
    rows = row_arguments(ctx, "logits")
    names = ("settings", "top_k", "seed", "count", "sample_index")
    block = FilterArgs(
        *rows,
        scratch=ctx.scratch + maxima_nbytes(ctx.node),
        thread_scratch=_thread_nbytes(rows.width),
        **{name: ctx.need(name).address for name in names},
    )
    return [Launch(block_maxima_nan_greatest, rows), Launch(_filter_logits, block)]
