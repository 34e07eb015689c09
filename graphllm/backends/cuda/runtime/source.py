"""CUDA C++ sources of `kernels/`, compiled by NVRTC and cached on disk as machine code.

    MODULE = module("elementwise")              # elementwise.cu, after common.cuh
    Launch(MODULE["add"], grid, block, args)    # compiled when a device first builds it

A module is one .cu file with one set of macros. It compiles without a GPU or a driver. Sources
include only the headers (.cuh) of their directory and none of the CUDA toolkit, which compiles
faster and needs no include path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ....cache import CacheFile
from ....debug import debug
from ....errors import GraphllmError

SOURCES = Path(__file__).parents[1] / "kernels"
_OPTIONS = ("-std=c++17", "--ptxas-options=-v")


@dataclass(frozen=True)
class Module:
    """One .cu file with values for its macros."""

    file: str
    defines: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> Function:
        """The kernel ``name``, which the file declares as `extern "C"`."""
        return Function(self, name)

    @property
    def text(self) -> str:
        """The source, without the headers."""
        macros = "".join(f"#define {name} {value}\n" for name, value in self.defines)
        own = (SOURCES / self.file).read_text("utf-8")
        return f'{macros}#include "common.cuh"\n#line 1 "{self.file}"\n{own}'

    def __str__(self) -> str:
        return " ".join([self.file, *(f"{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True)
class Function:
    """A kernel of a module."""

    module: Module
    name: str


MODULES: dict[Module, None] = {}  # all modules of this backend's kernels, in order


def module(family: str, **defines: object) -> Module:
    """The module of ``family``.cu with these macros; it is added to `MODULES`."""
    made = Module(f"{family}.cu", tuple((name, str(value)) for name, value in defines.items()))
    return MODULES.setdefault(made) or made


SUPPORT = module("support")  # the kernels of the runtime


def timed_build(made: Module) -> Module:
    """The module's build for timed runs; see common.cuh."""
    return Module(made.file, (*made.defines, ("TIMED_BUILD", "1")))


def block_timed_build(made: Module) -> Module:
    """The timed build whose thread blocks record their times, too."""
    return Module(made.file, (*timed_build(made).defines, ("BLOCK_TIMES", "1")))


@dataclass(frozen=True)
class Image:
    """Machine code (PTX for a device newer than the compiler) and the assembler's report."""

    code: bytes
    log: str


def target(capability: tuple[int, int]) -> str:
    """NVRTC's architecture for a device, with its specific features: ``sm_90a``."""
    from cupy_backends.cuda.libs import nvrtc

    number = capability[0] * 10 + capability[1]
    known = nvrtc.getSupportedArchs()
    if number not in known:
        return f"compute_{max(n for n in known if n <= number)}"
    return f"sm_{number}a" if capability == (9, 0) else f"sm_{number}"


@cache
def _headers() -> dict[str, str]:
    """Text of all headers by file name."""
    return {path.name: path.read_text("utf-8") for path in sorted(SOURCES.glob("*.cuh"))}


@cache
def _compiler() -> str:
    """NVRTC's version. Importing CuPy makes its library path known."""
    import cupy  # noqa: F401
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def compile_module(made: Module, arch: str) -> Image:
    """Compile for ``arch`` without the disk cache.

    Raises:
        GraphllmError: the source has errors; the message is the compiler's log.
    """
    version = _compiler()
    from cupy_backends.cuda.libs import nvrtc

    headers = [(text.encode(), name.encode()) for name, text in _headers().items()]
    program = nvrtc.createProgram(made.text, made.file, *zip(*headers))
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *_OPTIONS))
        read = nvrtc.getPTX if arch.startswith("compute") else nvrtc.getCUBIN
        code = read(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise GraphllmError(f"NVRTC {version}: {made} for {arch}: {error}\n{log}") from None
    log = nvrtc.getProgramLog(program)
    nvrtc.destroyProgram(program)
    return Image(code if isinstance(code, bytes) else code.encode("latin-1"), log)


def load_or_compile(made: Module, arch: str) -> bytes:
    """The module's code for ``arch``, from the disk cache or compiled and stored there."""
    file, key = _cache_file(made, arch)
    return file.load(key) or recompile(made, arch)


def recompile(made: Module, arch: str) -> bytes:
    """The module's code for ``arch``, compiled now; it replaces a cached file."""
    debug(1, f"compiling {made} for {arch}")
    code = compile_module(made, arch).code
    file, key = _cache_file(made, arch)
    file.save(key, code)
    return code


def load_or_compile_all(modules: Sequence[Module], arch: str) -> Iterator[bytes]:
    """`load_or_compile` of each module, in order, on all cores."""
    with ThreadPoolExecutor(min(len(modules), os.cpu_count() or 1) or 1) as pool:
        yield from pool.map(lambda made: load_or_compile(made, arch), modules)


def is_cached(made: Module, arch: str) -> bool:
    """Whether the disk cache has the module's code."""
    return _cache_file(made, arch)[0].size() is not None


def _cache_file(made: Module, arch: str) -> tuple[CacheFile, bytes]:
    """The cache file of the module's code, and its key: everything that the code depends on."""
    parts = [made.text, *_headers().values(), arch, *_OPTIONS, _compiler()]
    key = "\0".join(parts).encode()
    return CacheFile("cuda", f"{hashlib.sha256(b'2' + key).hexdigest()[:32]}.bin"), key


def resource_usage(log: str) -> Mapping[str, tuple[int, int]]:
    """(registers, bytes of local memory) of each kernel in the assembler's report."""
    found: dict[str, tuple[int, int]] = {}
    name, local = "", 0
    for line in log.splitlines():
        words = line.replace(",", "").split()
        if "Compiling" in words and "entry" in words:
            name = line.split("'")[1]
        elif "Used" in words and "registers" in words:
            found[name] = (int(words[words.index("registers") - 1]), local)
        elif "stack" in words:
            numbers = [int(w) for w in words if w.isdigit()]
            local = sum(numbers)
    return found
