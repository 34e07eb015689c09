"""Compilation of several kernels at once, in forked processes.

Numba holds a lock while it compiles, so threads would gain nothing. A child compiles kernels into
the disk cache, from which the parent loads them; what a child could not compile the parent does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from .jit import Kernel, compiler_locks, prepare_compiler

_CHILD_TIMEOUT_S = 120.0  # a child that waits longer for a lock of another thread is ended
_POLL_S = 0.005
_MAX_PROCESSES = 8  # processes; more of them gain little, and each takes 100 MB


def compile_kernels(
    kernels: Sequence[Kernel], processes: int, show: Callable[[int, int], None]
) -> None:
    """Compile kernels that are in no cache, with up to ``processes`` processes.

    ``show`` is called with (kernels done, all kernels).
    """
    processes = min(processes, len(kernels), _MAX_PROCESSES)
    if processes > 1 and sys.platform == "linux":
        prepare_compiler()  # once, before there are several processes
        _compile_in_processes(kernels[:256], processes, show)
    for done, kernel in enumerate(kernels):
        if not kernel.compiled and not kernel.load():
            show(done, len(kernels))
            kernel.compile()
    show(len(kernels), len(kernels))


def _compile_in_processes(
    kernels: Sequence[Kernel], processes: int, show: Callable[[int, int], None]
) -> None:
    """Compile kernels in this process and its children; each takes the next from a pipe."""
    reader, writer = os.pipe()
    os.write(writer, bytes(range(len(kernels))))
    os.close(writer)
    children: list[int] = []
    try:
        for _ in range(processes - 1):
            children.append(_fork(kernels, reader))
        for number in _numbers(reader):
            show(number, len(kernels))
            kernels[number].compile()
        deadline = time.monotonic() + _CHILD_TIMEOUT_S
        while children and time.monotonic() < deadline:
            children = [pid for pid in children if not _ended(pid, os.WNOHANG)]
            time.sleep(_POLL_S)
    finally:
        os.close(reader)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _ended(pid)


def _ended(pid: int, flags: int = 0) -> bool:
    """Wait for a child, or with ``WNOHANG`` ask whether it has ended.

    Its status is lost if the application ignores SIGCHLD or waits for all children itself.
    """
    try:
        return os.waitpid(pid, flags)[0] != 0
    except ChildProcessError:
        return True


def _numbers(reader: int) -> Iterator[int]:
    while taken := os.read(reader, 1):
        yield taken[0]


def _fork(kernels: Sequence[Kernel], reader: int) -> int:
    """Start a child that compiles kernels until there are no more; returns its process id."""
    with compiler_locks(), warnings.catch_warnings():
        # Python 3.12 warns of other threads, whose locks stay locked in the child. Those that it
        # needs belong to this thread now, and so to the child's.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            _compile_and_exit(kernels, reader)
    return pid


def _compile_and_exit(kernels: Sequence[Kernel], reader: int) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in _numbers(reader):
            kernels[number].compile()
    finally:
        os._exit(0)
