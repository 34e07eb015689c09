"""Reader of GGUF files, versions 2 and 3, little-endian, memory-mapped; whole or in parts.

A malformed file ends in a ModelFileError that names the file and the key or tensor; see
`gguf_format`, which reads the bytes.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ModelFileError
from ..quant import WEIGHT_FORMATS
from .gguf_format import (
    Cursor,
    StringArray,
    TensorInfo,
    read_header,
    read_metadata,
    read_tensors,
    shown,
)

if TYPE_CHECKING:
    from ..config import DecoderConfig
    from ..models import Family
    from ..tokenizer import Tokenizer
    from . import Weights
    from .keys import Keys

__all__ = ["GGUF", "StringArray", "TensorInfo"]

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


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


class _Part:
    """One mapped file."""

    def __init__(self, path: Path, data: bool) -> None:
        self.path, self._data = path, data
        self._map: mmap.mmap | None = _open_map(path)
        cursor = Cursor(memoryview(self._map), path)
        self.version, tensor_count, key_count = read_header(cursor)
        self.metadata = MappingProxyType(read_metadata(cursor, key_count))
        alignment = self.integer("general.alignment", 32)
        if alignment < 8 or alignment & (alignment - 1):
            raise self.error("general.alignment", f"{alignment} is not a power of two from 8 up")
        self.tensors = read_tensors(cursor, tensor_count, alignment, data)

    def error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: key {key!r}: {text}")

    def integer(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"{value!r} is not an integer")
        return value

    def raw(self, info: TensorInfo) -> np.ndarray:
        """See `GGUF.raw`."""
        if self._map is None:
            raise ModelFileError(f"{self.path}: tensor {shown(info.name)}: the file is closed")
        if not self._data:
            raise ModelFileError(
                f"{self.path}: tensor {shown(info.name)}: the file was opened without its data"
            )
        rows = math.prod(info.shape[:-1])
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset).reshape(rows, -1)

    def release(self, info: TensorInfo) -> None:
        """See `GGUF.release`."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            with contextlib.suppress(OSError):  # advice only
                self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # views are alive
                mapped.close()


def _open_parts(path: Path, data: bool) -> list[_Part]:
    """The file, or all parts of which it is the first."""
    first = _Part(path, data)
    count = first.integer("split.count", 1)
    if count <= 1:
        return [first]
    number = first.integer("split.no", 0)
    ending = f"-{number + 1:05d}-of-{count:05d}.gguf"
    named = _PART.fullmatch(path.name)
    if named is None or not path.name.endswith(ending):
        raise ModelFileError(
            f"{path}: part {number + 1} of {count}, but its name does not end in {ending!r}"
        )
    names = [f"{named[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    if number != 0:
        raise ModelFileError(f"{path}: part {number + 1} of {count}; give the first, {names[0]}")
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        raise ModelFileError(f"{path.with_name(missing[0])}: missing, one of {count} parts")
    parts = [first, *(_Part(path.with_name(name), data) for name in names[1:])]
    for index, part in enumerate(parts):
        own = part.integer("split.no", -1), part.integer("split.count", 1)
        if own != (index, count):
            raise part.error("split.no", f"part {own[0] + 1} of {own[1]}, not {index + 1}")
    return parts


class GGUF:
    """An open GGUF file, or the parts of one; a context manager.

    ``metadata`` maps keys to int, float, bool, str, a read-only NumPy array or a `StringArray`;
    ``tensors`` maps names to `TensorInfo`, in file order. Views keep the mapping alive after
    `close`. Of a file in parts (``-00001-of-00003.gguf``) ``path`` is the first, whose metadata
    counts. Without ``data`` the header is all that is read, and all that must be there: `raw` is an
    error then. ModelFileError when a file is missing or malformed.
    """

    has_vocabulary = True  # a model file without one is malformed
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: str | os.PathLike[str], data: bool = True) -> None:
        self.path = Path(path)
        self._parts = _open_parts(self.path, data)
        self.version: int = self._parts[0].version
        self.metadata = self._parts[0].metadata
        tensors = self.tensors = {}
        self._home: dict[str, _Part] = {}
        for part in self._parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise ModelFileError(
                        f"{part.path}: tensor {shown(name)}: also in {self._home[name].path.name}"
                    )
                tensors[name], self._home[name] = info, part
        wanted = self._parts[0].integer("split.tensors.count", len(self.tensors))
        if len(self._parts) > 1 and wanted != len(self.tensors):
            have = f"{wanted} tensors, but the parts have {len(self.tensors)}"
            raise self._parts[0].error("split.tensors.count", have)

    @property
    def architecture(self) -> str:
        """``general.architecture``, as `llama` or `gemma3`; ModelFileError without one."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise ModelFileError(f"{self.path}: key 'general.architecture': missing or no string")
        return name

    @property
    def kind(self) -> str:
        return f"GGUF version {self.version}"

    # -- the model that it holds
    def family(self) -> Family:
        from .. import models

        return models.of_gguf(self.architecture, self.path)

    def keys(self, family: Family) -> Keys:
        from .gguf_model import gguf_keys

        return gguf_keys(self, family)

    def weights(self, family: Family, config: DecoderConfig) -> Weights:
        from . import NamedWeights

        return NamedWeights(self, family.rules, strict=True)

    def tokenizer(self) -> Tokenizer:
        from ..tokenizer import from_gguf

        return from_gguf(self)

    @property
    def chat_template(self) -> str | None:
        return self.metadata.get("tokenizer.chat_template") or None

    # -- tensors
    def info(self, name: str) -> TensorInfo:
        """The tensor's facts; ModelFileError names a missing one."""
        if name not in self.tensors:
            raise ModelFileError(f"{self.path}: tensor {shown(name)}: not in the file")
        return self.tensors[name]

    def readable(self, name: str) -> TensorInfo:
        """The tensor's facts; ModelFileError if it is missing, or its format has no dtype here."""
        info = self.info(name)
        if not info.supported:
            known = ", ".join(WEIGHT_FORMATS)
            raise ModelFileError(
                f"{self._home[name].path}: tensor {shown(name)}: format {info.dtype} is not "
                f"supported, only {known}"
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
        for part in self._parts:
            part.close()

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
