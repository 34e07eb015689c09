"""Writes to a GPU and copies from it, prepared and repeated, on the host's memory instead of a
GPU's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from graphllm.backends import Operand
from graphllm.backends.cuda.runtime.device import CudaDevice
from graphllm.graph.tensor import Meta

pytest.importorskip("cupy")
SIZES = [3, 1, 0, 17, 4096, 20_000]  # of rows; the last one is too large for the kernel


class _Scatter:
    """The launch of `scatter`, which copies at once."""

    def __init__(self, launch) -> None:
        source = np.uint64(launch.args[0])
        self.arguments = [bytearray(source.tobytes()), bytearray(launch.args[1])]

    def argument(self, index: int) -> memoryview:
        return memoryview(self.arguments[index])

    def __call__(self) -> None:
        from graphllm.backends.cuda.runtime import staging

        (source,) = np.frombuffer(self.arguments[0], np.uint64).tolist()
        for to, at, nbytes in np.frombuffer(self.arguments[1], staging._PART).tolist():
            assert (source + at) % 16 == to % 16 == 0
            ctypes.memmove(to, source + at, nbytes)


class _Pinned(np.ndarray):
    """Pinned memory."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


@pytest.fixture
def device(monkeypatch):
    """A device whose buffers are arrays of the host."""
    from graphllm.backends.cuda.runtime import staging

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(staging, "Event", lambda **settings: event)
    monkeypatch.setattr(
        staging, "alloc_pinned_memory", lambda nbytes: aligned(nbytes).view(_Pinned)
    )
    monkeypatch.setattr(staging, "runtime", SimpleNamespace(
        memcpyAsync=lambda to, source, nbytes, *rest: ctypes.memmove(to, source, nbytes),
        memcpyHostToDevice=1, memcpyDeviceToHost=2,
    ))  # fmt: skip
    monkeypatch.setattr(staging, "_STAGING_BYTES", 100_000)  # so that the two buffers are swapped
    made = object.__new__(CudaDevice)
    gpu = SimpleNamespace(stream=SimpleNamespace(ptr=0), use=lambda: None, prepare=_Scatter)
    made.gpu, made._stager = gpu, staging.Stager(gpu)
    return made


def aligned(nbytes: int) -> np.ndarray:
    padded = np.zeros(nbytes + 16, np.uint8)
    start = -padded.ctypes.data % 16
    return padded[start : start + nbytes]


@pytest.mark.parametrize("strided", [False, True])
def test_a_writer_writes_what_the_arrays_hold_at_each_call(device, strided):
    buffers = [aligned(4 * rows) for rows in SIZES]
    values = []
    for rows, buffer in zip(SIZES, buffers):
        data = np.zeros(2 * rows, np.int32)[:: 2 if strided else 1][:rows]
        place = SimpleNamespace(address=buffer.ctypes.data)
        values.append((Operand(Meta.of((rows,), "i32"), place), data))
    writers = [device.writer(values), device.writer(values[:1]), device.writer(values[3:5])]
    rng = np.random.default_rng(0)
    for turn in range(30):
        for _, data in values:
            data[:] = rng.integers(0, 1 << 30, len(data))
        writers[turn % 3]()
        chosen = (range(6), range(1), range(3, 5))[turn % 3]
        for index in chosen:
            np.testing.assert_array_equal(buffers[index].view(np.int32), values[index][1])


@pytest.mark.parametrize("shape", [(1,), (7, 3), (20_000,)])  # the last one is copied by the driver
@pytest.mark.parametrize("offset", [0, 4])
def test_a_ring_returns_what_an_operand_had_after_each_run(device, shape, offset):
    size = int(np.prod(shape))
    buffer = aligned(4 * size + offset)
    meta = Meta.of(shape, "i32")
    meta = Meta(meta.shape, meta.dtype, meta.strides, offset)
    place = SimpleNamespace(address=buffer.ctypes.data)
    ring, kept = device.ring(Operand(meta, place)), []
    rng = np.random.default_rng(0)
    for run in range(9):
        kept.append(rng.integers(0, 1 << 30, shape).astype(np.int32))
        buffer[offset:] = kept[-1].view(np.uint8).ravel()
        ring.put()
        if run >= ring.lookahead:
            np.testing.assert_array_equal(ring.take(), kept.pop(0))
