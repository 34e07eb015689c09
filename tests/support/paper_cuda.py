"""A CUDA backend that plans without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graphllm.backends.cuda import BACKEND
from graphllm.backends.cuda.runtime.device import CudaDevice, KernelContext
from graphllm.backends.cuda.runtime.work import Launch


class Paper(CudaDevice):
    """A GPU of some capability; ``modules`` are those that launches come from."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.memory, self.modules = "paper", set()
        self.gpu = SimpleNamespace(capability=capability, processors=72)

    def alloc(self, nbytes):
        return SimpleNamespace(address=1 << 40, nbytes=nbytes)

    def prepare(self, pack, raw, meta):
        return self.alloc(0)

    def constant(self, table):
        return 1 << 40

    def live(self, header, var):
        return 1 << 40

    def build(self, steps, header):
        for step in steps:
            made = step.kernel.build(KernelContext(step, header, self))
            parts = made if isinstance(made, list) else [made]
            self.modules |= {part.function.module for part in parts if isinstance(part, Launch)}


@pytest.fixture
def paper(monkeypatch):
    """What makes the backend usable, with a GPU of this capability."""

    def made(capability: tuple[int, int]) -> Paper:
        device = Paper(capability)
        monkeypatch.setattr(BACKEND, "probe", lambda: (True, "on paper"))
        monkeypatch.setattr(BACKEND, "open_device", lambda options: device)
        return device

    return made
