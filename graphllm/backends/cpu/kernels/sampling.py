"""sample: temperature, top-k, top-p and min-p without sorting the vocabulary.

NaN counts as the largest logit, so the largest key of a row shows whether a token can be chosen.

A bitmap of allowed ids is read where logits are: an excluded id has the key of -inf. Blocks without
an allowed id are not read, so a row of which few ids are allowed takes little time.
"""

from __future__ import annotations

from typing import NamedTuple

from ....graph.tensor import Tensor
from ....ops.sampling import mask_words
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import (
    f32s,
    f64s,
    helper,
    i32s,
    i64s,
    kernel,
    load_i64,
    next_chunk,
    u32s,
)
from ..runtime.lazy_numba import float32, float64, int32, int64
from ..simd.math import exp64
from .argmax import (  # fmt: skip
    BLOCK,
    MAX_KEY,
    MIN_KEY,
    block_maxima_nan_greatest,
    first_index,
    largest_key,
    maxima_nbytes,
    row_arguments,
    sort_key,
    value_of_key,
)
from .elementwise import thread_range
from .noise import MAX_NOISE, NoiseKey, fill_words, gumbel, noise_bound, token_noise
from .sampling_candidates import (
    INF,
    MINUS_INF,
    SORT_LIMIT,
    allows,
    largest_keys,
    likely_keys,
    mass_cut,
    softmax_weights,
)


@helper
def _cut(
    logits, bits, width, maxima, blocks, peak, k, top_p, ids, keys, weights, order, masked, mask
):  # fmt: skip
    """Return (key, id) of the last id, in descending order, that top-k and top-p keep."""
    excluded = 0.0  # weight of ids that are no candidates
    if 0 < k < width:
        count = largest_keys(bits, width, maxima, blocks, k, ids, keys, masked, mask)
        if not top_p < 1:
            last = int64(0)
            for i in range(count):
                if keys[i] <= keys[last]:
                    last = int64(i)
            return keys[last], int64(ids[last])
        softmax_weights(logits, ids, keys, count, peak, weights)
    else:
        count, excluded = likely_keys(
            logits, bits, width, maxima, blocks, peak, top_p, ids, keys, weights, masked, mask
        )
    key, last = mass_cut(keys, weights, count, top_p, excluded, order)
    return key, int64(ids[last])


@helper
def _first_largest(bits, width, maxima, blocks, top, mask):
    """As `first_index`, among the ids that a bitmap allows."""
    for b in range(blocks):
        if maxima[b] == top:
            for i in range(b * BLOCK, min(width, (b + 1) * BLOCK)):
                if allows(mask, i) and sort_key(bits[i], MAX_KEY) == top:
                    return i
    return int64(0)


@helper
def _draw(logits, width, maxima, best, temperature, least, last, min_p, noise, words, masked, mask):
    """Return the kept id with the largest (logit - max) / temperature + noise.

    Most ids cannot win even with the largest possible noise, or with an upper bound of their noise
    that takes no logarithm; both are compared in float32, in the direction that discards too few.
    """
    bits, peak = i32s(logits), float64(f32s(logits)[best])
    top, inverse = float32(peak), float32(min(1.0 / temperature, 1e30))
    chosen, largest = best, token_noise(noise, best)
    for block in range(-(-width // BLOCK)):
        first = block * BLOCK
        gap = (value_of_key(maxima[block]) - top) * inverse
        if maxima[block] < least or gap + MAX_NOISE < float32(largest):
            continue
        count = min(BLOCK, width - first)
        fill_words(noise, first // 4, BLOCK // 4, words)
        row, floor, some = f32s(logits + first * 4), float32(largest), False
        for i in range(count):
            some |= (row[i] - top) * inverse + noise_bound(words[i]) >= floor
        if not some:
            continue
        for i in range(count):
            if (row[i] - top) * inverse + noise_bound(words[i]) < float32(largest):
                continue
            if masked and not allows(mask, first + i):
                continue
            key, token = sort_key(bits[first + i], MAX_KEY), first + i
            if key < least or (key == least and token > last):
                continue
            distance = float64(row[i]) - peak
            if min_p > 0 and exp64(max(distance, -700.0)) < min_p:
                continue
            score = distance / temperature + gumbel(words[i])
            if score > largest or (score == largest and token < chosen):
                chosen, largest = token, score
    return chosen


class SampleArgs(NamedTuple):
    """Argument block of `sample`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    maxima: int  # int32 [rows, blocks]
    blocks: int
    y: int
    scratch: int
    thread_scratch: int  # bytes of it for each thread
    temperature: int  # this and the following: a value per row
    top_k: int
    top_p: int
    min_p: int
    seed: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    sample_index: int
    mask: int  # bitmaps of allowed ids, int32 [rows, words]; 0 for none
    words: int


_read_sample = argument_reader(SampleArgs)


@kernel
def _masked_maxima(p, thread, threads):
    """Find the largest key of the allowed ids of each block; that of -inf if there is none."""
    a = _read_sample(p)
    first, last = thread_range(load_i64(a.rows) * a.blocks, thread, threads)
    out = i32s(a.maxima)
    for item in range(first, last):
        row, block = item // a.blocks, item % a.blocks
        bits = i32s(a.logits + row * a.logits_stride + block * BLOCK * 4)
        mask, count = i32s(a.mask + row * a.words * 4), min(BLOCK, a.width - block * BLOCK)
        low = mask[2 * block]
        high = mask[2 * block + 1] if 2 * block + 1 < a.words else int32(0)
        top = MINUS_INF
        if low & high == int32(-1):
            for i in range(count):
                top = max(top, sort_key(bits[i], MAX_KEY))
        elif low | high != int32(0):
            for i in range(count):
                if allows(mask, block * BLOCK + i):
                    top = max(top, sort_key(bits[i], MAX_KEY))
        out[item] = top


@kernel
def _sample(p, thread, threads):
    a = _read_sample(p)
    width, blocks, y = a.width, a.blocks, i32s(a.y)
    own = a.scratch + thread * a.thread_scratch
    weights, order = f64s(own), i64s(own + width * 8)
    own += (width + SORT_LIMIT) * 8
    words, keys, ids = u32s(own), i32s(own + BLOCK * 4), i32s(own + BLOCK * 4 + width * 4)
    rows = load_i64(a.rows)
    row = next_chunk(p)
    while row < rows:
        at = a.logits + row * a.logits_stride
        logits, bits, maxima = f32s(at), i32s(at), i32s(a.maxima + row * blocks * 4)
        masked, mask = a.mask != 0, i32s(a.mask + row * a.words * 4)
        top = largest_key(maxima, blocks)
        if top >= INF or top == MINUS_INF:  # NaN, +inf, or -inf everywhere
            y[row] = -1
            row = next_chunk(p)
            continue
        if masked:
            best = _first_largest(bits, width, maxima, blocks, top, mask)
        else:
            best = first_index(bits, width, maxima, blocks, top, MAX_KEY)
        temperature = f32s(a.temperature)[row]
        if not temperature > 0:
            y[row] = best
            row = next_chunk(p)
            continue
        k, top_p, peak = int64(i32s(a.top_k)[row]), f32s(a.top_p)[row], float64(logits[best])
        least, last = MIN_KEY, width  # kept: larger keys, and equal ones up to id ``last``
        if 0 < k < width or top_p < 1:
            least, last = _cut(
                logits, bits, width, maxima, blocks, peak, k, float64(top_p), ids, keys, weights,
                order, masked, mask,
            )  # fmt: skip
        noise = NoiseKey(i64s(a.seed)[row], i32s(a.count)[row], i32s(a.sample_index)[row])
        min_p = float64(f32s(a.min_p)[row])
        y[row] = _draw(
            at, width, maxima, best, float64(temperature), least, last, min_p, noise, words,
            masked, mask,
        )  # fmt: skip
        row = next_chunk(p)


def _thread_nbytes(width: int) -> int:
    """Bytes of weights, order, words, keys and ids of one thread."""
    return -(-(width * 16 + SORT_LIMIT * 8 + BLOCK * 4) // 64) * 64


def _scratch(node: Tensor, options: Options) -> int:
    width = int(node.sources[0].shape[1])  # type: ignore[arg-type]
    return maxima_nbytes(node) + thread_count(options) * _thread_nbytes(width)


@BACKEND.kernel("sample", layout={"logits": "rows"}, scratch=_scratch)
def sample(ctx: KernelContext) -> list[Launch]:
    rows = row_arguments(ctx, "logits")
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "count", "sample_index")
    block = SampleArgs(
        *rows,
        scratch=ctx.scratch + maxima_nbytes(ctx.node),
        thread_scratch=_thread_nbytes(rows.width),
        **{name: ctx.need(name).address for name in names},
        mask=ctx.address("mask"),
        words=mask_words(rows.width),
    )
    maxima = (
        Launch(_masked_maxima, block) if block.mask else Launch(block_maxima_nan_greatest, rows)
    )
    return [maxima, Launch(_sample, block)]
