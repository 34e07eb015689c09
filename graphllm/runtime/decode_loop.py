"""Outputs of a bound plan, and the decode loop, which runs one plan repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..backends import Device, Operand, Ring


class Output:
    """One output of a bound plan. Its reader and rings for the last number of rows are kept."""

    def __init__(self, device: Device, operand: Operand) -> None:
        self.device, self._operand = device, operand
        self._live = operand  # with the last number of rows
        self._reader: Callable[[], np.ndarray] | None = None
        self._rings: list[Ring] = []

    def reader(self, env: Mapping[str, int]) -> Callable[[], np.ndarray]:
        """Return a function that copies the values after a run with the live values ``env``."""
        operand = self._at(env)
        self._reader = self._reader or self.device.reader(operand)
        return self._reader

    def ring(self, env: Mapping[str, int]) -> Ring | None:
        """Return an empty ring of the device for runs with the live values ``env``.

        It is an earlier one of which all copies were taken, if there is one. Two are kept: of the
        loop that runs, and of the one before it, whose last output may be taken later.
        """
        operand = self._at(env)
        ring = next((each for each in self._rings if not each.waiting), None)
        if ring is None and (ring := self.device.ring(operand)) is not None:
            self._rings = [*self._rings[-1:], ring]
        return ring

    def _at(self, env: Mapping[str, int]) -> Operand:
        """Return the operand with its live number of rows."""
        meta = self._operand.meta.at(env)
        if meta != self._live.meta:
            self._live, self._reader, self._rings = replace(self._operand, meta=meta), None, []
        return self._live


class DecodeLoop:
    """Repeated runs of one plan: `launch` starts a run, `take` returns the oldest run's output.

    A plan may have other outputs, which `take_others` returns.

    All look-ups are done in advance: between two tokens the interpreter's caches are cold, and
    every line of Python costs microseconds.

    Attributes:
        launchers: calls that start a run, in order.
        lookahead: how many more runs may be launched before the first run's output is taken.
        waiting: number of runs whose output has not been taken.
    """

    def __init__(
        self,
        launchers: Sequence[Callable[[], object]],
        read: Callable[[], np.ndarray],
        lookahead: int = 0,
        others: Sequence[Callable[[], np.ndarray]] = (),
    ) -> None:
        self.launchers, self._read, self.lookahead = launchers, read, lookahead
        self._others = others
        self.waiting = 0

    @classmethod
    def of(
        cls,
        launchers: Sequence[Callable[[], object]],
        outputs: Sequence[Output],
        env: Mapping[str, int],
        ahead: bool,
    ) -> DecodeLoop:
        """Return a loop that returns ``outputs``.

        ``ahead``: launch runs ahead if the devices of the outputs can. ``env``: see `Output`.
        """
        rings = [ring for each in outputs if ahead and (ring := each.ring(env)) is not None]
        if len(rings) < len(outputs):
            reads = [each.reader(env) for each in outputs]
            return cls(launchers, reads[0], others=reads[1:])
        puts, takes = [ring.put for ring in rings], [ring.take for ring in rings]
        lookahead = min(ring.lookahead for ring in rings)
        return cls([*launchers, *puts], takes[0], lookahead, takes[1:])

    def launch(self) -> None:
        """Start a run."""
        for call in self.launchers:
            call()
        self.waiting += 1

    def take(self) -> np.ndarray:
        """Wait for the oldest run that was not taken, and return its output."""
        self.waiting -= 1
        return self._read()

    def take_others(self) -> list[np.ndarray]:
        """Return the other outputs of the run that `take` returned last. Call it once a run."""
        return [read() for read in self._others]
