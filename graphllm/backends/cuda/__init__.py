"""The CUDA backend: kernels in CUDA C++, compiled by NVRTC, run through CuPy as CUDA graphs.

Only this directory imports CuPy. File names of kernels mirror `graphllm.ops`, each with its .cu
file. source.py: from sources to machine code; device.py: operands, launches, the device; memory.py
and run.py: what touches the GPU, imported when a device is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil

from .. import Backend, Device, Options
from . import kernels

MIN_CAPABILITY = (7, 5)  # the lowest compute capability that the kernels are written for


def _installed() -> bool:
    return importlib.util.find_spec("cupy") is not None


def _wanted() -> bool:
    """Whether somebody installed CuPy, and did not hide all GPUs."""
    return _installed() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _probe() -> tuple[bool, str]:
    """(usable, the GPU's name and capability, or in one line why it is not)."""
    if not _installed():
        return False, 'CuPy is not installed; pip install "graphllm[cuda12]" or "graphllm[cuda13]"'
    from .runtime.detect import probe

    return probe(MIN_CAPABILITY)


def _open(options: Options) -> Device:
    from .runtime.device import CudaDevice

    return CudaDevice(options)


BACKEND = Backend("cuda", _probe, _open, _wanted, "cuda:0")
# Products of many tokens round activations and expanded weights to halves, as tensor cores and the
# library take them.
BACKEND.half_tolerance = {
    **dict.fromkeys(("linear", "linears", "gated", "linear_add"), 6e-3),
    **dict.fromkeys(("expert_linear", "head_linear", "expert_gated", "expert_clamped"), 6e-3),
    **dict.fromkeys(("attention", "attention_quantise"), 2e-3),
}

for _module in pkgutil.iter_modules(kernels.__path__):  # they register their kernels
    importlib.import_module(f"{kernels.__name__}.{_module.name}")
