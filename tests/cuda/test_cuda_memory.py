"""Allocation failures of the driver raise `OutOfMemory`. No GPU is needed: errors are simulated."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from graphllm.backends.cuda.runtime import source
from graphllm.backends.cuda.runtime.work import MOSTLY_SHARED, HostCall, Launch
from graphllm.errors import GraphllmError, OutOfMemory
from graphllm.graph.tensor import Var

pytestmark = pytest.mark.nvrtc
FREE = 5 << 20
KERNEL = source.module("support")["stamp"]
LAUNCH = Launch(KERNEL, (1,), (1,), ())


@pytest.fixture(autouse=True)
def _little(monkeypatch):
    from graphllm.backends.cuda.runtime import memory

    monkeypatch.setattr(memory, "free_bytes", lambda: FREE)


def failing(status: int, driver: bool = False):
    """A function that raises as CuPy does, an error of the runtime or of the driver."""
    from cupy.cuda.runtime import CUDARuntimeError
    from cupy_backends.cuda.api.driver import CUDADriverError

    class OfDriver(CUDADriverError):
        def __init__(self, status):  # else CuPy asks the driver for the text
            self.status = status

    def call(*args):
        raise (OfDriver if driver else CUDARuntimeError)(status)

    return call


def gpu(**more):
    from graphllm.backends.cuda.runtime.launch import Gpu

    made = Gpu.__new__(Gpu)
    made.arch, made._modules, made._functions = "sm_90a", {}, {}
    made.__dict__ |= more
    return made


@pytest.mark.parametrize("driver", [False, True])
def test_other_errors_pass_through(driver):
    from graphllm.backends.cuda.runtime.memory import allocating

    with pytest.raises(RuntimeError) as caught, allocating("a thing"):
        failing(1, driver)()
    assert caught.value.status == 1


def test_out_of_memory_for_kernels(monkeypatch):
    from graphllm.backends.cuda.runtime import launch

    monkeypatch.setattr(launch, "load_or_compile", lambda made, arch: bytes(30_000_000))
    monkeypatch.setattr(launch, "Loaded", lambda: SimpleNamespace(load=failing(2, driver=True)))
    with pytest.raises(OutOfMemory) as caught:
        gpu().function(KERNEL)
    assert str(caught.value) == (
        "no memory for the kernels of support.cu: 0.03 GB are needed in the GPU, 0.01 GB are free; "
        "other programs may hold some"
    )
    loaded = SimpleNamespace(get_function=failing(2, driver=True))
    with pytest.raises(OutOfMemory, match=r"kernel stamp of support\.cu: more is"):
        gpu(_modules={(KERNEL.module, False): loaded}).function(KERNEL)


def test_launches_with_most_shared_memory_have_their_own_function(monkeypatch):
    """The share is an attribute of the function, and plans with and without rings differ in it."""
    from graphllm.backends.cuda.runtime import launch

    monkeypatch.setattr(launch, "load_or_compile", lambda made, arch: b"")
    monkeypatch.setattr(
        launch, "Loaded",
        lambda: SimpleNamespace(load=lambda code: None, get_function=lambda name: object()),
    )  # fmt: skip
    own = gpu()
    assert own.function(KERNEL) is own.function(KERNEL)
    assert own.function(KERNEL, mostly_shared=True) is own.function(KERNEL, mostly_shared=True)
    assert own.function(KERNEL, mostly_shared=True) is not own.function(KERNEL)


def test_a_plan_loads_the_instances_that_it_launches_alone():
    from graphllm.backends.cuda.runtime.device import CudaDevice

    loaded, device = [], CudaDevice.__new__(CudaDevice)
    device.gpu = SimpleNamespace(
        arch="sm_90a",
        is_loaded=lambda *instance: instance in loaded,
        is_cached=lambda made: True,
        load=lambda *instance: loaded.append(instance),
    )
    ring = replace(LAUNCH, shared_percent=MOSTLY_SHARED)
    device._load([ring, ring])
    assert loaded == [(KERNEL.module, True)]
    device._load([LAUNCH, ring])
    assert loaded == [(KERNEL.module, True), (KERNEL.module, False)]


@pytest.mark.parametrize("fails", ["end_capture", "upload"])
def test_out_of_memory_for_a_graph(fails):
    """The first run launched the kernels; a later run tries to capture again."""
    from graphllm.backends.cuda.runtime.segment import LaunchSequence

    calls = {name: lambda *args: None for name in ("begin_capture", "end_capture", "upload")}
    graph = SimpleNamespace(upload=calls["upload"], launch=lambda stream: made.append("graph"))
    stream = SimpleNamespace(begin_capture=calls["begin_capture"], end_capture=lambda: graph)
    setattr(graph if fails == "upload" else stream, fails, failing(2))
    made = []
    held = gpu(stream=stream, prepare=lambda launch: lambda: made.append(launch))
    sequence = LaunchSequence(held, [LAUNCH, LAUNCH], int)
    sequence()
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="a CUDA graph of 2 launches: more is needed in the"):
            sequence()
    setattr(graph if fails == "upload" else stream, fails, lambda *args: graph)
    made.clear()
    sequence()
    first = replace(LAUNCH, programmatic=False)  # its inputs must be complete
    assert made == [first, LAUNCH, "graph"] and sequence.replayed


def test_graphs_of_library_calls_are_bounded():
    """Each number of rows has a graph of its own; the graphs used least recently are dropped."""
    from graphllm.backends.cuda.runtime import segment

    made, alive = [], set()

    class Graph:
        def __init__(self) -> None:
            self.rows = rows
            alive.add(self.rows)

        def upload(self, stream) -> None:
            pass

        def launch(self, stream) -> None:
            made.append(("graph", self.rows))

        def __del__(self) -> None:
            alive.discard(self.rows)

    stream = SimpleNamespace(begin_capture=lambda: None, end_capture=Graph)
    held = gpu(stream=stream, prepare=lambda launch: lambda: None)
    product = HostCall(lambda: made.append(("call", rows)), Var("T", 1, 600))
    copy = HostCall(lambda: made.append("copy"))
    sequence = segment.LaunchSequence(held, [LAUNCH, product, LAUNCH, copy], lambda dim: rows)
    for rows in range(600, 600 - segment.MAX_GRAPHS - 1, -1):
        for _ in range(segment.RUNS_BEFORE_CAPTURE):
            sequence()
            assert made[-2:] == [("call", rows), "copy"] and not sequence.replayed
        for _ in range(3):
            sequence()
            assert made[-2:] == [("graph", rows), "copy"] and sequence.submissions == 2
    assert alive == set(range(rows, rows + segment.MAX_GRAPHS))
    rows = 600
    sequence()
    assert made[-2:] == [("call", rows), "copy"] and sequence.submissions == 4


def test_out_of_memory_for_a_launch():
    from graphllm.backends.cuda.runtime.launch import PreparedLaunch

    def prepared(status):
        held = gpu(capability=(9, 0), stream=SimpleNamespace(ptr=0))
        held.library = SimpleNamespace(cuLaunchKernelEx=lambda *args: status)
        return PreparedLaunch(LAUNCH, 0, held)

    with pytest.raises(OutOfMemory, match=r"the launch of stamp <<<\(1,\), \(1,\), 0>>>: more is"):
        prepared(2)()
    with pytest.raises(GraphllmError, match="CUDA error 1 at the launch of stamp"):
        prepared(1)()
