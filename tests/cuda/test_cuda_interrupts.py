"""Interrupts and errors between the calls of the runtime. No GPU is needed: streams are fakes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.nvrtc


@pytest.fixture(autouse=True)
def _cupy():
    pytest.importorskip("cupy")


class Interrupted:
    """Calls that are counted, of which some are interrupted."""

    def __init__(self, *numbers: int) -> None:
        self.calls, self.numbers = 0, numbers

    def __call__(self, *args: object) -> None:
        self.calls += 1
        if self.calls in self.numbers:
            raise KeyboardInterrupt


def test_live_values_are_sent_again_after_an_interrupt():
    from graphllm.backends.cuda.runtime.launch import LiveHeader

    values, sent = np.array([1, 2], np.int64), []
    argument = bytearray(values.tobytes())

    class Send(Interrupted):
        def argument(self, index: int) -> memoryview:
            return memoryview(argument)

        def __call__(self) -> None:
            super().__call__()
            sent.append(np.frombuffer(argument, np.int64).tolist())

    gpu = SimpleNamespace(prepare=lambda launch: Send(2))
    header = LiveHeader(SimpleNamespace(address=0), SimpleNamespace(values=values), gpu)
    values[:] = 7
    with pytest.raises(KeyboardInterrupt):
        header.update()
    header.update()
    header.update()
    assert sent == [[1, 2], [7, 7]]


class Stream:
    """A stream that captures; ``interrupted``: as soon as it has begun to."""

    def __init__(self, interrupted: bool = False, invalid: bool = False) -> None:
        self.interrupted, self.invalid, self.capturing = interrupted, invalid, False

    def begin_capture(self) -> None:
        self.capturing = True
        if self.interrupted:
            raise KeyboardInterrupt

    def is_capturing(self) -> bool:
        return self.capturing

    def end_capture(self) -> None:
        self.capturing = False
        if self.invalid:
            raise RuntimeError("the capture is invalid")


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
def test_no_capture_goes_on_after_an_interrupt(interrupted, invalid):
    from graphllm.backends.cuda.runtime.segment import ReplayedCalls

    stream = Stream(interrupted, invalid)
    calls = ReplayedCalls(SimpleNamespace(stream=stream), lambda dim: 1)
    launch = Interrupted(2)
    calls._calls.append(launch)
    calls()
    with pytest.raises(KeyboardInterrupt):
        calls()
    assert not stream.capturing and launch.calls == (1 if interrupted else 2)


def test_a_pinned_buffer_is_not_written_before_its_transfers_have_ended():
    from graphllm.backends.cuda.runtime.staging import Stager

    stager = Stager.__new__(Stager)
    stager._stream, stager._half, stager._used = None, 0, 100
    wait = Interrupted(1)
    stager._sent = [SimpleNamespace(record=lambda stream: None, synchronize=wait)] * 2
    with pytest.raises(KeyboardInterrupt):
        stager._swap()
    assert (stager._half, stager._used) == (0, 100)
    stager._swap()
    assert (stager._half, stager._used) == (1, 0)


@pytest.mark.parametrize("counted", [4, 5])
def test_times_stay_with_their_runs_after_an_interrupt(counted):
    """Whether the device has counted the run that was interrupted, or not."""
    from graphllm.backends.cuda.runtime.segment import TimedSequence

    timed = TimedSequence.__new__(TimedSequence)
    timed._read, timed._runs = 2, 4
    timed._count = np.array([counted], np.int64).view(np.uint8)
    timed.sequence = Interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        timed._run()
    assert timed._read == timed._runs == counted
    timed._run()
    assert timed._runs == counted + 1


def test_a_closed_device_is_not_kept(monkeypatch):
    from weakref import ref

    from graphllm.backends.cuda.runtime import cublaslt

    class Device:
        pass

    monkeypatch.setattr(cublaslt, "CublasLt", lambda device: SimpleNamespace())
    device = Device()
    assert cublaslt.instance(device) is cublaslt.instance(device)
    gone = ref(device)
    del device
    assert gone() is None
