"""Where the threads of a program must meet, and which steps one thread runs alone.

A step that is over in about a microsecond costs more to share out than to run, above all on a busy
machine, where waiting for a thread that has lost its core takes twenty. Such steps are run by one
thread, one after the other; the team meets only where a step touches what another thread may not
have finished with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops import Cost, get
from ...tensor import Var
from .. import Bound, Operand
from ..touched import Touched, overlap, touched
from .walk import ALONE, MEET

# What one thread does in about two microseconds: bytes within its caches, and operations.
_BYTES, _FLOPS = 64 << 10, 128 << 10

# What a team does in less than 0.2 s where 8 GB and 20 GFLOP a second are to be had.
_SHORT_BYTES, _SHORT_FLOPS = 3 << 29, 4 << 30


@dataclass(frozen=True)
class _Step:
    touched: Touched
    alone: bool

    def conflicts(self, later: _Step) -> bool:
        """Whether ``later`` must wait until every thread has finished this step."""
        if self.alone and later.alone:
            return False  # one thread, in order
        before, after = self.touched, later.touched
        return overlap(before.writes, after.reads + after.writes) or overlap(
            before.reads, after.writes
        )


def meetings(steps: Sequence[Bound]) -> list[int]:
    """The flags of each step's last entry: ALONE, MEET. The team always meets after the last."""
    flags: list[int] = []
    pending: list[_Step] = []  # steps since the last meeting
    for step in steps:
        now = _Step(touched(step, _address), _small(step))
        if any(before.conflicts(now) for before in pending):
            flags[-1] |= MEET
            pending = []
        pending.append(now)
        flags.append(ALONE if now.alone else 0)
    if flags:
        flags[-1] |= MEET
    return flags


def _address(operand: Operand) -> int:
    return int(operand.buffer.ctypes.data) + operand.meta.offset


def _small(step: Bound) -> bool:
    """Whether the step is small at the upper bounds of its Vars."""
    price = _price(step)
    return price.bytes <= _BYTES and price.flops <= _FLOPS


def short(steps: Sequence[Bound]) -> bool:
    """Whether the steps together are over too soon for anybody to wish to interrupt them."""
    prices = [_price(step) for step in steps]
    return (
        sum(p.bytes for p in prices) <= _SHORT_BYTES
        and sum(p.flops for p in prices) <= _SHORT_FLOPS
    )


def _price(step: Bound) -> Cost:
    """What the step costs at the upper bounds of its Vars."""
    metas = [s.meta for s in (step.node, *step.node.sources)]
    env = {m.rows.name: m.rows.hi for m in metas if isinstance(m.rows, Var)}
    return get(step.node.op).price(step.node, env)
