"""Compiled kernels on disk.

Numba's own cache returns stale code after an edit in a file that a kernel calls into, and never
hits for a closure over an intrinsic. Here the folder's name is a hash of everything that code can
depend on (all sources of this directory, the compiler's version, the target), so that within a
folder a kernel is known by its name alone; of a kernel from elsewhere the name holds its own code
(`identity.py`).
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

_SOURCES = Path(__file__).resolve().parents[1]


def fingerprint(sources: Path = _SOURCES) -> str:
    """A hash of all kernel sources below ``sources``, of the compiler and of the target."""
    import llvmlite
    import numba

    parts = [numba.__version__, llvmlite.__version__, sys.version, platform.platform(), *target()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _version() -> str:
    return fingerprint()


class DiskCache:
    """The file of one compiled kernel: machine code, and no pickle.

    The file is kept by `graphllm.cache` under the whole name of the kernel and the fingerprint. It
    holds a line of JSON (the library's name, the entry's symbol, bytes of machine code), the
    machine code, and the bitcode that says which symbols it defines.
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
        """(library, address of its entry, machine code), None if the file is missing or cannot be
        used."""
        body = self._file.load(self._key)
        if body is None:
            return None
        try:
            return _loaded(codegen, body)
        except Exception as error:  # Numba and LLVM raise errors of any kind
            self._file.reject(f"it cannot be loaded: {error}")
            return None

    def save(self, library: Any, symbol: str) -> None:
        """Keep a compiled library whose entry is ``symbol``."""
        if library.has_dynamic_globals:  # holds addresses of this process
            return
        name, _, (code, bitcode) = library.serialize_using_object_code()
        line = json.dumps([name, symbol, len(code)]).encode() + b"\n"
        self._file.save(self._key, line + code + bitcode)


def machine_code(library: Any) -> bytes:
    """The object file of a library that was compiled here."""
    _, _, (code, _) = library.serialize_using_object_code()
    return code


def _loaded(codegen: Any, body: bytes) -> tuple[Any, int, bytes]:
    """What `DiskCache.save` wrote, ready to be called. Any exception for something else."""
    line, code = body.split(b"\n", 1)
    name, symbol, size = json.loads(line)
    if not (isinstance(name, str) and isinstance(symbol, str) and 0 < size < len(code)):
        raise ValueError(f"its first line is {line[:80]!r}")
    # LLVM ends the process if this is no ELF file that it can read.
    if not code.startswith(b"\x7fELF"):
        raise ValueError("its code is no ELF file")
    ObjectFileRef.from_data(code[:size]).close()
    library = codegen.unserialize_library((name, "object", (code[:size], code[size:])))
    address = library.get_pointer_to_function(symbol)
    if not address:
        raise ValueError(f"it does not define {symbol}")
    return library, int(address), code[:size]
