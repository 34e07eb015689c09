"""Instruction sets of the processor that kernels are compiled for."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ....cache import CacheFile

_CHANGING_FIELDS = (b"processor", b"cpu MHz", b"core id", b"apicid", b"initial apicid", b"bogomips")

CPU_NAME, CPU_FEATURES = "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"


@dataclass(frozen=True)
class ISA:
    """Instruction sets of the target."""

    name: str
    x86: bool
    avx2: bool  # with FMA
    avx512: bool  # F, BW, VL and DQ
    vnni: bool  # AVX512-VNNI, or AVX-VNNI without AVX-512
    f16c: bool  # float16 conversion in hardware; LLVM's software fallback cannot be linked here
    width: int  # bytes of the widest vectors worth using
    fp16: bool = False  # arithmetic on float16 vectors
    avx_vnni: bool = False  # VNNI on vectors of 32 bytes
    neon: bool = False  # 64-bit Arm
    dotprod: bool = False  # Arm's dot products of bytes
    amx: bool = False  # AMX-INT8, beside AVX512-VNNI; see `amx_note`

    @property
    def lanes(self) -> int:
        """Number of float32 elements in a vector."""
        return self.width // 4

    def __str__(self) -> str:
        vnni = "vnni" if self.avx512 else "avx-vnni"
        has = {
            "avx2": self.avx2, "avx512": self.avx512, vnni: self.vnni, "amx-int8": self.amx,
            "f16c": self.f16c and self.x86, "neon": self.neon, "dotprod": self.dotprod,
        }  # fmt: skip
        flags = [name for name, there in has.items() if there]
        return f"{self.name} ({', '.join(flags) or 'baseline'}, {self.width * 8}-bit vectors)"


@cache
def target() -> tuple[str, str]:
    """Return the CPU name and the feature string that Numba compiles for.

    As in Numba, NUMBA_CPU_NAME alone changes the name but not the features (except "generic", which
    has none); NUMBA_CPU_FEATURES replaces the host's features, and may be empty.
    """
    name = os.environ.get(CPU_NAME) or _host()[0]
    features = os.environ.get(CPU_FEATURES, "" if name.lower() == "generic" else None)
    return name, _host()[1] if features is None else features


@cache
def compiler_version(package: str) -> str:
    """What identifies the version of an installed package, without importing it; "" if it is not
    installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).with_name("_version.py")
    if file.exists():
        return file.read_text()
    from importlib import metadata  # takes 25 ms to import

    return metadata.version(package)


@cache
def _host() -> tuple[str, str]:
    """Name and features of this processor as LLVM knows it.

    They are kept in the cache directory under a hash of the system's description of the processor,
    as importing LLVM takes a tenth of a second.
    """
    try:
        with open("/proc/cpuinfo", "rb") as system:
            about = system.read(1 << 13).partition(b"\n\n")[0]  # of the first core
    except OSError:
        about = b""
    lines = [line for line in about.splitlines() if not line.startswith(_CHANGING_FIELDS)]
    key = b"\n".join([compiler_version("llvmlite").encode(), *lines])
    file = CacheFile("processors", f"{hashlib.sha256(key).hexdigest()[:24]}.json")
    body = file.load(key) if about else None
    if body is None:
        from llvmlite import binding

        found = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        if about:
            file.save(key, json.dumps(found).encode())
        return found
    name, features = json.loads(body)
    return name, features


# Features that a CPU name implies if NUMBA_CPU_FEATURES is empty.
_F16C = ("ivybridge",)
_AVX2 = ("haswell", "broadwell", "skylake", "znver1", "znver2", "znver3", "x86-64-v3")
_AVX_VNNI = ("alderlake", "raptorlake", "meteorlake", "sierraforest")
_AVX512 = ("skylake-avx512", "x86-64-v4")
_VNNI = ("cascadelake", "icelake-server", "znver4", "znver5")
_AMX = ("sapphirerapids", "emeraldrapids", "graniterapids")
_DOTPROD = ("cortex-a76", "neoverse-n1", "neoverse-n2", "neoverse-v1", "neoverse-v2", "apple-m1")
_AVX2_SET = {"avx2", "fma", "f16c"}
_AVX512_SET = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AMX_SET = {"amx-tile", "amx-int8"}
_X86 = ("x86_64", "amd64", "i686")


def _implied(name: str) -> set[str]:
    if name in _VNNI:
        return _AVX2_SET | _AVX512_SET | {"avx512vnni"}
    if name in _AMX:
        return _AVX2_SET | _AVX512_SET | {"avx512vnni"} | _AMX_SET
    if name in _AVX512:
        return _AVX2_SET | _AVX512_SET
    if name in _AVX_VNNI:
        return _AVX2_SET | {"avxvnni"}
    return _AVX2_SET if name in _AVX2 else {"f16c"} if name in _F16C else set()


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def _amx_refusal() -> str:
    """Request permission to use tile registers for all threads of this process, once.

    Returns why there is none, else "". Linux enlarges signal frames for processes that ask (since
    5.16; Documentation/arch/x86/xstate.rst).
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "permission to use it is only requested on 64-bit Linux"
    library = ctypes.CDLL(None, use_errno=True)
    words = map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    if library.syscall(*words) == 0:
        return ""
    return f"the operating system refuses it ({os.strerror(ctypes.get_errno())})"


def amx_note() -> str:
    """Why a target that has AMX does not use it; "" if it does or has none."""
    return _amx_refusal() if _features() >= _AMX_SET and not isa().amx else ""


def _features() -> set[str]:
    """Features of the target."""
    name, features = target()
    flags, x86 = features.split(","), platform.machine().lower() in _X86
    on = {f[1:] for f in flags if f.startswith("+")} | (_implied(name) if x86 else set())
    return on - {f[1:] for f in flags if f.startswith("-")}


@cache
def isa() -> ISA:
    """Instruction sets of the target: the host's unless Numba's variables name another CPU."""
    name, machine, on = target()[0], platform.machine().lower(), _features()
    x86, neon = machine in _X86, machine in ("aarch64", "arm64")
    avx2 = x86 and {"avx2", "fma"} <= on
    avx512 = avx2 and on >= _AVX512_SET
    width = 64 if avx512 else 32 if avx2 else 16
    avx_vnni = avx2 and "avxvnni" in on
    vnni = "avx512vnni" in on if avx512 else avx_vnni
    amx = avx512 and vnni and on >= _AMX_SET and not _amx_refusal()
    return ISA(
        name, x86, avx2, avx512, vnni, "f16c" in on or not x86, width,
        fp16=(avx512 and "avx512fp16" in on) or (not x86 and "fullfp16" in on), avx_vnni=avx_vnni,
        neon=neon, dotprod=neon and ("dotprod" in on or name in _DOTPROD), amx=amx,
    )  # fmt: skip
