"""Where the threads of a program must meet, and which steps one thread runs alone.

A step that is over in about a microsecond costs more to share out than to run, above all on a busy
machine, where waiting for a thread that has lost its core takes twenty. Such steps are run by one
thread, one after the other; the team meets only where a step touches what another thread may not
have finished with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....graph.tensor import Var
from ....ops import Cost, get
from ... import Bound, Operand
from .step_interpreter import BARRIER, ONE_THREAD

# What one thread does in about two microseconds: bytes within its caches, and operations.
_BYTES, _FLOPS = 64 << 10, 128 << 10

# What a team does in less than 0.2 s where 8 GB and 20 GFLOP a second are to be had.
_SHORT_BYTES, _SHORT_FLOPS = 3 << 29, 4 << 30

Span = tuple[int, int]  # addresses: first, one after the last


@dataclass(frozen=True)
class _Touched:
    reads: list[Span]
    writes: list[Span]
    alone: bool

    def conflicts(self, later: _Touched) -> bool:
        """Whether ``later`` must wait until every thread has finished this step."""
        if self.alone and later.alone:
            return False  # one thread, in order
        return (
            _overlap(self.writes, later.reads)
            or _overlap(self.writes, later.writes)
            or _overlap(self.reads, later.writes)
        )


def barrier_flags(steps: Sequence[Bound]) -> list[int]:
    """Flags (ONE_THREAD, BARRIER) of each step's last entry; the program ends with BARRIER."""
    flags: list[int] = []
    pending: list[_Touched] = []  # steps since the last meeting
    for step in steps:
        now = _touched(step)
        if any(before.conflicts(now) for before in pending):
            flags[-1] |= BARRIER
            pending = []
        pending.append(now)
        flags.append(ONE_THREAD if now.alone else 0)
    if flags:
        flags[-1] |= BARRIER
    return flags


def _touched(step: Bound) -> _Touched:
    written = get(step.node.op).written(step.node)
    reads = [_span(o) for o in step.inputs if o is not None]
    writes = [_span(o) for i, o in enumerate(step.inputs) if o is not None and i in written]
    if get(step.node.op).alias(step.node) is None:
        writes.append(_span(step.out))
    if step.scratch is not None:
        writes.append(_span(step.scratch))
    return _Touched(reads, writes, _small(step))


def _small(step: Bound) -> bool:
    """Whether the step is small at the upper bounds of its Vars."""
    price = _price(step)
    return price.bytes <= _BYTES and price.flops <= _FLOPS


def is_short(steps: Sequence[Bound]) -> bool:
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
    return get(step.node.op).node_cost(step.node, env)


def _span(operand: Operand) -> Span:
    """The addresses between which the operand's elements lie, at its widest."""
    meta = operand.meta.bound()
    start = int(operand.buffer.ctypes.data) + meta.offset
    counts = [d for d in meta.shape if isinstance(d, int)]  # all, at their bounds
    if 0 in counts:
        return start, start
    if counts:
        counts[-1] //= meta.dtype.block
    last = sum((n - 1) * stride for n, stride in zip(counts, meta.strides))
    return start, start + last + meta.dtype.nbytes


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> bool:
    return any(x < v and u < y for x, y in a for u, v in b)
