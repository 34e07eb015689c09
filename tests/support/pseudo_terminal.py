"""A program run at a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
from contextlib import suppress


def read_all(ours: int) -> bytes:
    """What is written to the other end, until it is closed."""
    shown = b""
    with suppress(OSError):  # on Linux the end of a terminal is an error
        while more := os.read(ours, 65536):
            shown += more
    return shown


def at_terminal(
    *command: str, typed: bytes | None = None, errors: bool = False, **options
) -> tuple[int, bytes, bytes]:
    """Exit code, what a terminal got from standard output, with newlines as they were written, and
    what a pipe got from standard error. ``errors``: that is the terminal, too."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs,
        stderr=theirs if errors else subprocess.PIPE, **options,
    )  # fmt: skip
    os.close(theirs)
    shown: list[bytes] = []
    reader = threading.Thread(target=lambda: shown.append(read_all(ours)))
    reader.start()
    _, told = process.communicate(typed, timeout=120)
    reader.join()
    os.close(ours)
    return process.returncode, shown[0].replace(b"\r\n", b"\n"), told or b""


def without_progress(told: str) -> str:
    """Standard error less the lines of progress that a busy machine has after 10 seconds."""
    line = r"[a-z][\w ]*: \d+ of \d+(, [\d.]+ tok/s)?|loading the model|prefill|profiling|comparing"
    return re.sub(rf"^({line})\n", "", told, flags=re.MULTILINE)
