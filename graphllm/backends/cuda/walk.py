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
from itertools import pairwise
from typing import Any

import numpy as np

from ..touched import Touched, overlap
from .device import CudaDevice, Launch, ceil
from .source import Module, module

LEAST = 4  # steps that a walk is worth while for
WARPS = 16  # of a block
_RECORD, _HEAD = 512, 16  # bytes of a record, and of what stands before the step itself
_AHEAD, _LOCAL, _ITEMS, _LOOKED_UP = 8, 32, 204, 212  # where these lie in the steps that have them
_KINDS = ("norm", "copy", "rope", "attend")  # those that are not products
_OWN = 6 << 10  # bytes of shared memory that the kernel itself has


@dataclass(frozen=True)
class Task:
    """One record of a walk. ``kind``: of `_KINDS`, or a weight format's struct for a product.

    ``stage``: bytes of shared memory that it needs. ``everywhere``:
    every block does it. ``meets``: the blocks meet before it, in the midst of a step. ``macros``:
    what the module must be compiled with. ``keep``: what it points at. ``local``: where it leaves
    its results in shared memory, by their addresses. ``reads``: the activations of a product.
    ``items``: of attention, into how many parts its heads go.
    """

    kind: str
    words: bytes
    stage: int
    everywhere: bool = False
    meets: bool = False
    macros: Mapping[str, object] = field(default_factory=dict)
    keep: object = None
    local: Mapping[int, int] = field(default_factory=dict)
    reads: int = 0
    items: int = 0

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
        turned = self.tasks and self.tasks[-1][0].kind == "rope"
        if turned and tasks[0].items and overlap(self.touched[-1].writes, touched.reads):
            self.tasks[-1] = [replace(self.tasks[-1][0], everywhere=True)]
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
    pending: list[int] = []  # steps since the last meeting
    local = _local(run.tasks)
    for index, now in enumerate(run.touched):
        own = [_has(run, before, index, local) for before in pending]
        meet = any(_conflict(run.touched[b], now, o) for b, o in zip(pending, own))
        flags.append(meet)
        met = meet or any(task.meets for task in run.tasks[index])
        pending = [index] if met else [*pending, index]
    return flags


def _has(run: Run, before: int, now: int, local: Mapping[tuple[int, int], int]) -> bool:
    """Whether a block that has done one step itself has what another reads of it."""
    last = max((i for i, task in enumerate(run.tasks[before]) if task.meets), default=0)
    done = run.tasks[before][last:]
    if not all(task.everywhere for task in done):
        return False
    if any(task.local for task in done):  # where others look, one block writes it
        return all((now, i) in local for i, _ in enumerate(run.tasks[now]))
    return True


def _conflict(before: Touched, now: Touched, own: bool) -> bool:
    """Whether a block must not begin a step while another still does the one ``before``; ``own``:
    what it reads of that, it has from itself."""
    if overlap(before.writes, now.writes) or overlap(before.reads, now.writes):
        return True
    return not own and overlap(before.writes, now.reads)


def walk(run: Run, device: CudaDevice) -> Walk | None:
    """The launch for a run of steps; None where the shared memory does not do for it."""
    tasks = [task for step in run.tasks for task in step]
    stage = ceil(max(task.stage for task in tasks), 128) * 128
    if stage > device.gpu.shared - _OWN:
        return None
    formats = tuple(dict.fromkeys(task.kind for task in tasks if task.product))
    records = _records(run, formats)
    table, meeting = device.put(np.frombuffer(records, np.uint8)), device.alloc(8)
    first = next((i for i, task in enumerate(tasks) if task.product), -1)
    args = (table.address, len(tasks), meeting.address, 0, first)
    kernel = walk_module(formats, run.macros)["walk"]
    return Walk(
        kernel, (device.gpu.processors,), (32 * WARPS,), args, stage,
        early=False, cooperative=True, steps=len(run.tasks), keep=(table, meeting, tasks),
    )  # fmt: skip


def _records(run: Run, formats: Sequence[str]) -> bytes:
    """The table of struct Record."""
    made: list[bytearray] = []
    local = _local(run.tasks)
    for at, (step, meet) in enumerate(zip(run.tasks, _meets(run))):
        for index, task in enumerate(step):
            number = len(_KINDS) + formats.index(task.kind) if task.product else 0
            kind = number if task.product else _KINDS.index(task.kind)
            stamp = at if index == len(step) - 1 else -1
            head = struct.pack("<4i", kind, task.meets or (meet and index == 0), stamp, 0)
            made.append(bytearray((head + task.words).ljust(_RECORD, b"\0")))
            if (at, index) in local:
                struct.pack_into("<i", made[-1], _HEAD + _LOCAL, local[at, index])
    tasks = [task for step in run.tasks for task in step]
    products = [i for i, task in enumerate(tasks) if task.product]
    for at, following in zip(products, [*products[1:], -1]):
        struct.pack_into("<i", made[at], _HEAD + _AHEAD, following)
    for at, (task, then) in enumerate(pairwise(tasks)):
        if task.kind == "rope" and task.everywhere:
            struct.pack_into("<i200s", made[at], _HEAD + _ITEMS, then.items, then.words[:200])
            struct.pack_into("<i", made[at + 1], _HEAD + _LOOKED_UP, 1)
    return b"".join(made)


def _local(steps: Sequence[Sequence[Task]]) -> dict[tuple[int, int], int]:
    """Where in shared memory products find their activations, if they do, by step and task."""
    found: dict[tuple[int, int], int] = {}
    left: Mapping[int, int] = {}  # what the last norm left, while products alone come after it
    for at, tasks in enumerate(steps):
        for index, task in enumerate(tasks):
            if not task.product:
                left = task.local
                continue
            if task.reads in left:
                found[at, index] = left[task.reads]
            if any(offset < task.stage for offset in left.values()):
                left = {}
    return found


def walk_module(formats: Sequence[str], macros: Mapping[str, Any]) -> Module:
    """walk.cu with these macros."""
    cases = " ".join(f"CASE({i}, {name})" for i, name in enumerate(formats))
    pool = macros.get("POOL", "F16")
    shape = {name: macros.get(name, size) for name, size in _USUAL.items()}
    return module(
        "walk",
        WARPS=WARPS,
        FORMATS=cases,
        POOL=pool,
        POOLED=f"POOL_{pool}",
        **shape,
    )


_USUAL = {"DEPTH": 64, "WIDTH": 64, "HEADS": 1}  # where there is no attention
