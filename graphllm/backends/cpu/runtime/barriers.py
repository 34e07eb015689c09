"""Barriers between the steps of a program, and the steps that a single thread runs.

Sharing out a step of about a microsecond costs more than running it, above all on a busy machine,
where waiting for a preempted thread takes 20 microseconds. One thread runs such steps, one after
the other. All threads wait at a barrier only where a step touches memory that another thread may
still be using.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ....graph.tensor import Meta, Var
from ....ops import Cost, OpDef, get
from ... import Bound, Operand
from .step_interpreter import BARRIER, ONE_THREAD

# What one thread does in about two microseconds: bytes within its caches, and operations.
_SMALL_BYTES, _SMALL_FLOPS = 64 << 10, 128 << 10

# What the thread pool does in less than 0.2 s at 8 GB/s and 20 GFLOP/s.
_SHORT_BYTES, _SHORT_FLOPS = 3 << 29, 4 << 30

Span = tuple[int, int]  # addresses: of the first byte, and behind the last


@dataclass(frozen=True)
class _Accesses:
    """Memory that a step reads and writes, and whether a single thread runs the step."""

    reads: list[Span]
    writes: list[Span]
    one_thread: bool

    def conflicts(self, later: _Accesses) -> bool:
        """Whether ``later`` must wait until every thread has finished this step."""
        if self.one_thread and later.one_thread:
            return False  # the same thread runs both in order
        return (
            _overlap(self.writes, later.reads)
            or _overlap(self.writes, later.writes)
            or _overlap(self.reads, later.writes)
        )


def barrier_flags(steps: Sequence[Bound]) -> list[int]:
    """Flags (ONE_THREAD, BARRIER) of each step's last entry; the program ends with BARRIER."""
    flags: list[int] = []
    pending: list[_Accesses] = []  # of the steps since the last barrier
    for step in steps:
        now = _accesses(step)
        if any(before.conflicts(now) for before in pending):
            flags[-1] |= BARRIER
            pending = []
        pending.append(now)
        flags.append(ONE_THREAD if now.one_thread else 0)
    if flags:
        flags[-1] |= BARRIER
    return flags


def _accesses(step: Bound) -> _Accesses:
    written = get(step.node.op).written(step.node)
    reads = [_span(o) for o in step.inputs if o is not None]
    writes = [_span(o) for i, o in enumerate(step.inputs) if o is not None and i in written]
    if get(step.node.op).alias(step.node) is None:
        writes.append(_span(step.out))
    if step.scratch is not None:
        writes.append(_span(step.scratch))
    return _Accesses(reads, writes, _is_small(step))


def _is_small(step: Bound) -> bool:
    """Whether one thread runs the step in microseconds, at the upper bounds of its Vars."""
    cost = _cost(step)
    return cost.bytes <= _SMALL_BYTES and cost.flops <= _SMALL_FLOPS


def is_short(steps: Sequence[Bound]) -> bool:
    """Whether the steps take less than about 0.2 s together, so that Ctrl-C may wait for them."""
    costs = [_cost(step) for step in steps]
    return (
        sum(c.bytes for c in costs) <= _SHORT_BYTES and sum(c.flops for c in costs) <= _SHORT_FLOPS
    )


def _cost(step: Bound) -> Cost:
    """Cost of the step at the upper bounds of its Vars."""
    metas = tuple(s and s.meta for s in step.node.src)
    attrs = tuple(sorted(step.node.attrs.items()))
    return _cost_at_bounds(get(step.node.op), step.node.meta, metas, attrs)


@lru_cache(maxsize=4096)  # the layers of a model have equal steps
def _cost_at_bounds(
    op: OpDef, out: Meta, metas: tuple[Meta | None, ...], attrs: tuple[tuple[str, Any], ...]
) -> Cost:
    rows = [m.rows for m in (out, *metas) if m]
    env = {var.name: var.hi for var in rows if isinstance(var, Var)}
    return op.cost(out.at(env), *(m and m.at(env) for m in metas), env=env, **dict(attrs))


def _span(operand: Operand) -> Span:
    """Address range of the operand's elements at the upper bounds of its Vars."""
    meta = operand.meta.bound()
    start = int(operand.buffer.ctypes.data) + meta.offset
    counts = [d for d in meta.shape if isinstance(d, int)]  # all of them, since Vars are bound
    if 0 in counts:
        return start, start
    nbytes = meta.dtype.nbytes
    if counts and meta.dtype.tail:  # behind the blocks of each row
        nbytes, counts[-1] = meta.dtype.row_nbytes(counts[-1]), 1
    elif counts:
        counts[-1] //= meta.dtype.block
    last = sum((n - 1) * stride for n, stride in zip(counts, meta.strides))
    return start, start + last + nbytes


def _overlap(a: Sequence[Span], b: Sequence[Span]) -> bool:
    return any(x < v and u < y for x, y in a for u, v in b)
