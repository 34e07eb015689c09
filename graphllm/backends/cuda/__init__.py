"""CUDA backend: kernels in CUDA C++, compiled by NVRTC and launched through CuPy as CUDA graphs.

Only this package imports CuPy.

- `kernels/`: one module per op family, named as in `graphllm.ops`, with its .cu sources.
- `runtime/source.py`: compilation and the cache of machine code.
- `runtime/device.py`: the device and kernel contexts; `runtime/work.py`: launches.
- `runtime/dependencies.py`: which operands a kernel may read before its predecessors complete.
- `runtime/segment.py`, `runtime/launch.py`, `runtime/memory.py`, `runtime/staging.py`: CUDA graphs,
  driver calls and transfers; imported when a device is opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from typing import TYPE_CHECKING

from ...errors import PlacementError
from .. import Backend, Device, Options, Progress
from ..probe_results import ProbeResults

if TYPE_CHECKING:
    from .runtime.device import CudaDevice

MIN_CAPABILITY = (7, 5)  # lowest compute capability that the kernels support
_TENSOR_CORES = (8, 0)  # lowest one whose linears of several tokens have one order of sums
_FP8 = (8, 9)  # lowest one that multiplies e4m3


def _installed() -> bool:
    return importlib.util.find_spec("cupy") is not None


def _wanted() -> bool:
    """Whether CuPy is installed and `CUDA_VISIBLE_DEVICES` does not hide all GPUs."""
    return _installed() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _probe() -> tuple[bool, str]:
    """(usable, name and capability of the GPU, or the reason in one line)."""
    if not _installed():
        return False, 'CuPy is not installed; pip install "graphllm[cuda12]" or "graphllm[cuda13]"'
    from .runtime.detect import probe

    return probe(MIN_CAPABILITY)


def _open(options: Options) -> Device:
    from .runtime.device import CudaDevice

    if options.low_mem:
        raise PlacementError(
            'low_mem = True needs device = "cpu": the GPU keeps its weights', "low_mem"
        )
    device = CudaDevice(options)
    if options.deterministic and device.gpu.capability < _TENSOR_CORES:
        what = "deterministic = True"
        raise PlacementError(_too_old(what, _TENSOR_CORES, device), "deterministic")
    if options.prefill == "fp8" and device.gpu.capability < _FP8:
        raise PlacementError(_too_old("prefill = 'fp8'", _FP8, device), "prefill")
    return device


def _too_old(what: str, least: tuple[int, int], device: CudaDevice) -> str:
    own, needed = (".".join(map(str, c)) for c in (device.gpu.capability, least))
    return f"{what} needs compute capability {needed}; the GPU has {own}"


def _measure(nbytes: int, show: Progress) -> ProbeResults:
    from .runtime.roofline_probes import measure

    return measure(nbytes, show)


def _load() -> None:
    """Import the modules of kernels, which register them."""
    from . import kernels
    from .runtime import roofline_probes  # noqa: F401  # has kernels, too

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")


BACKEND = Backend("cuda", _probe, _open, _wanted, "cuda:0", _measure, _load)
BACKEND.block_times = True
# Tensor cores and cuBLASLt multiply f16 or bf16, so products of many tokens round their activations
# and dequantized weights to these types.
BACKEND.half_tolerance = {
    **dict.fromkeys(("linear", "linears", "gated", "linear_add", "linear_quantise"), 6e-3),
    **dict.fromkeys(("linears_quantise", "linear_add_quantise"), 6e-3),
    **dict.fromkeys(("expert_linear", "head_linear", "expert_gated", "expert_clamped"), 6e-3),
    **dict.fromkeys(
        ("attention", "attention_quantise", "rope_attention", "rope_attention_quantise"), 2e-3
    ),
    **dict.fromkeys(("packed_attention", "packed_attention_quantise"), 2e-3),
}
