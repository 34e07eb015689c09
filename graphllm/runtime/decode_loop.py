"""Outputs of a bound plan, and the decode loop, which runs one plan repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..backends import Device, Operand, Ring
from ..graph.tensor import Var


class Output:
    """One output of a bound plan. Readers and rings are cached by number of rows."""

    def __init__(self, device: Device, operand: Operand) -> None:
        self.device, self._operand = device, operand
        self._made: dict[tuple[Any, int], Any] = {}

    def reader(self, env: Mapping[str, int]) -> Callable[[], np.ndarray]:
        """Return a function that copies the values after a run with the live values ``env``."""
        return self._cached(self.device.reader, env)

    def ring(self, env: Mapping[str, int]) -> Ring | None:
        """Return an empty ring of the device for runs with the live values ``env``.

        It is the one that was returned for as many rows before, which loses its copies.
        """
        ring = self._cached(self.device.ring, env)
        if ring is not None:
            ring.restart()
        return ring

    def _cached(self, make: Callable[[Operand], Any], env: Mapping[str, int]) -> Any:
        rows = self._operand.meta.rows
        key = make, env[rows.name] if isinstance(rows, Var) else rows
        if key not in self._made:
            meta = self._operand.meta.at(env)
            self._made[key] = make(replace(self._operand, meta=meta))
        return self._made[key]


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
