"""Disk cache of compiled kernels.

Numba's own cache returns stale code after an edit in a file that a kernel calls into, and never
hits for a closure over an intrinsic. Here the name of the folder is a hash of everything that the
code can depend on (all sources of this backend, the compiler's version, the target), so that within
a folder the name of a kernel identifies it. The name of a kernel defined elsewhere includes a hash
of its code (`kernel_key`).
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from functools import cache
from pathlib import Path

from ....cache import CacheFile
from .isa import compiler_version, isa, target
from .machine_code import Function, MachineCode, has_loader

_CPU = Path(__file__).resolve().parents[1]
_SOURCES = (_CPU, _CPU.parents[1] / "formats")  # kernels are made from both


def fingerprint(*folders: Path) -> str:
    """Hash all sources below ``folders``, the compiler's version and the target."""
    versions = [compiler_version("numba"), compiler_version("llvmlite")]
    parts = [*versions, sys.version, platform.platform(), *target()]
    parts.append(str(isa()))  # which says whether AMX may be used
    digest = hashlib.sha256("\0".join(parts).encode())
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(
                str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0"
            )
    return digest.hexdigest()


@cache
def _version() -> str:
    return fingerprint(*_SOURCES)


class DiskCache:
    """Cache file of one compiled kernel: machine code, and no pickle.

    `graphllm.cache` stores the file under the full name of the kernel and the fingerprint. It holds
    a line with the symbol of the entry, and the object file.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _file(self) -> CacheFile:
        label = re.sub(r"[^A-Za-z0-9_.-]+", "_", self._name).strip("_")[:80]
        digest = hashlib.sha256(self._name.encode()).hexdigest()[:16]
        return CacheFile("kernels", _version()[:24], f"{label}-{digest}.bin")

    @property
    def _key(self) -> bytes:
        return f"{_version()}\0{self._name}".encode()

    def load(self) -> tuple[int, list[Function]] | None:
        """Load the kernel. Returns the address of its entry and its functions, or None without a
        usable file."""
        body = self._file.load(self._key)
        if body is None:
            return None
        symbol, _, code = body.partition(b"\n")
        try:
            return load_machine_code(code, symbol.decode())
        except (ValueError, OSError) as error:
            self._file.reject(f"it cannot be loaded: {error}")
            return None

    def save(self, code: bytes, symbol: str) -> None:
        """Save an object file whose entry is ``symbol``."""
        self._file.save(self._key, symbol.encode() + b"\n" + code)


def load_machine_code(code: bytes, symbol: str) -> tuple[int, list[Function]]:
    """Load an object file; return the address of its entry ``symbol`` and its functions.

    Raises ValueError or OSError if it is damaged or cannot be loaded.
    """
    if has_loader():
        loaded = MachineCode(code)
        return loaded.address(symbol), list(loaded.functions())
    from .compiler import load_object

    address = load_object(code, symbol)
    return address, [Function(symbol, address, 0)]
