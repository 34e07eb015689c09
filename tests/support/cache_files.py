"""Files in the cache directory that another user may have written."""

from __future__ import annotations

import os
from pathlib import Path

OTHER = 12345  # a user id


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.with_name("z").write_bytes(b"")
    path.symlink_to("z")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def open_to_all(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o666)


def anothers(path: Path) -> None:
    path.write_bytes(b"")
    os.chown(path, OTHER, OTHER)


NOT_USED = {
    "fifo": (fifo, "it is no regular file"),
    "device": (device, "it is a symbolic link"),
    "symlink": (elsewhere, "it is a symbolic link"),
    "directory": (Path.mkdir, "it is no regular file"),
    "huge": (huge, "it has 1099511627776 bytes, more than 67108864"),
    "writable": (open_to_all, "others may write to it (mode 0666); only its owner must be able to"),
    "another's": (anothers, f"it belongs to user {OTHER}, not to user {os.geteuid()}"),
}
