"""The files of a directory's tokenizer, read with care: nobody vouches for them.

Every error is a ModelFileError that names the file.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import GraphllmError, ModelFileError

LARGEST = 200_000_000  # bytes; the largest of known tokenizers has a tenth
_PIPE = 1 << 16  # bytes that are kept of standard error
_held = threading.Lock()  # descriptor 2 is the process's


@contextmanager
def wrap_errors(path: Path) -> Iterator[None]:
    """Whatever goes wrong inside, a panic of the packages' included, as a line about the file."""
    try:
        yield
    except GraphllmError:
        raise
    except BaseException as error:
        # A panic of Rust code is no Exception, so that it ends the program; here it need not.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelFileError(f"{path}: {reason[:300]}") from None


@contextmanager
def hold_stderr() -> Iterator[None]:
    """Hold back what is written to descriptor 2, and drop it if the block raises.

    A panic of Rust code writes its own report there before it becomes an exception, and may write a
    backtrace. Without an exception the text is written when the block ends. For the construction of
    a tokenizer alone: other threads' texts are held back, too.
    """
    with _held:
        try:
            saved = os.dup(2)
        except OSError:  # it is closed, so that nothing shows
            saved = -1
        if saved < 0:
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)  # what exceeds the pipe is lost, and nobody waits
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
    """What is in a pipe, which may be nothing."""
    try:
        return os.read(reader, _PIPE)
    except BlockingIOError:
        return b""


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The file's bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise ModelFileError(f"{path}: not a regular file")
        if status.st_size > largest:
            size = status.st_size / 1e6
            raise ModelFileError(f"{path}: {size:.0f} MB, more than {largest / 1e6:.0f}")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The file's text."""
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: byte {error.start} is not valid UTF-8") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: holds a {type(content).__name__}, not an object")
    return content
