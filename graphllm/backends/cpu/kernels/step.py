"""The end of a step. Small and sequential: one thread does it."""

from __future__ import annotations

from .. import BACKEND
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import args, i32s, kernel, load_i64

_FIXED = 13  # words before those of the groups: slot, table and its width each


@kernel
def _advance(p, thread, threads):
    if thread != 0:
        return
    sampled, stop, ids, pos, kv_len, count, done, history = args(p, 8)
    live_at, ring, stops, block, groups = args(p + 64, 5)
    chosen, last = i32s(sampled), i32s(stop)
    for s in range(load_i64(live_at)):
        token, at = chosen[s], i32s(kv_len)[s]
        i32s(ids)[s], i32s(pos)[s] = token, at
        i32s(history)[s * ring + at % ring] = token
        column = at // block
        for g in range(groups):
            entry = p + 8 * (_FIXED + 3 * g)
            slot, table, width = load_i64(entry), load_i64(entry + 8), load_i64(entry + 16)
            first = i32s(table)[s * width + column] if column < width else -1
            i32s(slot)[s] = first * block + at % block if first >= 0 else -1
        i32s(kv_len)[s] = at + 1
        i32s(count)[s] += 1
        for e in range(stops):
            if last[e] >= 0 and last[e] == token:
                i32s(done)[s] |= 1


@BACKEND.kernel("advance")
def advance(ctx: KernelContext) -> Launch:
    names = ("sampled", "stop", "ids", "pos", "kv_len", "count", "done", "history")
    words = [ctx.need(name).address for name in names]
    words += [ctx.live(ctx.kv_len.meta.rows), *ctx.history.meta.inner]
    words += [int(ctx.stop.meta.shape[0]), ctx.attrs["block"], len(ctx.rest) // 2]
    for slot, table in zip(ctx.rest[::2], ctx.rest[1::2]):
        words += [slot.address, table.address, *table.meta.inner]
    return Launch(_advance, words)
