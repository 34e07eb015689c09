"""Tensors in memory-mapped files of any format: description, bytes, release of pages."""

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

NO_PICKLES = "a pickle file, which can run code, is never loaded; convert it to safetensors"

Self = TypeVar("Self", bound="TensorFiles")


@dataclass(frozen=True)
class TensorInfo:
    """Description of one tensor of a file.

    ``shape`` is outermost first; ``offset`` is in bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    offset: int
    supported: bool = True  # False: the tensor can be listed but not read


_MAX_SMALL = 1 << 20  # bytes


def _open_map(path: Path) -> mmap.mmap:
    """Map a file read-only. ModelFileError for a pipe or device, which could block forever."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(f"{path}: cannot be opened: {reason}") from None


class MappedFile:
    """One memory-mapped file. ModelFileError if it cannot be opened.

    Without ``data`` only the header may be read, and the tensors' bytes may be missing.
    """

    def __init__(self, path: Path, data: bool) -> None:
        self.path, self._data = path, data
        self._map: mmap.mmap | None = _open_map(path)

    def view(self) -> memoryview:
        """Return all bytes of the file, which must be open."""
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

    def small(self, info: TensorInfo) -> bytes:
        """See `TensorFiles.small`."""
        found = bytes(self.view()[info.offset : info.offset + min(info.nbytes, _MAX_SMALL)])
        if len(found) < info.nbytes:
            raise ModelFileError(f"{self.path}: tensor {quote(info.name)}: cut off, or too long")
        return found

    def release(self, info: TensorInfo) -> None:
        """See `TensorFiles.release`."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            with contextlib.suppress(OSError):  # madvise is only advice
                self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Unmap the file, or release its pages as long as there are views of it."""
        mapped, self._map = self._map, None
        if mapped is None:
            return
        try:
            mapped.close()
        except BufferError:
            if hasattr(mmap, "MADV_DONTNEED"):
                with contextlib.suppress(OSError):  # madvise is only advice
                    mapped.madvise(mmap.MADV_DONTNEED)


class TensorFiles:
    """One or several open files with tensors; a context manager.

    ``tensors`` maps names to `TensorInfo`, in file order. Views keep the mapping alive after
    `close`. Subclasses open the files and call `_add` for each.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    formats: Collection[str]  # names of the readable dtypes, for error messages

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {}
        self._files: list[MappedFile] = []
        self._file_of: dict[str, MappedFile] = {}

    def _add(self, file: MappedFile, tensors: dict[str, TensorInfo]) -> None:
        """Add a file. ModelFileError for a tensor that another file has."""
        self._files.append(file)
        for name, info in tensors.items():
            if name in self.tensors:
                raise ModelFileError(
                    f"{file.path}: tensor {quote(name)}: also in {self._file_of[name].path.name}"
                )
            self.tensors[name], self._file_of[name] = info, file

    def info(self, name: str) -> TensorInfo:
        """Return the tensor's description. ModelFileError if it is missing."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: tensor {quote(name)}: not in the file")
        return self.tensors[name]

    def readable(self, name: str) -> TensorInfo:
        """Return the tensor's description. ModelFileError if it is missing or not supported."""
        info = self.info(name)
        if not info.supported:
            raise ModelFileError(
                f"{self._file_of[name].path}: tensor {quote(name)}: format {info.dtype} is not "
                f"supported, only {', '.join(self.formats)}"
            )
        return info

    def raw(self, name: str) -> np.ndarray:
        """Return a view of the tensor's bytes in the mapping, read-only uint8 [rows, row_bytes].

        A row is the last axis of `TensorInfo.shape`. ModelFileError as from `readable`.
        """
        info = self.readable(name)
        return self._file_of[name].raw(info)

    def small(self, name: str) -> bytes:
        """Return the bytes of a small tensor that says how to read others, also of a file that was
        opened without its data. ModelFileError if it is missing, cut off or larger than 1 MiB."""
        info = self.readable(name)
        return self._file_of[name].small(info)

    def release(self, name: str) -> None:
        """Release the tensor's pages from memory; a later access reads them again.

        Only pages that lie entirely inside the tensor are released. No effect without madvise.
        """
        info = self.info(name)
        self._file_of[name].release(info)

    def close(self) -> None:
        """Close the files. Their mappings last until their last view is deleted."""
        for file in self._files:
            file.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
