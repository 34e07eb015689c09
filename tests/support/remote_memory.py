"""A test backend with its own memory: NumPy bodies on buffers that no other backend may receive."""

from __future__ import annotations

import numpy as np
import pytest

from graphllm import backends, ops
from graphllm.backends import ANY, Backend
from graphllm.backends.reference import HostDevice
from graphllm.ops import get

FREE = 1 << 40


class RemoteArray(np.ndarray):
    """A buffer in the remote memory."""


class RemoteDevice(HostDevice):
    memory = "remote"
    room = FREE

    def alloc(self, nbytes):
        if nbytes > self.room:
            raise MemoryError
        return super().alloc(nbytes).view(RemoteArray)

    def free(self):
        return self.room

    def prepare(self, pack, raw, meta):
        dense = super().prepare(pack, raw, meta)
        buffer = self.alloc(dense.nbytes)
        buffer[:] = dense
        return buffer

    def build(self, steps, header):
        for step in steps:
            operands = [o for o in (*step.inputs, step.out) if o is not None]
            host = [o for o in operands if not isinstance(o.buffer, RemoteArray)]
            copies = get(step.node.op).role == "transfer"
            assert len(host) == copies, f"{step.node.op} of {step.node.scope} mixes memories"
        return super().build(steps, header)


def remote_backend() -> Backend:
    """Return a backend with kernels for all unfused ops."""
    backend = Backend("remote", lambda: (True, "a test"), lambda options: RemoteDevice())
    for name, op in ops.registry().items():
        if not op.fusion:
            layout = dict.fromkeys((*op.params, "rest"), ANY)
            if op.role == "transfer":
                layout = {}
            backend.kernel(name, layout=layout)(op.reference)
    return backend


@pytest.fixture
def remote(monkeypatch):
    """The backend ``remote`` before all others; `RemoteDevice.room` is what it has free."""
    backend, find, names = remote_backend(), backends.find, backends.names
    monkeypatch.setattr(backends, "find", lambda name: backend if name == "remote" else find(name))
    monkeypatch.setattr(backends, "names", lambda: ["remote", *names()])
    monkeypatch.setattr(RemoteDevice, "room", FREE)
    return backend
