"""Joins launches of one token that follow one another, to chains: linears, and the norms and
quantizations that make their activations. See linear_chain.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....graph.dtype import F32
from ..runtime.device import SEGMENT_PASSES, CudaDevice
from ..runtime.work import Launch, Work
from .linear_chain import MAX_LINEARS, Linears, Row, Stage, chain


def join(work: list[list[Work]], device: CudaDevice) -> list[list[Work]]:
    """The work of a segment, by step, with chains in place of launches that they can do.

    A chain is the work of its first step.
    """
    launches = [w for part in work for w in part if isinstance(w, Launch)]
    if not any(isinstance(w.part, Linears) for w in launches):
        return work
    found: list[list[Work]] = [[] for _ in work]
    builder = _Joiner(found, device)
    for step, part in enumerate(work):
        for each in part:
            builder.add(step, each)
    builder.end()
    return found


class _Joiner:
    """Takes launch after launch; what cannot be joined is passed on in order."""

    def __init__(self, found: list[list[Work]], device: CudaDevice) -> None:
        self._found, self._device = found, device
        self._stages: list[Stage] = []
        self._first: tuple[int, Launch] | None = None  # step and launch that the chain replaces
        # The last launch of a row and its step, if no linears took it.
        self._row: tuple[int, Launch] | None = None

    def add(self, step: int, work: Work) -> None:
        part = work.part if isinstance(work, Launch) else None
        if self._stages and isinstance(work, Launch) and not work.programmatic:
            self.end()
        if isinstance(part, Row):
            if self._row is not None:
                self.end()
            self._row = step, work  # type: ignore[assignment]
        elif isinstance(part, Linears):
            self._add_linears(step, work, part)  # type: ignore[arg-type]
        else:
            self.end()
            self._found[step].append(work)

    def _add_linears(self, step: int, work: Launch, part: Linears) -> None:
        stage = self._stage(step, part)
        if stage is None:
            self.end()
            stage = self._stage(step, part)
        assert stage is not None
        if self._first is None:
            self._first = self._row if stage.row is not None and self._row else (step, work)
        if stage.row is None:
            self._pass_row_on()
        self._row = None
        self._stages.append(stage)

    def _stage(self, step: int, part: Linears) -> Stage | None:
        """The linears as the next stage; None if they need another chain."""
        first, last = not self._stages, self._stages[-1] if self._stages else None
        if self._row is not None:
            row_step, launch = self._row
            row = launch.part
            assert isinstance(row, Row)
            if _makes(row, part) and not _overlap(row, part):
                alike = first or (last is not None and _alike(last.linears, part))
                fits = len(self._stages) < MAX_LINEARS
                return Stage(part, row, not first, row_step, step) if alike and fits else None
            return Stage(part, None, False, step, step) if first else None
        if last is None:
            return Stage(part, None, False, step, step)
        if not _alike(last.linears, part) or len(self._stages) == MAX_LINEARS:
            return None
        if last.row is not None and _makes(last.row, part) and not _overlap(last.row, part):
            return Stage(part, last.row, False, last.row_step, step)
        plain = part.x_dtype == F32 and not _overlaps((part.x, 4 * part.depth), part.results)
        return Stage(part, None, True, step, step) if plain else None

    def _pass_row_on(self) -> None:
        if self._row is not None:
            step, launch = self._row
            self._found[step].append(launch)
            self._row = None

    def end(self) -> None:
        """Pass on what there is."""
        if self._stages:
            assert self._first is not None
            start, launch = self._first
            stages = [
                replace(s, row_step=s.row_step - start, step=s.step - start) for s in self._stages
            ]
            made = chain(stages, self._device)
            self._found[start].append(replace(made, programmatic=launch.programmatic))
        self._stages, self._first = [], None
        self._pass_row_on()


def _makes(row: Row, part: Linears) -> bool:
    """Whether the activations are the row that is made, in a dtype that a chain makes."""
    if (row.made, row.width, row.made_dtype) != (part.x, part.depth, part.x_dtype):
        return False
    return part.x_dtype.name in ("a8_32", "a8_256") or (part.x_dtype == F32 and not row.base)


def _alike(a: Linears, b: Linears) -> bool:
    """Whether both multiply floats, or both integers, for the same tokens."""
    return (a.x_dtype == F32) == (b.x_dtype == F32) and a.live == b.live


def _overlap(row: Row, part: Linears) -> bool:
    """Whether a block may write a result where another one still reads the row."""
    read = [row.x, row.base] if row.base else [row.x]
    return any(_overlaps((at, 4 * row.width), part.results) for at in read)


def _overlaps(region: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    start, nbytes = region
    return any(start < at + size and at < start + nbytes for at, size in others)


SEGMENT_PASSES.append(join)
