"""The devices that an executor has opened."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..backends import Backend, Device, Options

Progress = Callable[[str, int, int], None]  # what, done, total


class Devices(dict[str, Device]):
    """Devices by the name of their backend, each opened at first use."""

    def __init__(self, backends: Sequence[Backend], options: Options, progress: Progress) -> None:
        super().__init__()
        self.backends, self.options, self.progress = backends, options, progress

    def of(self, backend: Backend) -> Device:
        """The backend's device."""
        if backend.name not in self:
            device = self[backend.name] = backend.open_device(self.options)
            device.progress = self.progress
        return self[backend.name]

    def memory_of(self, backend: Backend) -> str:
        """The memory that the backend's device works in."""
        return self.of(backend).memory

    def owner(self, memory: str) -> Device:
        """A device that can allocate and copy in ``memory``."""
        rest = (self.of(backend) for backend in self.backends)  # opened only if none of these fits
        return next(d for d in itertools.chain(list(self.values()), rest) if d.memory == memory)
