"""Outputs of a bound plan, and the decode loop, which runs one plan repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..backends import Device, Operand, Ring


class Output(NamedTuple):
    """One output of a bound plan."""

    device: Device
    operand: Operand

    def reader(self, env: Mapping[str, int]) -> Callable[[], np.ndarray]:
        """Return a function that copies the values after a run with the live values ``env``."""
        return self.device.reader(self._at(env))

    def ring(self, env: Mapping[str, int]) -> Ring | None:
        """Return a ring of the device for runs with the live values ``env``."""
        return self.device.ring(self._at(env))

    def _at(self, env: Mapping[str, int]) -> Operand:
        """Return the operand with its live number of rows."""
        return replace(self.operand, meta=self.operand.meta.at(env))


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
        fed: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.launchers, self._read, self.lookahead = launchers, read, lookahead
        self._others, self._fed = others, fed
        self.waiting = 0

    @classmethod
    def of(
        cls,
        launchers: Sequence[Callable[[], object]],
        outputs: Sequence[Output],
        env: Mapping[str, int],
        ahead: bool,
        fed: Sequence[Callable[[], None]],
    ) -> DecodeLoop:
        """Return a loop that returns ``outputs``.

        ``ahead``: launch runs ahead if the devices of the outputs can. ``env``: see `Output`.
        """
        rings = [ring for each in outputs if ahead and (ring := each.ring(env)) is not None]
        if len(rings) < len(outputs):
            reads = [each.reader(env) for each in outputs]
            return cls(launchers, reads[0], 0, reads[1:], fed)
        puts, takes = [ring.put for ring in rings], [ring.take for ring in rings]
        lookahead = min(ring.lookahead for ring in rings)
        return cls([*launchers, *puts], takes[0], lookahead, takes[1:], fed)

    def feed(self) -> None:
        """Set the live values, and write what the arrays that were fed first hold now."""
        for call in self._fed:
            call()

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
