"""Disk cache of compiled kernels.

Numba's own cache returns stale code after an edit in a file that a kernel calls into, and never
hits for a closure over an intrinsic. Here the name of the folder is a hash of everything that the
code can depend on (all sources of this backend, the compiler's version, the target), so that within
a folder the name of a kernel identifies it. The name of a kernel defined elsewhere includes a hash
of its code (`kernel_key`).
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite.binding.object_file import ObjectFileRef

from ....cache import CacheFile
from .isa import target

_CPU = Path(__file__).resolve().parents[1]
_SOURCES = (_CPU, _CPU.parents[1] / "formats")  # kernels are made from both


def fingerprint(*folders: Path) -> str:
    """Hash all sources below ``folders``, the compiler's version and the target."""
    import llvmlite
    import numba

    parts = [numba.__version__, llvmlite.__version__, sys.version, platform.platform(), *target()]
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
    a line of JSON (name of the library, symbol of the entry, bytes of machine code), the machine
    code, and the bitcode that lists the symbols it defines.
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

    def load(self, codegen: Any) -> tuple[Any, int, bytes] | None:
        """Return (library, address of its entry, machine code), or None without a usable file."""
        body = self._file.load(self._key)
        if body is None:
            return None
        try:
            return _loaded(codegen, body)
        except Exception as error:  # Numba and LLVM raise exceptions of many types
            self._file.reject(f"it cannot be loaded: {error}")
            return None

    def save(self, library: Any, symbol: str) -> None:
        """Save a compiled library whose entry is ``symbol``."""
        if library.has_dynamic_globals:  # its code contains addresses of this process
            return
        name, _, (code, bitcode) = library.serialize_using_object_code()
        line = json.dumps([name, symbol, len(code)]).encode() + b"\n"
        self._file.save(self._key, line + code + bitcode)


def machine_code(library: Any) -> bytes:
    """Return the object file of a library compiled in this process."""
    _, _, (code, _) = library.serialize_using_object_code()
    return code


def _loaded(codegen: Any, body: bytes) -> tuple[Any, int, bytes]:
    """Load what `DiskCache.save` wrote; raises an exception of any type for other bytes."""
    line, code = body.split(b"\n", 1)
    name, symbol, size = json.loads(line)
    if not (isinstance(name, str) and isinstance(symbol, str) and 0 < size < len(code)):
        raise ValueError(f"its first line is {line[:80]!r}")
    # LLVM aborts the process if this is not a valid ELF file.
    if not code.startswith(b"\x7fELF"):
        raise ValueError("its code is no ELF file")
    ObjectFileRef.from_data(code[:size]).close()
    library = codegen.unserialize_library((name, "object", (code[:size], code[size:])))
    address = library.get_pointer_to_function(symbol)
    if not address:
        raise ValueError(f"it does not define {symbol}")
    return library, int(address), code[:size]
