"""End of a decode step: append the sampled tokens. One thread runs it, as it is short."""

from __future__ import annotations

from typing import NamedTuple

from .. import BACKEND
from ..runtime.argument_block import argument_reader, argument_words
from ..runtime.device import KernelContext, Launch
from ..runtime.jit import exact_helper, i32s, kernel, load_i64


class AdvanceArgs(NamedTuple):
    """Argument block of the op `advance`: addresses of int32 arrays, and sizes."""

    sampled: int
    ids: int
    pos: int
    kv_len: int
    count: int  # type: ignore[assignment]  # a field in place of tuple.count
    history: int
    sequences: int  # address of the live count
    history_length: int  # tokens of history per sequence, a ring
    block: int  # cache slots per block
    groups: int  # `GroupArgs` that follow


class GroupArgs(NamedTuple):
    """One KV cache group of `AdvanceArgs`."""

    slot: int
    table: int
    table_width: int


_read_advance, _read_group = argument_reader(AdvanceArgs), argument_reader(GroupArgs)
_ADVANCE_BYTES, GROUP_BYTES = 8 * len(AdvanceArgs._fields), 8 * len(GroupArgs._fields)


@exact_helper
def store_slot(p, s, at, block):
    """Store the slot of position ``at`` of sequence ``s``; ``p``: address of `GroupArgs`."""
    group = _read_group(p)
    column, width = at // block, group.table_width
    first = i32s(group.table)[s * width + column] if column < width else -1
    i32s(group.slot)[s] = first * block + at % block if first >= 0 else -1


@kernel
def _advance(p, thread, threads):
    if thread != 0:
        return
    a = _read_advance(p)
    sampled = i32s(a.sampled)
    for s in range(load_i64(a.sequences)):
        token, at = sampled[s], i32s(a.kv_len)[s]
        i32s(a.ids)[s], i32s(a.pos)[s] = token, at
        i32s(a.history)[s * a.history_length + at % a.history_length] = token
        for i in range(a.groups):
            store_slot(p + _ADVANCE_BYTES + GROUP_BYTES * i, s, at, a.block)
        i32s(a.kv_len)[s] = at + 1
        i32s(a.count)[s] += 1


@BACKEND.kernel("advance")
def advance(ctx: KernelContext) -> Launch:
    names = ("sampled", "ids", "pos", "kv_len", "count", "history")
    block = AdvanceArgs(
        **{name: ctx.need(name).address for name in names},
        sequences=ctx.live(ctx.kv_len.meta.rows),
        history_length=ctx.history.meta.inner[0],
        block=ctx.attrs["block"],
        groups=len(ctx.rest) // 2,
    )
    return Launch(_advance, argument_words(block) + group_words(ctx))


def group_words(ctx: KernelContext) -> list[int]:
    """Return the words of the `GroupArgs` of the variadic operands."""
    words = list[int]()
    for slot, table in zip(ctx.rest[::2], ctx.rest[1::2]):
        words += GroupArgs(slot.address, table.address, table.meta.inner[0])
    return words
