"""Walks: many steps for one token in one launch, whose blocks meet where a step needs another.

A kernel's end and the next one's start cost a microsecond or two in which the memory rests. A walk
(walk.cu) has one block on every processor go along a list of records, and its warps fetch weights
for the next product while they wait. walk_steps.py says which ops can be steps of a walk; the
others stand between walks as launches.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..touched import Touched, overlap
from .device import CudaDevice, Launch, ceil
from .source import Module, module

LEAST = 4  # steps that a walk is worth while for
WARPS = 16  # of a block
CHUNK = 128  # items of a slot of a warp's ring, of 16 bytes each
_RECORD, _AHEAD = 512, 24  # bytes of a record; where a product's `ahead` lies in it
_KINDS = ("norm", "copy", "rope", "attend")  # those that are not products
_OWN = 6 << 10  # bytes of shared memory that the kernel itself has
_RINGS = range(2, 9)  # slots that a ring may have


@dataclass(frozen=True)
class Task:
    """One record of a walk. ``kind``: of `_KINDS`, or a weight format's struct for a product.

    ``everywhere``: every block does it. ``stage``: bytes of shared memory that it needs; ``slot``:
    of a ring's slot. ``macros``: what the module must be compiled with. ``keep``: what it points
    at.
    """

    kind: str
    words: bytes
    stage: int
    slot: int = 0
    everywhere: bool = False
    macros: Mapping[str, object] = field(default_factory=dict)
    keep: object = None

    @property
    def product(self) -> bool:
        return self.kind not in _KINDS


@dataclass(frozen=True)
class Walk(Launch):
    """The launch of a walk over ``steps`` steps of a plan."""

    steps: int = 0
    keep: object = None

    def stamped(self, address: int) -> Walk:
        """The same, which notes the time of each step but the last one at ``address`` and on."""
        return replace(self, args=(*self.args[:3], address, *self.args[4:]))


@dataclass
class Run:
    """Consecutive steps of a plan that one walk may do, as they are found."""

    start: int
    tasks: list[list[Task]] = field(default_factory=list)
    touched: list[Touched] = field(default_factory=list)
    macros: dict[str, object] = field(default_factory=dict)

    def takes(self, tasks: Sequence[Task]) -> bool:
        """Whether one module can have the steps so far and these."""
        wanted = {k: v for task in tasks for k, v in task.macros.items()}
        return all(self.macros.get(k, v) == v for k, v in wanted.items())

    def add(self, tasks: Sequence[Task], touched: Touched) -> None:
        self.tasks.append(list(tasks))
        self.touched.append(touched)
        for task in tasks:
            self.macros.update(task.macros)


def runs(found: Sequence[tuple[Sequence[Task], Touched] | None]) -> list[Run]:
    """Runs of steps that are worth a walk; None: a step that cannot be in one."""
    made: list[Run] = []
    open_run: Run | None = None
    for index, step in enumerate(found):
        if step is None:
            open_run = None
            continue
        tasks, touched = step
        if open_run is None or not open_run.takes(tasks):
            open_run = Run(index)
            made.append(open_run)
        open_run.add(tasks, touched)
    return [run for run in made if len(run.tasks) >= LEAST]


def _meets(run: Run) -> list[bool]:
    """Whether all blocks meet before each step."""
    flags: list[bool] = []
    pending: list[tuple[bool, Touched]] = []  # steps since the last meeting: everywhere, what
    for tasks, now in zip(run.tasks, run.touched):
        flags.append(any(_conflict(*before, now) for before in pending))
        if flags[-1]:
            pending = []
        pending.append((all(task.everywhere for task in tasks), now))
    return flags


def _conflict(everywhere: bool, before: Touched, now: Touched) -> bool:
    """Whether a block must not begin a step while another still does the one ``before``. What is
    done everywhere every block has from itself."""
    if overlap(before.writes, now.writes) or overlap(before.reads, now.writes):
        return True
    return not everywhere and overlap(before.writes, now.reads)


def walk(run: Run, device: CudaDevice) -> Walk | None:
    """The launch for a run of steps; None where the shared memory does not do for it."""
    tasks = [task for step in run.tasks for task in step]
    stage = ceil(max(task.stage for task in tasks), 128) * 128
    slot = max(task.slot for task in tasks)
    ring = _ring(device.gpu.shared - _OWN - stage, slot)
    if ring < _RINGS[0]:
        return None
    formats = tuple(dict.fromkeys(task.kind for task in tasks if task.product))
    records = _records(run, formats)
    table, meeting = device.put(np.frombuffer(records, np.uint8)), device.alloc(8)
    first = next((i for i, task in enumerate(tasks) if task.product), -1)
    args = (table.address, len(tasks), meeting.address, 0, stage, slot, first)
    kernel = walk_module(ring, formats, run.macros)["walk"]
    return Walk(
        kernel, (device.gpu.processors,), (32 * WARPS,), args, stage + WARPS * ring * slot,
        early=False, cooperative=True, steps=len(run.tasks), keep=(table, meeting, tasks),
    )  # fmt: skip


def _ring(room: int, slot: int) -> int:
    """Slots of each warp's ring."""
    return min(_RINGS[-1], room // (WARPS * slot)) if slot else _RINGS[0]


def _records(run: Run, formats: Sequence[str]) -> bytes:
    """The table of struct Record."""
    made, stamp = [], -1
    for step, meet in zip(run.tasks, _meets(run)):
        stamp += 1
        for index, task in enumerate(step):
            number = len(_KINDS) + formats.index(task.kind) if task.product else 0
            kind = number if task.product else _KINDS.index(task.kind)
            last = index == len(step) - 1
            head = struct.pack("<4i", kind, meet and index == 0, stamp if last else -1, 0)
            made.append(bytearray((head + task.words).ljust(_RECORD, b"\0")))
    products = [i for i, task in enumerate(t for s in run.tasks for t in s) if task.product]
    for at, following in zip(products, [*products[1:], -1]):
        struct.pack_into("<i", made[at], _AHEAD, following)
    return b"".join(made)


def walk_module(ring: int, formats: Sequence[str], macros: Mapping[str, Any]) -> Module:
    """walk.cu with these macros."""
    cases = " ".join(f"CASE({i}, {name})" for i, name in enumerate(formats))
    pool = macros.get("POOL", "F16")
    shape = {name: macros.get(name, size) for name, size in _USUAL.items()}
    return module("walk", RING=ring, FORMATS=cases, POOL=pool, POOLED=f"POOL_{pool}", **shape)


_USUAL = {"DEPTH": 64, "WIDTH": 64, "HEADS": 1}  # where there is no attention
