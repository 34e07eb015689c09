"""What the GPU's memory, its second-level cache and its arithmetic give at best here;
`graphllm.profiler.roofline` keeps the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ... import Options
from ...probe_results import ProbeResults
from .. import BACKEND
from .device import CudaDevice
from .source import Function, module
from .work import Arg, Launch

ROUNDS = 20  # that count
_OWN, _TENSOR = module("roofline_probes"), module("roofline_probes_tensor")
_THREADS, _PIECE, _SUMS = 512, 64 << 10, 8  # as in roofline_probes.cu
_TURNS = 4096  # of multiply-adds
_BLOCKS = (1, 2, 4)  # a processor
_CORES = (8, 0)  # the compute capability from which on there is the instruction
_ONE, _BYTES, _HALVES = 0x3F800000, 0x01010101, 0x3C003C00  # 1 as f32, as four i8, as two f16


@dataclass(frozen=True)
class Try:
    """A kernel, its arguments, and its bytes or operations, for a `ProbeResults` table."""

    table: str
    kind: str
    work: float
    function: Function
    args: tuple[Arg, ...]
    each: bool = False  # every block does so much


def _tries(device: CudaDevice, start: int, size: int, sink: int) -> Iterator[Try]:
    """Over two pieces of ``size`` bytes each, one after the other, from ``start`` on."""
    whole, half = 2 * size // 16, size // 16  # in vectors
    yield Try("memory", "read", 2 * size, _OWN["read_all"], (start, whole, sink))
    yield Try("memory", "write", 2 * size, _OWN["write_all"], (start, whole, _ONE))
    yield Try("memory", "copy", 2 * size, _OWN["copy_all"], (start, half, start + size))
    level = _cache(device)
    pieces = min(level // 2, size) // _PIECE
    if pieces:
        name = f"L2 {level / 2**20:g} MB"
        own = _OWN["read_cached"]
        yield Try("caches", name, pieces * _PIECE, own, (start, pieces, sink), True)
    lanes = 2 * _THREADS * _TURNS * _SUMS  # a product and a sum
    yield Try("peaks", "f32", lanes, _OWN["multiply_f32"], (_TURNS, 0.5, 1.0, sink), True)
    yield Try("peaks", "int8", 4 * lanes, _OWN["multiply_int8"], (_TURNS, _BYTES, sink), True)
    if device.gpu.capability >= _CORES:
        work = lanes // 32 * 16 * 8 * 16  # of each warp
        own = _TENSOR["multiply_f16"]
        yield Try("peaks", "f16", work, own, (_TURNS, _HALVES, _HALVES, sink), True)


# cuBLAS multiplies halves by wider instructions than `multiply_f16`, so where its linears are
# faster, their rate is the roof.
_ROOFS = {"float": ("f32", "f16", "float"), "integer": ("int8",)}


def _cache(device: CudaDevice) -> int:
    """Bytes of the second-level cache."""
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, device.gpu.index))


def _how(device: CudaDevice) -> dict[str, str]:
    tensor = "mma m16n8k16 with float32 sums (a library may have wider ones)"
    none = "not by kernels here below compute capability 8.0"
    f16 = tensor if device.gpu.capability >= _CORES else none
    return {"f32": "fused", "f16": f16, "int8": "dp4a"}


def measure(nbytes: int, show: Callable[[str, int, int], None]) -> ProbeResults:
    """Rates by kind and by how many blocks there were a processor; memory over ``nbytes``."""
    device = CudaDevice(Options())
    size = nbytes // 2 // _PIECE * _PIECE
    buffer, sink = device.alloc(2 * size), device.alloc(4)
    tries = list(_tries(device, buffer.address, size, sink.address))
    found = ProbeResults("blocks a processor", how=_how(device), roofs=_ROOFS)
    for done, each in enumerate(tries):
        show("measuring the GPU's memory, cache and arithmetic", done, len(tries))
        for blocks in _BLOCKS:
            grid = blocks * device.gpu.processors
            launch = Launch(each.function, (grid,), (_THREADS,), each.args, early=False)
            seconds = device.gpu.time_runs(device.gpu.prepare(launch), ROUNDS)
            work = each.work * grid if each.each else each.work
            found.add(getattr(found, each.table), each.kind, blocks, work, seconds)
    show("measuring the GPU's memory, cache and arithmetic", len(tries), len(tries))
    return found


BACKEND.measure = measure
