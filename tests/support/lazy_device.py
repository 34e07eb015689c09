"""A test device that defers all work until a result is read, as a slow GPU queue would.

Its kernels are the reference's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

import graphllm.backends as registry
from graphllm.backends.reference import BACKEND as REFERENCE
from graphllm.backends.reference import HostDevice


class LazyDevice(HostDevice):
    """``queue``: deferred work. ``begun``: number of segment runs launched."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Callable[[], object]] = deque()
        self.begun = 0

    def finish(self) -> None:
        while self.queue:
            self.queue.popleft()()

    def writer(self, values) -> Callable[[], None]:
        def write() -> None:
            kept = [(operand, data.copy()) for operand, data in values]
            self.queue.append(HostDevice.writer(self, kept))

        return write

    def copy_out(self, operand) -> np.ndarray:
        self.finish()
        return super().copy_out(operand)

    def ring(self, operand) -> _Ring:
        return _Ring(self, operand)

    def build(self, steps, header) -> _Segment:
        return _Segment(self, super().build(steps, header), header)


class _Segment:
    def __init__(self, device, steps, header) -> None:
        self.device, self.steps, self.header = device, steps, header

    def run(self, log) -> None:
        """Defer the run, with the present live values."""
        values = self.header.values.copy()

        def run() -> None:
            now = self.header.values.copy()
            self.header.values[:] = values
            self.steps.run(log)
            self.header.values[:] = now

        self.device.begun += 1
        self.device.queue.append(run)
        if log is not None:
            log.collect = self.device.finish


class _Ring:
    lookahead = 1

    def __init__(self, device, operand) -> None:
        self.device, self.operand = device, operand
        self.slots = [None] * (self.lookahead + 1)
        self.put_count = self.taken = self.arrived = 0

    def put(self) -> None:
        slot = self.put_count % len(self.slots)
        self.put_count += 1

        def copy() -> None:
            self.slots[slot] = HostDevice.copy_out(self.device, self.operand)
            self.arrived += 1

        self.device.queue.append(copy)

    def take(self) -> np.ndarray:
        """Do only the work that the copy depends on."""
        assert self.taken < self.put_count
        while self.arrived <= self.taken:
            self.device.queue.popleft()()
        self.taken += 1
        return self.slots[(self.taken - 1) % len(self.slots)]


def install(
    patch: pytest.MonkeyPatch, name: str = "lazy", make: Callable[[], LazyDevice] = LazyDevice
) -> None:
    """Make the backend available under ``name``."""
    backend = type(REFERENCE)(name, lambda: (True, f"{name}, for tests"), lambda options: make())
    find = registry.find
    patch.setattr(registry, "find", lambda asked: backend if asked == name else find(asked))
