"""bias_logits and penalise: changes of single logits of a row, after copying it.

Threads share out the columns, so that none waits for another. Each finds the ids of its columns in
lists that it reads whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ....graph.tensor import Tensor
from ....ops.sampling import mask_words
from ... import Options
from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.cores import thread_count
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32s, helper, i32s, kernel, load_i64
from ..runtime.lazy_numba import float32, float64, int32, int64
from .elementwise import thread_range


class BiasArgs(NamedTuple):
    """Argument block of `bias_logits`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    y: int
    ids: int  # int32 [rows, id_count], as bias, float32
    bias: int
    id_count: int
    allowed: int  # int32 [rows, allowed_count]
    allowed_count: int
    stop: int  # int32 [rows, stop_count]
    stop_count: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    min_tokens: int
    mask: int  # bitmaps int32 [rows, words]; 0 for none
    words: int


_read_bias = argument_reader(BiasArgs)


@helper
def _limited(allowed, count, width):
    """Whether a list of allowed ids contains any."""
    some = False
    for i in range(count):
        some |= 0 <= allowed[i] < width
    return some


@helper
def _copy_allowed(source, target, first, last, allowed, count, width):
    """Copy columns first..last - 1; subtract infinity from those that a list does not allow."""
    if not _limited(allowed, count, width):
        for i in range(first, last):
            target[i] = source[i]
        return
    for i in range(first, last):
        target[i] = source[i] - float32(np.inf)  # NaN stays, +inf becomes NaN
    for i in range(count):
        if first <= allowed[i] < last:
            target[allowed[i]] = source[allowed[i]]


@helper
def _apply_mask(target, first, last, mask):
    """Subtract infinity from those of the columns first..last - 1 whose bit is 0."""
    for word in range(first >> 5, (last + 31) >> 5):
        bits = mask[word]
        if bits != int32(-1):
            for i in range(max(first, word << 5), min(last, (word + 1) << 5)):
                if not (bits >> int32(i & 31)) & int32(1):
                    target[i] -= float32(np.inf)


@kernel
def _bias_logits(p, thread, threads):
    a = _read_bias(p)
    width = a.width
    first, last = thread_range(width, thread, threads)
    for row in range(load_i64(a.rows)):
        source, target = f32s(a.logits + row * a.logits_stride), f32s(a.y + row * width * 4)
        allowed = i32s(a.allowed + row * a.allowed_count * 4)
        _copy_allowed(source, target, first, last, allowed, a.allowed_count, width)
        ids, bias = i32s(a.ids + row * a.id_count * 4), f32s(a.bias + row * a.id_count * 4)
        for i in range(a.id_count):
            if first <= ids[i] < last:
                target[ids[i]] += bias[i]
        if i32s(a.count)[row] < i32s(a.min_tokens)[row]:
            stop = i32s(a.stop + row * a.stop_count * 4)
            for i in range(a.stop_count):
                if first <= stop[i] < last:
                    target[stop[i]] -= float32(np.inf)
        if a.mask != 0:
            _apply_mask(target, first, last, i32s(a.mask + row * a.words * 4))


@BACKEND.kernel("bias_logits", layout={"logits": "rows"})
def bias_logits(ctx: KernelContext) -> Launch:
    logits = ctx.need("logits")
    names = ("ids", "bias", "allowed", "stop", "count", "min_tokens")
    block = BiasArgs(
        logits=logits.address,
        logits_stride=logits.row_stride,
        rows=ctx.live(logits.meta.rows),
        width=logits.meta.inner[0],
        y=ctx.out.address,
        id_count=ctx.ids.meta.inner[0],
        allowed_count=ctx.allowed.meta.inner[0],
        stop_count=ctx.stop.meta.inner[0],
        mask=ctx.address("mask"),
        words=mask_words(logits.meta.inner[0]),
        **{name: ctx.need(name).address for name in names},
    )
    return Launch(_bias_logits, block)


class PenaliseArgs(NamedTuple):
    """Argument block of `penalise`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    y: int
    scratch: int  # for each thread two int32 lists of a history's length
    history: int  # int32 [rows, history_length]
    history_length: int
    length: int
    breakers: int  # int32 [rows, breaker_count]
    breaker_count: int
    factors: int
    windows: int


_read_penalise = argument_reader(PenaliseArgs)


@helper
def _recent(history, width, length, window, past):
    """Write the last ``window`` tokens of a ring, the latest first; returns how many there are."""
    count = min(length, width)
    if window >= 0:
        count = min(count, window)
    for i in range(count):
        past[i] = history[(length - 1 - i) % width]
    return count


@helper
def _occurrences(ids, first, count):
    """How often ``ids[first]`` occurs from there on; 0 if it occurs before."""
    token, times = ids[first], 0
    for i in range(first):
        if ids[i] == token:
            return 0
    for i in range(first, count):
        times += 1 if ids[i] == token else 0
    return times


@helper
def _find_repetitions(past, count, breakers, breaker_count, least, repeated):
    """Write how many of the last tokens follow up to token k, for k in 1..count - 1.

    Tokens are counted from the latest. Returns whether any number can be ``least`` or more.
    """
    limit = count
    for i in range(count):
        for b in range(breaker_count):
            if limit == count and breakers[b] >= 0 and past[i] == breakers[b]:
                limit = i
    if limit < least:
        return False
    for k in range(1, count):
        n = 0
        while n < limit and n + k < count and past[n] == past[n + k]:
            n += 1
        repeated[k] = n
    return True


@helper
def _apply_dry(target, first, last, past, count, repeated, multiplier, base, least):
    """Penalise the tokens of columns first..last - 1 that continue a repetition."""
    for k in range(1, count):
        token = past[k - 1]
        if repeated[k] < least or not first <= token < last:
            continue
        most, earlier = int64(0), False
        for j in range(1, count):
            if past[j - 1] == token and repeated[j] >= least:
                earlier |= j < k
                most = max(most, int64(repeated[j]))
        if not earlier:
            power = min(float64(base) ** float64(most - least), 2.0**127)
            target[token] -= float32(max(min(float64(multiplier) * power, 3.4e38), -3.4e38))


@kernel
def _penalise(p, thread, threads):
    a = _read_penalise(p)
    width, history_length = a.width, a.history_length
    first, last = thread_range(width, thread, threads)
    own = a.scratch + thread * history_length * 8
    past, repeated = i32s(own), i32s(own + history_length * 4)
    for row in range(load_i64(a.rows)):
        source, target = f32s(a.logits + row * a.logits_stride), f32s(a.y + row * width * 4)
        for i in range(first, last):
            target[i] = source[i]
        history, length = i32s(a.history + row * history_length * 4), int64(i32s(a.length)[row])
        factors, windows = f32s(a.factors + row * 20), i32s(a.windows + row * 12)
        repeat, presence, frequency = factors[0], factors[1], factors[2]
        count = _recent(history, history_length, length, int64(windows[0]), past)
        for i in range(count):
            if first <= past[i] < last:
                times = _occurrences(past, i, count)
                if times > 0:
                    value = target[past[i]]
                    value = value / repeat if value > float32(0) else value * repeat
                    target[past[i]] = value - (presence + float32(times) * frequency)
        multiplier, base, least = factors[3], factors[4], int64(windows[1])
        if multiplier != float32(0) and base >= float32(1):
            breakers = i32s(a.breakers + row * a.breaker_count * 4)
            count = _recent(history, history_length, length, int64(windows[2]), past)
            if _find_repetitions(past, count, breakers, a.breaker_count, least, repeated):
                _apply_dry(target, first, last, past, count, repeated, multiplier, base, least)


def _scratch(node: Tensor, options: Options) -> int:
    return thread_count(options) * int(node.sources[1].shape[1]) * 8  # type: ignore[arg-type]


@BACKEND.kernel("penalise", layout={"logits": "rows"}, scratch=_scratch)
def penalise(ctx: KernelContext) -> Launch:
    logits = ctx.need("logits")
    names = ("history", "length", "breakers", "factors", "windows")
    block = PenaliseArgs(
        logits=logits.address,
        logits_stride=logits.row_stride,
        rows=ctx.live(logits.meta.rows),
        width=logits.meta.inner[0],
        y=ctx.out.address,
        scratch=ctx.scratch,
        history_length=ctx.history.meta.inner[0],
        breaker_count=ctx.breakers.meta.inner[0],
        **{name: ctx.need(name).address for name in names},
    )
    return Launch(_penalise, block)
