"""Compiler front end without devices: an Executor that only compiles plans."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import backends as registry
from ..backends import Backend, Device, Options
from ..compiler.plan import HOST
from ..errors import PlacementError
from ..loading.load import check_fp8_prefill
from ..runtime.devices import Devices
from ..runtime.executor import Executor

if TYPE_CHECKING:
    from ..weights import Weights


@dataclass
class _PlannedDevice:
    """A device that exists only in the plan; ``room``: free bytes of its memory."""

    memory: str
    room: int | None
    progress: Callable[[str, int, int], None] = lambda what, done, total: None

    def free(self) -> int | None:
        return self.room


class _PlannedDevices(Devices):
    """Devices that need not exist.

    ``skipped``: backends that are not usable here; ``free``: free bytes of device memory, instead
    of what the device reports.
    """

    def __init__(self, skipped: Container[str], free: int | None, *more: Any) -> None:
        super().__init__(*more)
        self._skipped, self._free = skipped, free

    def of(self, backend: Backend) -> Device:
        if backend.name not in self:
            if backend.name in self._skipped:
                self[backend.name] = _planned_device(backend.memory, self._free)
            else:
                own = super().of(backend)
                if self._free is not None and own.memory != HOST:
                    self[backend.name] = _planned_device(own.memory, self._free)
        return self[backend.name]


class Planner(Executor):
    """An Executor that only compiles plans.

    ``asked``, the first backend, need not be usable here. ``free``: see `_PlannedDevices`.
    PlacementError, RequestError: an option does not fit ``asked``.
    """

    def __init__(
        self, weights: Weights, asked: str, options: Options, free: int | None, **more: Any
    ) -> None:
        if options.prefill == "fp8":
            check_fp8_prefill(asked, options.deterministic)
        self._asked, self._free = asked, free
        names = registry.names() if asked == "auto" else registry.fallbacks(asked)
        super().__init__(weights, names, options, **more)

    def _devices(self) -> Devices:
        if self._asked in self.skipped:
            missing = registry.find(self._asked)
            if not missing.kernels:
                why = self.skipped[self._asked]
                what = f"device = {self._asked!r} cannot be planned for: {why}"
                raise PlacementError(what, "device")
            self.backends.insert(0, missing)
        return _PlannedDevices(self.skipped, self._free, self.backends, self.options, self.progress)


def _planned_device(memory: str, room: int | None) -> Device:
    return _PlannedDevice(memory, room)  # type: ignore[return-value]  # no plan is bound to it
