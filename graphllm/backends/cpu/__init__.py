"""The CPU backend: SIMD kernels compiled by Numba, run by a team of threads.

File names of kernels mirror `graphllm.ops`. jit.py: what kernels are written with; team.py and
walk.py: the threads; device.py: operands and programs; isa.py: what the processor can do.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from .. import Backend, Device, Options
from . import kernels


def _probe() -> tuple[bool, str]:
    if importlib.util.find_spec("numba") is None:
        return False, "Numba is not installed"
    from .runtime.isa import isa, usable_cores

    if not isa().f16c:
        return False, f"{isa().name} does not convert float16 in hardware"
    cores = usable_cores()
    return True, f"{isa()}, {cores} core{'s' if cores > 1 else ''}"


def _open(options: Options) -> Device:
    from .runtime.device import CpuDevice

    return CpuDevice(options)


BACKEND: Backend = Backend("cpu", _probe, _open)

for _module in pkgutil.iter_modules(kernels.__path__):  # they register their kernels
    importlib.import_module(f"{kernels.__name__}.{_module.name}")

from .kernels.elementwise import elementwise  # noqa: E402  (the function, in place of its module)

__all__ = ["BACKEND", "elementwise"]
