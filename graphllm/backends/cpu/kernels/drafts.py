"""Draft tokens of one sequence; see `graphllm.ops.drafts`. One thread runs the kernels."""

from __future__ import annotations

from typing import NamedTuple

from ....ops.drafts import LONGEST, SHORTEST
from .. import BACKEND
from ..runtime.argument_block import argument_reader, argument_words
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import exact_helper, i32s, kernel, load_i64
from .step import GROUP_BYTES, group_words, store_slot


class AcceptArgs(NamedTuple):
    """Argument block of the op `accept_drafts`: addresses of int32 arrays, and sizes."""

    sampled: int
    drafts: int
    tokens: int
    progress: int
    rows: int  # address of the live count
    draft_count: int
    capacity: int  # of tokens


class PlaceArgs(NamedTuple):
    """Argument block of the op `place_drafts`: addresses of int32 arrays, and sizes."""

    progress: int
    drafts: int
    tokens: int
    ids: int
    pos: int
    kv_len: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    rows: int  # address of the live count
    draft_count: int
    block: int  # cache slots per block
    groups: int  # `GroupArgs` that follow


_read_accept, _read_place = argument_reader(AcceptArgs), argument_reader(PlaceArgs)
_PLACE_BYTES = 8 * len(PlaceArgs._fields)


@exact_helper
def _look_up(tokens, end):
    """Return the place behind the earlier occurrence of the last tokens; 0 if there is none."""
    source, longest = 0, SHORTEST - 1
    for at in range(SHORTEST, end):
        same, most = 0, min(at, LONGEST)
        while same < most and tokens[at - 1 - same] == tokens[end - 1 - same]:
            same += 1
        if same > longest or (same == longest and source):
            source, longest = at, same
    return source


@kernel
def _accept_drafts(p, thread, threads):
    if thread != 0:
        return
    a = _read_accept(p)
    sampled, drafts, tokens = i32s(a.sampled), i32s(a.drafts), i32s(a.tokens)
    rows, end = min(load_i64(a.rows), a.draft_count + 1), int(i32s(a.progress)[0])
    for r in range(rows):
        if end < a.capacity:
            tokens[end] = sampled[r]
            end += 1
        if r == a.draft_count or drafts[r] < 0 or drafts[r] != sampled[r]:
            break
    source = _look_up(tokens, end)
    for i in range(a.draft_count):
        drafts[i] = tokens[source + i % (end - source)] if source else -1
    i32s(a.progress)[0] = end


@kernel
def _place_drafts(p, thread, threads):
    if thread != 0:
        return
    a = _read_place(p)
    length, prompt = int(i32s(a.progress)[0]), int(i32s(a.progress)[1])
    last, drafts = i32s(a.tokens)[length - 1], i32s(a.drafts)
    for r in range(load_i64(a.rows)):
        drafted = 0 < r <= a.draft_count and drafts[r - 1] >= 0
        at = length - 1 + r
        i32s(a.ids)[r] = drafts[r - 1] if drafted else last
        i32s(a.pos)[r], i32s(a.kv_len)[r], i32s(a.count)[r] = at, at + 1, at + 1 - prompt
        for i in range(a.groups):
            store_slot(p + _PLACE_BYTES + GROUP_BYTES * i, r, at, a.block)


@BACKEND.kernel("accept_drafts")
def accept_drafts(ctx: KernelContext) -> Launch:
    names = ("sampled", "drafts", "tokens", "progress")
    block = AcceptArgs(
        **{name: ctx.need(name).address for name in names},
        rows=ctx.live(ctx.sampled.meta.rows),
        draft_count=ctx.drafts.meta.bound().size,
        capacity=ctx.tokens.meta.bound().size,
    )
    return Launch(_accept_drafts, argument_words(block))


@BACKEND.kernel("place_drafts")
def place_drafts(ctx: KernelContext) -> Launch:
    names = ("progress", "drafts", "tokens", "ids", "pos", "kv_len", "count")
    block = PlaceArgs(
        **{name: ctx.need(name).address for name in names},
        rows=ctx.live(ctx.kv_len.meta.rows),
        draft_count=ctx.drafts.meta.bound().size,
        block=ctx.attrs["block"],
        groups=len(ctx.rest) // 2,
    )
    return Launch(_place_drafts, argument_words(block) + group_words(ctx))
