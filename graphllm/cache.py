"""Files in the cache directory, which hold native code among other things.

Every cache of graphllm reads and writes its files here. A file is read only if nobody else can have
written it: it and each directory from the cache directory down to it belong to the user (or to
root, who can change the program itself) and are writable by their owner alone, and it is a regular
file of bounded size. The cache directory may be reached through symbolic links; below it none is
followed. Anything else is a miss, with one line on standard error per process. Directories are made
with mode 0700 and files with mode 0600; a file appears under its name when it is complete, so
that processes that write at once do not disturb each other or a reader.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from .debug import debug
from .env import cache_dir
from .terminal import warn

LIMIT = 64 << 20  # bytes of a file that is read as a whole; the largest kernels have 4 MB
_FORMAT = b"graphllm cache 2\n"
_SEAL = len(_FORMAT) + hashlib.sha256().digest_size
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class CacheFile:
    """One file of the cache directory (or of ``root``); ``parts``: the names that lead to it."""

    def __init__(self, *parts: str, root: Path | None = None) -> None:
        self._folders, self._name, self._root = parts[:-1], parts[-1], root

    @property
    def path(self) -> Path:
        return self._top.joinpath(*self._folders, self._name)

    @property
    def _top(self) -> Path:
        return self._root or cache_dir()

    # -------------------------------------------------------------------------------- reading

    def size(self, limit: int | None = LIMIT) -> int | None:
        """The size of the file in bytes; None if it is missing or may not be used."""
        opened = self._open(limit)
        if opened is None:
            return None
        file, size = opened
        os.close(file)
        return size

    def read(self, limit: int = LIMIT) -> bytes | None:
        """The contents, at most ``limit`` bytes; None if the file is missing or may not be used."""
        opened = self._open(limit)
        if opened is None:
            return None
        file, size = opened
        try:
            return os.read(file, size)
        except OSError as error:
            self.reject(_reason(error))
            return None
        finally:
            os.close(file)

    def load(self, key: bytes) -> bytes | None:
        """What `save` kept under ``key``; None if there is nothing, or something else."""
        data = self.read()
        if data is None:
            return None
        body = data[_SEAL:]
        if data[:_SEAL] == _seal(key, body):
            return body
        self.reject("its checksum is wrong")
        return None

    def reject(self, reason: str) -> None:
        """Report, once per process, that the file is there and not used."""
        _report(f"cache file not used: {self.path}: {reason}")

    def _open(self, limit: int | None) -> tuple[int, int] | None:
        """A descriptor of the checked file, and its size; None if it is missing or not used."""
        try:
            folder = _open_folder(self._top, self._folders)
        except OSError:  # which the attempt to write reports
            return None
        file = -1
        try:
            file = os.open(self._name, _FILE, dir_fd=folder)
            found = os.fstat(file)
            _check_file(found, limit)
        except OSError as error:
            if file >= 0:
                os.close(file)
            if not isinstance(error, FileNotFoundError):
                self.reject(_reason(error))
            return None
        finally:
            os.close(folder)
        return file, found.st_size

    # -------------------------------------------------------------------------------- writing

    def save(self, key: bytes, body: bytes) -> None:
        """Keep ``body`` so that `load` finds it, but only under the same ``key``."""
        self.write(_seal(key, body) + body)

    def write(self, data: bytes) -> None:
        """Replace the contents. If that fails, one line per process says why."""

        def fill(part: Path) -> None:
            with open(os.open(part, _NEW, 0o600), "wb") as file:
                file.write(data)

        try:
            self.replace(fill)
        except OSError as error:
            _report(f"cache not used: {error.filename}: {_reason(error)}")

    def replace(self, fill: Callable[[Path], None]) -> None:
        """Replace the file by one that ``fill`` makes under the path that it is given.

        Raises OSError, whose ``filename`` is a path of the cache, if that is impossible; and what
        ``fill`` raises.
        """
        folder = _open_folder(self._top, self._folders, create=True)
        name = f".{self._name}.{os.getpid()}.{secrets.token_hex(4)}.part"
        try:
            fill(self.path.with_name(name))
            os.replace(name, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            error.filename, error.filename2 = str(self.path.parent), None
            raise
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(folder)


def _seal(key: bytes, body: bytes) -> bytes:
    """What stands before ``body`` in a file that was saved under ``key``."""
    digest = hashlib.sha256(len(key).to_bytes(8, "little") + key)
    digest.update(body)
    return _FORMAT + digest.digest()


def _open_folder(path: Path, names: tuple[str, ...], create: bool = False) -> int:
    """A descriptor of ``path``, or of the directory that ``names`` lead to from there. OSError,
    whose ``filename`` is a directory's path, if one is missing or may not be used."""
    opened = -1
    try:
        if create:
            _make(path)
        opened = os.open(path, _DIRECTORY)
        _check_owner(os.fstat(opened))
        for name in names:
            path /= name
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=opened)
            above, opened = opened, -1
            try:
                opened = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            finally:
                os.close(above)
            _check_owner(os.fstat(opened))
    except OSError as error:
        if opened >= 0:
            os.close(opened)
        error.filename = str(path)
        raise
    return opened


def _make(path: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if path.parent.exists():  # a file system that makes no directories
            raise
        _make(path.parent)
        _make(path)


def _check_owner(found: os.stat_result) -> None:
    """OSError for what somebody else may have written."""
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        reason = f"it belongs to user {found.st_uid}, not to user {user}"
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        reason = f"others may write to it (mode {mode:04o}); only its owner must be able to"
    else:
        return
    raise OSError(errno.EPERM, reason)


def _check_file(found: os.stat_result, limit: int | None) -> None:
    """OSError for a file that may not be used."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    _check_owner(found)
    if limit is not None and found.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {limit}")


def _reason(error: OSError) -> str:
    """An error in words."""
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return error.strerror or str(error)


_reported: list[str] = []


def _report(text: str) -> None:
    """Print the first report of a process; the others at debug level 1 only."""
    if _reported:
        debug(1, text)
    else:
        _reported.append(text)
        warn(text)
