"""Compiled kernels on disk.

Numba's own cache returns stale code after an edit in a file that a kernel calls into, and never
hits for a closure over an intrinsic. Here the folder's name is a hash of everything that code can
depend on (all sources of this directory, the compiler's version, the target), so that within a
folder a kernel is known by its name alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ...paths import cache_dir
from .isa import target

_SOURCES = Path(__file__).resolve().parent
_FORMAT = b"graphllm kernel 1\n"


def fingerprint(sources: Path = _SOURCES) -> str:
    """A hash of all kernel sources below ``sources``, of the compiler and of the target."""
    import llvmlite
    import numba

    parts = [numba.__version__, llvmlite.__version__, sys.version, platform.platform(), *target()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted(sources.rglob("*.py")):
        digest.update(str(path.relative_to(sources)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def foreign(function: Callable[..., Any]) -> str:
    """A hash of the source file of a kernel from elsewhere, which the folder does not know of."""
    path = Path(function.__code__.co_filename)
    if path.resolve().is_relative_to(_SOURCES) or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def folder() -> Path:
    """Where this version's kernels are kept. It may not exist."""
    return cache_dir() / "kernels" / fingerprint()


@cache
def _warn(reason: str) -> None:
    print(f"graphllm: kernels are not cached: {reason}", file=sys.stderr)


class DiskCache:
    """The file of one compiled kernel: machine code under a checksum, and no pickle.

    After a line that names the format come the SHA-256 of the rest, a line of JSON (the library's
    name, the entry's symbol, bytes of machine code), the machine code, and the bitcode that says
    which symbols it defines.
    """

    def __init__(self, name: str) -> None:
        label = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_")[:80]
        self._file = f"{label}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.bin"

    @property
    def path(self) -> Path:
        return folder() / self._file

    def load(self, codegen: Any) -> tuple[Any, str] | None:
        """(library, symbol of its entry), None where there is no sound file."""
        try:
            data = self.path.read_bytes()
        except OSError:  # not there; whether it can be written is seen when it is
            return None
        start = len(_FORMAT) + 32
        body = data[start:]
        if data[:start] != _FORMAT + hashlib.sha256(body).digest():
            _warn(f"{self.path} is damaged, and is made again")
            return None
        line, code = body.split(b"\n", 1)
        name, symbol, size = json.loads(line)
        stored = (name, "object", (code[:size], code[size:]))
        return codegen.unserialize_library(stored), symbol

    def save(self, library: Any, symbol: str) -> None:
        """Keep a compiled library whose entry is ``symbol``; a line of warning where that fails."""
        if library.has_dynamic_globals:  # holds addresses of this process
            return
        name, _, (code, bitcode) = library.serialize_using_object_code()
        line = json.dumps([name, symbol, len(code)]).encode() + b"\n"
        body, temporary = line + code + bitcode, ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(_FORMAT + hashlib.sha256(body).digest() + body)
            os.replace(temporary, self.path)
        except OSError as error:
            _warn(f"{self.path.parent}: {error.strerror}")
            if temporary:
                Path(temporary).unlink(missing_ok=True)
