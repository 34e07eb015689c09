"""Reading of untrusted tokenizer files. Errors are ModelFileErrors that name the file."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import GraphllmError, ModelFileError

LARGEST_ID = 1 << 22  # 16 times the largest known vocabulary
MAX_BYTES = 200_000_000  # ten times the largest known tokenizer
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # a pair, or a lone one
_PIPE_BYTES = 1 << 16  # of standard error that are kept
_stderr_lock = threading.Lock()  # file descriptor 2 belongs to the process


@contextmanager
def wrap_errors(path: Path) -> Iterator[None]:
    """Turn any exception in the block, Rust panics included, into a ModelFileError of the file."""
    try:
        yield
    except GraphllmError:
        raise
    except BaseException as error:
        # A Rust panic is a BaseException, but need not end the program here.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelFileError(f"{path}: {reason[:300]}") from None


@contextmanager
def hold_stderr() -> Iterator[None]:
    """Buffer standard error (descriptor 2) during the block, and drop it if the block raises.

    A Rust panic writes a report there before it becomes an exception. Without an exception the text
    is written when the block ends. Output of other threads is held back as well, so use it only for
    the construction of a tokenizer.
    """
    with _stderr_lock:
        try:
            saved = os.dup(2)
        except OSError:  # it is closed: nothing can appear
            saved = -1
        if saved < 0:
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # drop what does not fit rather than block
        os.set_blocking(reader, False)
        os.dup2(writer, 2)
        text = b""
        try:
            yield
            text = _read(reader)
        finally:
            os.dup2(saved, 2)
            for descriptor in (saved, reader, writer):
                os.close(descriptor)
        if text:
            os.write(2, text)


def _read(reader: int) -> bytes:
    """Read the content of a pipe; empty if there is none."""
    try:
        return os.read(reader, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size > limit:
            size = status.st_size / 1e6
            raise ModelFileError(f"{path}: {size:.0f} MB, more than {limit / 1e6:.0f}")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """Read a UTF-8 file of at most ``limit`` bytes."""
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: byte {error.start} is not valid UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; empty if the file does not exist.

    ModelFileError: it is not valid JSON, or a string has a lone surrogate, which has no UTF-8.
    """
    if not path.exists():
        return {}
    try:
        content = json.loads(text := read_text(path))
        if _SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: holds a {type(content).__name__}, not an object")
    return content
