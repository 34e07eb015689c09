"""Files in the cache directory; some of them hold native code.

All caches of graphllm read and write their files here. A file is read only if no other user can
have written it: the file and every directory from the cache directory down to it belong to the
user (or to root, who can change the program itself) and are writable by their owner only, and the
file is a regular file of bounded size. The path to the cache directory may contain symbolic links;
below it no link is followed. Anything else is a cache miss, reported with one line on standard
error per process. Directories are created with mode 0700 and files with mode 0600. A file is
renamed to its final name when it is complete, so concurrent writers and readers do not disturb each
other.
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

LIMIT = 64 << 20  # maximum number of bytes that `CacheFile.read` reads; kernels have up to 4 MB
_FORMAT = b"graphllm cache 2\n"
_SEAL = len(_FORMAT) + hashlib.sha256().digest_size
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO does not block
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class CacheFile:
    """One file below the cache directory (or ``root``), at the path made of ``parts``."""

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
        """Return the size of the file in bytes; None if it is missing or unsafe."""
        opened = self._open(limit)
        if opened is None:
            return None
        file, size = opened
        os.close(file)
        return size

    def read(self, limit: int = LIMIT) -> bytes | None:
        """Return the contents; None if the file is missing, unsafe or beyond ``limit`` bytes."""
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
        """Return the body that `save` stored under ``key``; None if there is none."""
        data = self.read()
        if data is None:
            return None
        body = data[_SEAL:]
        if data[:_SEAL] == _seal(key, body):
            return body
        self.reject("its checksum is wrong")
        return None

    def reject(self, reason: str) -> None:
        """Report, once per process, that the file exists and is not used."""
        _report(f"cache file not used: {self.path}: {reason}")

    def _open(self, limit: int | None) -> tuple[int, int] | None:
        """Return (descriptor, size) of the checked file; None if it is missing or unsafe."""
        try:
            folder = _open_folder(self._top, self._folders)
        except OSError:  # a later write reports it
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
        """Store ``body`` for `load` with the same ``key``."""
        self.write(_seal(key, body) + body)

    def write(self, data: bytes) -> None:
        """Replace the contents. A failure is reported once per process."""

        def fill(part: Path) -> None:
            with open(os.open(part, _NEW, 0o600), "wb") as file:
                file.write(data)

        try:
            self.replace(fill)
        except OSError as error:
            _report(f"cache not used: {error.filename}: {_reason(error)}")

    def replace(self, fill: Callable[[Path], None]) -> None:
        """Replace the file by the one that ``fill`` creates at the path passed to it.

        Raises OSError, with a path of the cache as ``filename``, if that is impossible, and every
        error of ``fill``.
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
    """Return the header of a file with ``body`` that is stored under ``key``: magic and SHA-256."""
    digest = hashlib.sha256(len(key).to_bytes(8, "little") + key)
    digest.update(body)
    return _FORMAT + digest.digest()


def _open_folder(path: Path, names: tuple[str, ...], create: bool = False) -> int:
    """Return a descriptor of the directory ``names`` below ``path``.

    Raises OSError, with the path of a directory as ``filename``, if one is missing or unsafe.
    """
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
    """Create a directory and its missing parents, accessible to this user only."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        if path.parent.exists():  # a file system that cannot create directories
            raise
        _make(path.parent)
        _make(path)


def _check_owner(found: os.stat_result) -> None:
    """Raise OSError for a file or directory that another user may have written."""
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
    """Raise OSError for a file that is unsafe, or larger than ``limit`` bytes."""
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    _check_owner(found)
    if limit is not None and found.st_size > limit:
        raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {limit}")


def _reason(error: OSError) -> str:
    """Describe an error in words."""
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return error.strerror or str(error)


_reported: list[str] = []


def _report(text: str) -> None:
    """Print the first report of this process; later ones only at debug level 1."""
    if _reported:
        debug(1, text)
    else:
        _reported.append(text)
        warn(text)
