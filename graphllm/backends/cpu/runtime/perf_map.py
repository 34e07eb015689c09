"""Symbols of compiled kernels for Linux `perf`, which cannot find names of code made in memory.

With ``GRAPHLLM_PERF_MAP=1`` every kernel that is compiled or loaded adds its functions to
``/tmp/perf-PID.map``, one line each: address and size in hexadecimal, and a name. `perf report`
reads this file (Linux, tools/perf/Documentation/jit-interface.txt); Python adds its own functions
to it with ``-X perf``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ....errors import RequestError
from .machine_code import Function

FOLDER = Path("/tmp")  # the only place where perf looks


def add_symbols(name: str, functions: Sequence[Function]) -> None:
    """Add the functions of a kernel to the map, all under the kernel's name.

    Raises RequestError if the map cannot be written.
    """
    lines = [f"{each.address:x} {each.nbytes:x} {name}\n" for each in functions]
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
