"""Symbols of compiled kernels for Linux `perf`, which cannot find names of code made in memory.

With ``GRAPHLLM_PERF_MAP=1`` every kernel that is compiled or loaded adds its functions to
``/tmp/perf-PID.map``, one line each: address and size in hexadecimal, and a name. `perf report`
reads this file (Linux, tools/perf/Documentation/jit-interface.txt); Python adds its own functions
to it with ``-X perf``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import RequestError

FOLDER = Path("/tmp")  # the only place where perf looks
_SYMTAB, _FUNCTION, _GLOBAL = 2, 2, 1  # ELF section type, symbol type and symbol binding


class _Function(NamedTuple):
    name: str
    binding: int
    section: int
    offset: int
    nbytes: int


def add_symbols(name: str, library: Any, code: bytes) -> None:
    """Add the functions of a kernel's library to the map.

    Args:
        name: name of the kernel, under which all functions are listed.
        library: Numba's library, which is in memory.
        code: object file of the library.

    Raises:
        RequestError: the map cannot be written, or the object file is not ELF.
    """
    found = list(_functions(code))
    starts = {  # address of each section, from a global function, which can be looked up
        f.section: library.get_pointer_to_function(f.name) - f.offset
        for f in found
        if f.binding == _GLOBAL
    }
    lines = [
        f"{starts[f.section] + f.offset:x} {f.nbytes:x} {name}\n"
        for f in found
        if f.section in starts
    ]
    path = FOLDER / f"perf-{os.getpid()}.map"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, "".join(lines).encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RequestError(f"GRAPHLLM_PERF_MAP: {path}: {error.strerror}") from None


def _functions(code: bytes) -> Iterator[_Function]:
    """Functions that a 64-bit ELF object file defines, from its symbol table."""
    if code[:6] != b"\x7fELF\x02\x01":
        raise RequestError(
            "GRAPHLLM_PERF_MAP: only supported on Linux, where kernels are ELF files"
        )
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    for _, kind, _, _, start, nbytes, link, _, _, entry in sections:
        if kind != _SYMTAB:
            continue
        names = sections[link][4]
        for at in range(start, start + nbytes, entry):
            name, info, _, section, offset, length = struct.unpack_from("<IBBHQQ", code, at)
            if info & 15 == _FUNCTION and section:
                end = code.index(0, names + name)
                text = code[names + name : end].decode()
                yield _Function(text, info >> 4, section, offset, length)
