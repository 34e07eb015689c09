"""Measured ceilings of a GPU: memory and L2 bandwidth, and arithmetic throughput.

`graphllm.profiler.roofline` stores the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ... import Options
from ...probe_results import ProbeResults
from .device import CudaDevice
from .source import Function, module
from .work import Arg, Launch

ROUNDS = 20  # timed runs of each probe
_MODULE, _TENSOR_MODULE = module("roofline_probes"), module("roofline_probes_tensor")
_THREADS, _CHUNK, _ACCUMULATORS = 512, 64 << 10, 8  # as in roofline_probes.cu; a chunk in bytes
_ITERATIONS = 4096  # of a loop of multiply-adds
_BLOCKS = (1, 2, 4)  # thread blocks per multiprocessor
_TENSOR_CAPABILITY = (8, 0)  # lowest one with mma m16n8k16
_ONE, _BYTES, _HALVES = 0x3F800000, 0x01010101, 0x3C003C00  # 1 as f32, as four i8, as two f16


@dataclass(frozen=True)
class Probe:
    """A kernel that is timed.

    Attributes:
        table: the table of `ProbeResults` that it belongs to.
        kind: its name in that table.
        work: bytes or operations of the launch, or of one block if ``per_block``.
        function: the kernel.
        args: its arguments.
        per_block: whether every block does ``work``.
    """

    table: str
    kind: str
    work: float
    function: Function
    args: tuple[Arg, ...]
    per_block: bool = False


def _probes(device: CudaDevice, start: int, size: int, sink: int) -> Iterator[Probe]:
    """All probes, over two adjacent buffers of ``size`` bytes each that begin at ``start``."""
    whole, half = 2 * size // 16, size // 16  # in vectors of 16 bytes
    yield Probe("memory", "read", 2 * size, _MODULE["read_all"], (start, whole, sink))
    yield Probe("memory", "write", 2 * size, _MODULE["write_all"], (start, whole, _ONE))
    yield Probe("memory", "copy", 2 * size, _MODULE["copy_all"], (start, half, start + size))
    l2 = _l2_bytes(device)
    chunks = min(l2 // 2, size) // _CHUNK
    if chunks:
        name = f"L2 {l2 / 2**20:g} MB"
        kernel = _MODULE["read_cached"]
        yield Probe("caches", name, chunks * _CHUNK, kernel, (start, chunks, sink), True)
    lanes = 2 * _THREADS * _ITERATIONS * _ACCUMULATORS  # a multiply-add is two operations
    args: tuple[Arg, ...] = (_ITERATIONS, 0.5, 1.0, sink)
    yield Probe("peaks", "f32", lanes, _MODULE["multiply_f32"], args, True)
    args = (_ITERATIONS, _BYTES, sink)
    yield Probe("peaks", "int8", 4 * lanes, _MODULE["multiply_int8"], args, True)
    if device.gpu.capability >= _TENSOR_CAPABILITY:
        work = lanes // 32 * 16 * 8 * 16  # of each warp
        kernel = _TENSOR_MODULE["multiply_f16"]
        yield Probe("peaks", "f16", work, kernel, (_ITERATIONS, _HALVES, _HALVES, sink), True)


# cuBLASLt may use wider instructions than `multiply_f16`, so the measured rate of linears counts as
# a ceiling, too ("float").
_ROOFS = {"float": ("f32", "f16", "float"), "integer": ("int8",)}


def _l2_bytes(device: CudaDevice) -> int:
    """Size of the L2 cache."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, device.gpu.index))


def _instructions(device: CudaDevice) -> dict[str, str]:
    """The instruction that each arithmetic probe measures."""
    tensor = "mma m16n8k16 with float32 sums (a library may have wider ones)"
    none = "not by kernels here below compute capability 8.0"
    f16 = tensor if device.gpu.capability >= _TENSOR_CAPABILITY else none
    return {"f32": "fused", "f16": f16, "int8": "dp4a"}


def measure(nbytes: int, show: Callable[[str, int, int], None]) -> ProbeResults:
    """Rates by kind and by thread blocks per multiprocessor.

    Args:
        nbytes: bytes of memory that the memory probes go over.
        show: reports progress (what, done, total).
    """
    device = CudaDevice(Options())
    size = nbytes // 2 // _CHUNK * _CHUNK
    buffer, sink = device.alloc(2 * size), device.alloc(4)
    probes = list(_probes(device, buffer.address, size, sink.address))
    results = ProbeResults("blocks a processor", how=_instructions(device), roofs=_ROOFS)
    for done, probe in enumerate(probes):
        show("measuring the GPU's memory, cache and arithmetic", done, len(probes))
        for blocks in _BLOCKS:
            grid = blocks * device.gpu.processors
            launch = Launch(probe.function, (grid,), (_THREADS,), probe.args, programmatic=False)
            seconds = device.gpu.time_runs(device.gpu.prepare(launch), ROUNDS)
            work = probe.work * grid if probe.per_block else probe.work
            results.add(getattr(results, probe.table), probe.kind, blocks, work, seconds)
    show("measuring the GPU's memory, cache and arithmetic", len(probes), len(probes))
    return results
