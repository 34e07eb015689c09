"""What comes out of a plan, and a plan that is run again and again: the loop of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..backends import Device, Operand, Ring
from ..graph.tensor import Var


class Output:
    """Where a plan's output lies. What is known about it is found once: decoding reads it often."""

    def __init__(self, device: Device, operand: Operand) -> None:
        self.device, self._operand = device, operand
        self._readers: dict[int, Callable[[], np.ndarray]] = {}  # by count of rows
        self._rings: dict[int, Ring | None] = {}

    def reader(self, env: Mapping[str, int]) -> Callable[[], np.ndarray]:
        """What gives a copy of the values after a run with these values of the Vars."""
        count = self._rows(env)
        if count not in self._readers:
            self._readers[count] = self.device.reader(self._at(env))
        return self._readers[count]

    def ring(self, env: Mapping[str, int]) -> Ring | None:
        """The device's ring for the values after runs with these values of the Vars, empty. There
        is one for each count of rows: copies into its slots may be under way."""
        count = self._rows(env)
        if count not in self._rings:
            self._rings[count] = self.device.ring(self._at(env))
        ring = self._rings[count]
        if ring is not None:
            ring.clear()
        return ring

    def _rows(self, env: Mapping[str, int]) -> int:
        rows = self._operand.meta.rows
        return env[rows.name] if isinstance(rows, Var) else rows

    def _at(self, env: Mapping[str, int]) -> Operand:
        return replace(self._operand, meta=self._operand.meta.at(env))


class DecodeLoop:
    """A plan run again and again: `launch` begins a run, `take` gives the output of the oldest one.

    ``ahead``: so many more runs may be begun before the output of the first of them is taken.
    ``waiting``: runs whose output has not been taken. Between two tokens the interpreter has cold
    caches, and every line costs microseconds: what can be found before is found before.
    """

    def __init__(
        self,
        begin: Sequence[Callable[[], object]],
        read: Callable[[], np.ndarray],
        ahead: int = 0,
    ) -> None:
        self._begin, self._read, self.lookahead = begin, read, ahead
        self.waiting = 0

    def launch(self) -> None:
        for part in self._begin:
            part()
        self.waiting += 1

    def take(self) -> np.ndarray:
        self.waiting -= 1
        return self._read()
