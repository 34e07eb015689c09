"""CPU backend: SIMD kernels compiled by Numba and run by a thread pool.

``kernels/`` mirrors `graphllm.ops`, one module per op family. ``runtime/`` holds the device
(device.py), the thread pool (thread_pool.py, step_interpreter.py, barriers.py), what kernels are
written with (jit.py, argument_block.py), their compiler (compiler.py, parallel_compiler.py,
lazy_numba.py), cache and loader (kernel_cache.py, machine_code.py), and the roofline probes.
``simd/`` emits vector code.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from .. import Backend, Device, Options, Progress
from ..probe_results import ProbeResults
from . import kernels


def _probe() -> tuple[bool, str]:
    if importlib.util.find_spec("numba") is None:
        return False, "Numba is not installed"
    from .runtime.cores import usable_cores
    from .runtime.isa import amx_note, isa

    if not isa().f16c:
        return False, f"{isa().name} does not convert float16 in hardware"
    cores, refusal = usable_cores(), amx_note()
    note = f"; AMX is off: {refusal}" if refusal else ""
    return True, f"{isa()}, {cores} core{'s' if cores > 1 else ''}{note}"


def _open(options: Options) -> Device:
    from .runtime.device import CpuDevice

    return CpuDevice(options)


def _measure(nbytes: int, show: Progress) -> ProbeResults:
    from .runtime.roofline_probes import measure

    return measure(nbytes, show)


BACKEND: Backend = Backend("cpu", _probe, _open, measure=_measure)

for _module in pkgutil.iter_modules(kernels.__path__):  # importing a module registers its kernels
    importlib.import_module(f"{kernels.__name__}.{_module.name}")

# The function, for users' kernels, under the name of its module.
elementwise = importlib.import_module(f"{kernels.__name__}.elementwise").elementwise

__all__ = ["BACKEND", "elementwise"]
