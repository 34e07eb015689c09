"""Probes of the roofline: bandwidth of memory and caches, and arithmetic throughput.

The thread pool that runs plans runs the probes. `graphllm.profiler.roofline` calls `measure` and
caches its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .... import ops
from ....errors import GraphllmError
from ....graph.tensor import INPUT, WEIGHT, Meta, Tensor
from ... import Bound, Header, Operand, Options, TimestampLog, find
from ...probe_results import ProbeResults
from . import probe_kernels
from .cores import usable_cores
from .device import CpuDevice
from .host_memory import allocate
from .jit import Kernel
from .probe_kernels import CacheArgs, MemoryArgs, MultiplyArgs
from .program import CompiledProgram, Launch
from .step_interpreter import BARRIER

ROUNDS, SECONDS = 5, 0.1  # a probe is repeated at least so often, and at least for so long
_WIDTH = 4096  # columns of the matrix
_UNIT = 4 * _WIDTH * 16  # the size of the buffer is a multiple of it, for all probes
_CACHE_BYTES = 64 << 20  # bytes that a thread reads from a cache in a round
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

Run = Callable[[TimestampLog | None], None]


@dataclass(frozen=True)
class Probe:
    """One measurement.

    Attributes:
        table: table of `ProbeResults` that gets the rate.
        kind: name in the table.
        work: bytes or operations of a run.
        make: builds the program.
    """

    table: str
    kind: str
    work: float
    make: Callable[[], Run]


def probe_program(kernel: Kernel, threads: int, area: np.ndarray, block: Any) -> Run:
    """Build a program of one kernel.

    Args:
        kernel: writes an int64 per thread to the address ``sink`` of its argument block.
        threads: number of threads.
        area: memory that the argument block points into.
        block: argument block of the kernel; its sink is set here.
    """
    sink = np.zeros(threads, np.int64)
    launch = Launch(kernel, block._replace(sink=sink.ctypes.data))
    return CompiledProgram(threads, [[launch]], [BARRIER], (area, sink)).run


def read_probe(area: np.ndarray, threads: int) -> Run:
    """Build a program that reads ``area``."""
    block = MemoryArgs(source=area.ctypes.data, target=0, nbytes=area.nbytes)
    return probe_program(probe_kernels.read, threads, area, block)


def write_probe(area: np.ndarray, threads: int) -> Run:
    """Build a program that fills ``area`` with the float32 1.0, bypassing the caches."""
    block = MemoryArgs(source=0, target=area.ctypes.data, nbytes=area.nbytes)
    return probe_program(probe_kernels.write, threads, area, block)


def copy_probe(area: np.ndarray, threads: int) -> Run:
    """Build a program that copies half of ``area`` to the other half, bypassing the caches."""
    start, half = area.ctypes.data, area.nbytes // 2
    block = MemoryArgs(source=start, target=start + half, nbytes=half)
    return probe_program(probe_kernels.copy, threads, area, block)


def matvec_probe(area: np.ndarray, threads: int) -> Run:
    """Build a program that multiplies a row of activations with ``area`` as float32 weights."""
    options = Options("float", threads)
    device, rows = CpuDevice(options), area.nbytes // (4 * _WIDTH)
    x = Tensor(INPUT, (), {"name": "x"}, Meta.of((1, _WIDTH), "f32"), scopes=("",))
    w = Tensor(WEIGHT, (), {"name": "w"}, Meta.of((rows, _WIDTH), "f32"), scopes=("",))
    node = ops.get("linear")(x, w)
    chosen = find("cpu").select(node, options)
    if isinstance(chosen, str):
        raise GraphllmError(chosen)
    places = [device.alloc(t.meta.nbytes) for t in (x, node)]
    inputs = Operand(x.meta, places[0]), Operand(w.meta, area)
    return device.build([Bound(node, chosen, inputs, Operand(node.meta, places[1]))], Header()).run


MEMORY_PROBES: dict[str, Callable[[np.ndarray, int], Run]] = {
    "read": read_probe,
    "float matrix-vector": matvec_probe,
    "write": write_probe,
    "copy": copy_probe,
}


def cache_sizes(folder: Path = _CACHES) -> dict[str, int]:
    """Bytes of the data caches by name (``L2 2 MB``); empty if Linux does not list them."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for each in sorted(folder.glob("index*")):
            level, kind, size = ((each / n).read_text().strip() for n in ("level", "type", "size"))
            if kind in ("Data", "Unified"):
                kb = int(size.removesuffix("K"))
                shown = f"{kb / 1024:g} MB" if kb >= 1024 else f"{kb} KB"
                found[f"L{level} {shown}"] = kb << 10
    return found


def thread_counts(cores: int) -> Iterator[int]:
    """Thread counts to measure: every count up to 8 cores, else powers of two and all cores."""
    yield from range(1, cores + 1) if cores <= 8 else [2**i for i in range(cores.bit_length())]
    if cores > 8 and cores & (cores - 1):
        yield cores


def _probes(area: np.ndarray, threads: int) -> Iterator[Probe]:
    """Probes of memory, of half of each cache, and of multiply-adds, on ``threads`` threads."""
    for kind, make in MEMORY_PROBES.items():
        yield Probe("memory", kind, area.nbytes, partial(make, area, threads))
    start = area.ctypes.data
    for name, size in cache_sizes().items():
        nbytes = size // 2 // probe_kernels.ITERATION_BYTES * probe_kernels.ITERATION_BYTES
        if (
            nbytes <= area.nbytes // 4
        ):  # otherwise the buffer is too small to tell the cache from memory
            times = max(1, _CACHE_BYTES // nbytes)
            block = CacheArgs(start, nbytes, times)
            make = partial(probe_program, probe_kernels.read_cached, threads, area, block)
            yield Probe("caches", name, nbytes * times * threads, make)
    for kind, loop in probe_kernels.multiply_add_loops().items():
        kernel, operations = probe_kernels.multiply_add(kind)
        make = partial(probe_program, kernel, threads, area, MultiplyArgs(start, loop.iterations))
        yield Probe("peaks", kind, operations * loop.iterations * threads, make)


def measure(nbytes: int, show: Callable[[str, int, int], None]) -> ProbeResults:
    """Measure rates by kind and number of threads, over ``nbytes`` of memory.

    ``show`` is called with the progress: activity, done, total.
    """
    area = allocate(max(1, nbytes // _UNIT) * _UNIT)
    write_probe(area, usable_cores())(None)  # touches all pages; the values serve as weights
    probes = [(n, probe) for n in thread_counts(usable_cores()) for probe in _probes(area, n)]
    found = ProbeResults(how=probe_kernels.instruction_names())
    for done, (threads, probe) in enumerate(probes):
        show("measuring memory, caches and arithmetic", done, len(probes))
        seconds = _seconds(probe.make())
        found.add(getattr(found, probe.table), probe.kind, threads, probe.work, seconds)
    show("measuring memory, caches and arithmetic", len(probes), len(probes))
    return found


def _seconds(run: Run) -> list[float]:
    """Seconds of each of at least `ROUNDS` runs, after a warm-up run."""
    log, found = TimestampLog(), list[float]()
    run(log)
    while len(found) < ROUNDS or sum(found) < SECONDS:
        run(log)
        ends, _ = log.runs[-1]
        found.append(int(ends[-1] - ends[0]) / 1e9)
    return found
