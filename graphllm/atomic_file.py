"""Files that get their name when they are complete."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .errors import RequestError

_NAME = 200  # bytes of a file's name that the name of its temporary file repeats


class AtomicFile:
    """A file that is written under a hidden name beside its own; a context manager.

    At the end of the block it is flushed to the disk and gets its name; after an error it is
    removed, and an existing file stays as it was. A symbolic link stays one.

    Args:
        path: the file.
        replace: whether an existing file may be replaced.

    Raises:
        RequestError: the file exists and may not be replaced, or is no regular file.
        OSError: it cannot be written; ``filename`` is ``path``.
    """

    def __init__(self, path: Path, replace: bool) -> None:
        check_output(path, replace)
        self.path, self._replace = path, replace
        self._target = path.resolve()
        hidden = f".{self._target.name[:_NAME]}.{secrets.token_hex(4)}.part"
        self._part = self._target.with_name(hidden)
        self._file: BinaryIO
        self.nbytes = 0  # written so far

    def __enter__(self) -> AtomicFile:
        try:
            self._file = self._part.open("xb")
        except OSError as error:
            raise self._named(error) from None
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. OSError: the disk is full, for example."""
        try:
            self.nbytes += self._file.write(data)
        except OSError as error:
            raise self._named(error) from None

    def __exit__(self, kind: object, *failure: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._publish()
        except OSError as error:
            raise self._named(error) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Close and remove the temporary file."""
        with suppress(OSError):  # closing flushes, which fails on a full disk
            self._file.close()
        with suppress(OSError):
            self._part.unlink()

    def _publish(self) -> None:
        """Give the file its name, which it must not take from another file unless it may."""
        if self._replace:
            os.replace(self._part, self._target)
        else:
            try:
                os.link(self._part, self._target)
            except OSError:  # a file that appeared meanwhile, or a file system without links
                check_output(self.path, replace=False)
                os.replace(self._part, self._target)
        with suppress(OSError):  # some file systems do not support this
            folder = os.open(self._target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def check_output(path: Path, replace: bool) -> None:
    """Raise RequestError unless ``path`` is free, or a regular file that may be replaced."""
    if path.is_dir():
        raise RequestError(f"{path}: is a directory")
    if path.exists():
        if not path.is_file():  # a device, for example
            raise RequestError(f"{path}: is no regular file")
        if not replace:
            raise RequestError(f"{path}: exists already", "force")


__all__ = ["AtomicFile", "check_output"]
