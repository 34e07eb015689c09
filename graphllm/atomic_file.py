"""Files and directories that get their name when they are complete."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .errors import RequestError

_NAME = 200  # bytes of a file's name that the name of its temporary file repeats
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


class AtomicFile:
    """A file that is written under a hidden name beside its own; a context manager.

    At the end of the block it is flushed to the disk and gets its name; after an error it is
    removed, and an existing file stays as it was. A symbolic link stays one. The file has the
    permissions of the one that it replaces, and its owner and group if the system permits.

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
        self._target = real_path(path)
        self._part = _temporary(self._target)
        self._file: BinaryIO
        self.nbytes = 0  # written so far

    def __enter__(self) -> AtomicFile:
        try:
            self._file = self._create()
        except OSError as error:
            raise self._named(error) from None
        return self

    def _create(self) -> BinaryIO:
        """Create the temporary file with the permissions of the file that it replaces."""
        if not self._target.exists():
            return self._part.open("xb")
        old = self._target.stat()
        # Private until the owner is set: nobody opens the file who may not open the old one.
        number = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with suppress(OSError):  # only root may give a file to another owner
            os.fchown(number, old.st_uid, old.st_gid)
        with suppress(OSError):  # some file systems do not support this
            os.fchmod(number, old.st_mode & 0o777)
        return os.fdopen(number, "wb")

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
            _flush(self._target.parent)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def real_path(path: Path) -> Path:
    """Return the path without links, also at a loop of links, where `Path.resolve` may fail."""
    return Path(os.path.realpath(path))


def check_output(path: Path, replace: bool) -> None:
    """Raise RequestError unless ``path`` is free, or a regular file that may be replaced."""
    if path.is_dir():
        raise RequestError(f"{path}: is a directory")
    if path.exists():
        if not path.is_file():  # a device, for example
            raise RequestError(f"{path}: is no regular file")
        if not replace:
            raise RequestError(f"{path}: exists already", "force")


class AtomicDirectory:
    """A directory that is written under a hidden name beside its own; a context manager.

    Entering it returns the hidden directory. At the end of the block its files are flushed to the
    disk and it gets its name; after an error it is removed, and an existing directory stays as it
    was. A symbolic link stays one. The directory has the mode of the one that it replaces. On file
    systems that cannot exchange two names (Linux' ``renameat2``), replacing takes two renames.

    Args:
        path: the directory.
        replace: whether an existing directory may be replaced.

    Raises:
        RequestError: the path exists and may not be replaced.
        OSError: it cannot be written; ``filename`` is in ``path``.
    """

    def __init__(self, path: Path, replace: bool) -> None:
        check_output_directory(path, replace)
        self.path, self._replace = path, replace
        self._target = real_path(path)
        self._part = _temporary(self._target)

    def __enter__(self) -> Path:
        try:
            self._part.mkdir(0o700 if self._target.exists() else 0o777)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        return self._part

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        try:
            if kind is None:
                for folder, _, files in os.walk(self._part, topdown=False):
                    for name in (*files, "."):
                        _flush(Path(folder, name))
                self._publish()
                with suppress(OSError):  # some file systems do not support this
                    _flush(self._target.parent)
        except OSError as error:
            raise self._named(error) from None
        finally:
            _remove(self._part)
        if isinstance(failure, OSError) and self._part.name in str(failure.filename):
            raise self._named(failure) from None

    def _publish(self) -> None:
        """Rename the directory; afterwards the temporary name is free, or that of the old one."""
        check_output_directory(self.path, self._replace)
        if not self._target.exists():
            os.rename(self._part, self._target)
            return
        shutil.copymode(self._target, self._part)
        if not _exchange(self._part, self._target):
            old = _temporary(self._target)
            os.rename(self._target, old)
            os.rename(self._part, self._target)
            os.rename(old, self._part)

    def _named(self, error: OSError) -> OSError:
        """The error with the name that the file would have got."""
        name = str(error.filename or self.path).replace(self._part.name, self._target.name)
        return OSError(error.errno, error.strerror, name)


def check_output_directory(path: Path, replace: bool) -> None:
    """Raise RequestError unless ``path`` is free, or a directory that may be replaced."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RequestError(f"{path}: is no directory")
    if not replace:
        raise RequestError(f"{path}: exists already", "force")


def _temporary(target: Path) -> Path:
    """Return a hidden name that is free beside ``target``."""
    return target.with_name(f".{target.name[:_NAME]}.{secrets.token_hex(4)}.part")


def _remove(folder: Path) -> None:
    """Remove a directory if it can be, also when an interrupt comes meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two directories in one step; return whether the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(a), os.fsencode(b)
    return rename is not None and not rename(
        _CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE
    )


def _flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


__all__ = ["AtomicDirectory", "AtomicFile", "check_output", "check_output_directory"]
