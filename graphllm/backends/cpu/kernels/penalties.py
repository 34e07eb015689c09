"""penalise: repetition, presence and frequency penalties, and stop tokens that come too early."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32

from .. import BACKEND
from ..runtime.argument_block import argument_reader
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import f32s, helper, i32s, kernel, load_i64
from .elementwise import thread_range


class PenaliseArgs(NamedTuple):
    """Argument block of `penalise`."""

    logits: int
    logits_stride: int
    rows: int  # address of the live count
    width: int
    y: int
    history: int  # int32 [rows, history_length]
    history_length: int
    stop: int  # int32 [stop_count]
    stop_count: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    repeat: int
    presence: int
    frequency: int
    min_tokens: int


_read_penalise = argument_reader(PenaliseArgs)


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


@kernel
def _penalise(p, thread, threads):
    a = _read_penalise(p)
    width, stop = a.width, i32s(a.stop)
    # Threads share out the columns, so that none waits for another.
    first, last = thread_range(width, thread, threads)
    for row in range(load_i64(a.rows)):
        source, target = f32s(a.logits + row * a.logits_stride), f32s(a.y + row * width * 4)
        for i in range(first, last):
            target[i] = source[i]
        past, repeat = i32s(a.history + row * a.history_length * 4), f32s(a.repeat)[row]
        for i in range(a.history_length):
            if first <= past[i] < last:
                times = _occurrences(past, i, a.history_length)
                if times > 0:
                    value = target[past[i]]
                    value = value / repeat if value > float32(0) else value * repeat
                    less = f32s(a.presence)[row] + float32(times) * f32s(a.frequency)[row]
                    target[past[i]] = value - less
        if i32s(a.count)[row] < i32s(a.min_tokens)[row]:
            for i in range(a.stop_count):
                if first <= stop[i] < last:
                    target[stop[i]] -= float32(np.inf)  # NaN stays, +inf becomes NaN


@BACKEND.kernel("penalise", layout={"logits": "rows"})
def penalise(ctx: KernelContext) -> Launch:
    logits = ctx.need("logits")
    names = ("history", "stop", "count", "repeat", "presence", "frequency", "min_tokens")
    block = PenaliseArgs(
        logits=logits.address,
        logits_stride=logits.row_stride,
        rows=ctx.live(logits.meta.rows),
        width=logits.meta.inner[0],
        y=ctx.out.address,
        history_length=ctx.history.meta.inner[0],
        stop_count=ctx.stop.meta.shape[0],
        **{name: ctx.need(name).address for name in names},
    )
    return Launch(_penalise, block)
