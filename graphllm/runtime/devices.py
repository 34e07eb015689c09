"""The devices that an executor has opened."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..backends import Backend, Device, Options, Progress


class Devices(dict[str, Device]):
    """Devices by name of their backend, opened at first use."""

    def __init__(self, backends: Sequence[Backend], options: Options, progress: Progress) -> None:
        super().__init__()
        self.backends, self.options, self.progress = backends, options, progress

    def of(self, backend: Backend) -> Device:
        """Return the device of ``backend``."""
        if backend.name not in self:
            device = self[backend.name] = backend.open_device(self.options)
            device.progress = self.progress
        return self[backend.name]

    def memory_of(self, backend: Backend) -> str:
        """Return the name of the memory of the device of ``backend``."""
        return self.of(backend).memory

    def owner(self, memory: str) -> Device:
        """Return a device that can allocate and copy in ``memory``, an open one if there is one."""
        others = (self.of(backend) for backend in self.backends)
        return next(d for d in itertools.chain(list(self.values()), others) if d.memory == memory)
