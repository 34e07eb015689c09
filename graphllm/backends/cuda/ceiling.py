"""What the GPU's memory gives at best here; `graphllm.profiler.ceilings` keeps the answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import Options
from . import BACKEND
from .device import CudaDevice, Launch
from .source import module

ROUNDS = 20  # of which the fastest counts
_SUPPORT = module("support")
_THREADS, _PIECE = 512, 64 << 10  # of a block: threads, and bytes that it takes at a time
_BLOCKS = (1, 2, 4)  # a processor; the best of them counts


def measure(nbytes: int, show: Callable[[str, int, int], None]) -> dict[str, dict[int, float]]:
    """Bytes a second of reading ``nbytes``, and of copying half of them to the other half (bytes
    read and written both counted), by what was run and how many blocks there were a processor."""
    device = CudaDevice(Options())
    size = nbytes // 2 // _PIECE * _PIECE
    buffer, sink = device.alloc(2 * size), device.alloc(4)
    kinds = {
        "read": ("read_all", 2 * size // 16, sink.address),
        "copy": ("copy_all", size // 16, buffer.address + size),
    }
    rates: dict[str, dict[int, float]] = {}
    for done, (kind, (name, count, last)) in enumerate(kinds.items()):
        show("measuring GPU memory", done, len(kinds))
        rates[kind] = {}
        for blocks in _BLOCKS:
            grid = (blocks * device.gpu.processors,)
            args = (buffer.address, count, last)
            launch = Launch(_SUPPORT[name], grid, (_THREADS,), args, early=False)
            seconds = device.gpu.seconds(device.gpu.prepared(launch), ROUNDS)
            rates[kind][blocks] = 2 * size / float(np.min(seconds))
    show("measuring GPU memory", len(kinds), len(kinds))
    return rates


BACKEND.measure = measure
