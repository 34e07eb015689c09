"""Detection of a usable GPU."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


@cache
def probe(least: tuple[int, int]) -> tuple[bool, str]:
    """(usable, description or reason). CuPy must be installed.

    Args:
        least: lowest compute capability that is supported.
    """
    if not _driver_is_installed():
        return False, "no NVIDIA driver is installed"
    try:
        import cupy
        from cupy.cuda import runtime
    except Exception as error:  # a broken installation may raise anything
        return False, f"CuPy cannot be imported: {str(error).strip().splitlines()[0]}"
    try:
        version, own = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except Exception as error:  # the runtime library is missing
        return False, f"CuPy {cupy.__version__} finds no CUDA runtime: {_first(error)}"
    if version == 0:
        return False, "no NVIDIA driver is installed"
    if version // 1000 < own // 1000:
        return False, f"the driver knows CUDA {_dotted(version)}, CuPy needs {own // 1000}.0"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return False, f"no usable GPU: {_first(error)}"
    if count == 0:
        return False, "no GPU is visible"
    return _describe(least, version)


def _driver_is_installed() -> bool:
    """Whether the driver's library can be loaded: found out without importing CuPy, which takes
    0.2 s."""
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def _describe(least: tuple[int, int], version: int) -> tuple[bool, str]:
    """(usable, description or reason) of the first GPU."""
    import cupy
    from cupy.cuda import runtime
    from cupy_backends.cuda.libs import nvrtc

    found = runtime.getDeviceProperties(0)
    capability = (int(found["major"]), int(found["minor"]))
    name = found["name"].decode()
    shown = ".".join(map(str, capability))
    if capability < least:
        return False, f"{name} has compute capability {shown}, below {'.'.join(map(str, least))}"
    try:
        compiler = ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # CuPy without its extra [ctk] includes no compiler
        return False, f"NVRTC is not installed ({_first(error)}): CuPy's extra [ctk] includes it"
    memory = found["totalGlobalMem"] / 1e9
    return True, (
        f"{name}, {memory:.0f} GB, compute capability {shown}, driver for CUDA {_dotted(version)}, "
        f"NVRTC {compiler}, CuPy {cupy.__version__}"
    )


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _dotted(version: int) -> str:
    """12090 -> 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"
