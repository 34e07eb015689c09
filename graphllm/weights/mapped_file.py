"""Tensors in mapped files, whatever the format: their facts, their bytes, their release."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..errors import ModelFileError, quote
from ..graph.dtype import DType

NO_PICKLES = "a pickle, which can run code, is never loaded; convert it to safetensors"

Self = TypeVar("Self", bound="TensorFiles")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. ``shape`` is outermost first; ``offset`` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    offset: int
    supported: bool = True  # otherwise the tensor can be listed but not read


def _open_map(path: Path) -> mmap.mmap:
    """The file mapped read-only. Only regular files: opening a pipe could block for ever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path}: cannot be opened: {reason}") from None


class MappedFile:
    """One mapped file; without ``data`` only its header will be read. ModelFileError."""

    def __init__(self, path: Path, data: bool) -> None:
        self.path, self._data = path, data
        self._map: mmap.mmap | None = _open_map(path)

    def view(self) -> memoryview:
        """All bytes of the file, which must be open."""
        assert self._map is not None
        return memoryview(self._map)

    def raw(self, info: TensorInfo) -> np.ndarray:
        """See `TensorFiles.raw`."""
        if self._map is None:
            raise ModelFileError(f"{self.path}: tensor {quote(info.name)}: the file is closed")
        if not self._data:
            raise ModelFileError(
                f"{self.path}: tensor {quote(info.name)}: the file was opened without its data"
            )
        row_bytes = info.dtype.row_nbytes(math.prod(info.shape[-1:]))
        shape = math.prod(info.shape[:-1]), row_bytes
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset).reshape(shape)

    def release(self, info: TensorInfo) -> None:
        """See `TensorFiles.release`."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            with contextlib.suppress(OSError):  # advice only
                self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Unmap the file; while views are alive, only give its pages back: they are read again."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        try:
            mapped.close()
        except BufferError:
            if hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):  # advice only
                    mapped.madvise(mmap.MADV_DONTNEED)


class TensorFiles:
    """An open file with tensors, or several that belong together; a context manager.

    ``tensors`` maps names to `TensorInfo`, in file order. Views keep the mapping alive after
    `close`. What opens the files calls `_add` for each.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    formats: Collection[str]  # names of the readable dtypes, for error messages

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {}
        self._files: list[MappedFile] = []
        self._home: dict[str, MappedFile] = {}

    def _add(self, file: MappedFile, tensors: dict[str, TensorInfo]) -> None:
        """One more file. ModelFileError for a tensor that another has."""
        self._files.append(file)
        for name, info in tensors.items():
            if name in self.tensors:
                raise ModelFileError(
                    f"{file.path}: tensor {quote(name)}: also in {self._home[name].path.name}"
                )
            self.tensors[name], self._home[name] = info, file

    def info(self, name: str) -> TensorInfo:
        """The tensor's facts; ModelFileError names a missing one."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: tensor {quote(name)}: not in the file")
        return self.tensors[name]

    def readable(self, name: str) -> TensorInfo:
        """The tensor's facts; ModelFileError if it is missing, or its format has no dtype here."""
        info = self.info(name)
        if not info.supported:
            raise ModelFileError(
                f"{self._home[name].path}: tensor {quote(name)}: format {info.dtype} is not "
                f"supported, only {', '.join(self.formats)}"
            )
        return info

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes in the mapping, read-only uint8 [rows, row_bytes].

        A row is the last axis of `TensorInfo.shape`. ModelFileError as from `readable`.
        """
        info = self.readable(name)
        return self._home[name].raw(info)

    def release(self, name: str) -> None:
        """Tell the kernel that the tensor's pages are not needed now; they can be read again.

        Only whole pages inside the tensor are given up. Does nothing where madvise is missing.
        """
        info = self.info(name)
        self._home[name].release(info)

    def close(self) -> None:
        """Let go of the mapping; it stays until the last view of it is gone."""
        for file in self._files:
            file.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
