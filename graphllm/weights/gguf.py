"""Reader of GGUF files, versions 2 and 3, little-endian, memory-mapped; whole or in parts.

A malformed file ends in a ModelFileError that names the file and the key or tensor; see
`gguf_format`, which reads the bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import ModelFileError, quote
from ..formats import WEIGHT_FORMATS
from .gguf_format import (
    Cursor,
    StringArray,
    T,
    read_header,
    read_metadata,
    read_tensors,
    typed_value,
)
from .mapped_file import MappedFile, TensorFiles, TensorInfo

__all__ = ["GgufFile", "StringArray", "TensorInfo"]

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class _Part(MappedFile):
    """One file, with its header read."""

    def __init__(self, path: Path, data: bool) -> None:
        super().__init__(path, data)
        cursor = Cursor(self.view(), path)
        self.version, tensor_count, key_count = read_header(cursor)
        self.metadata = MappingProxyType(read_metadata(cursor, key_count))
        alignment = self.integer("general.alignment", 32)
        if alignment < 8 or alignment & (alignment - 1):
            raise self.error("general.alignment", f"{alignment} is not a power of two from 8 up")
        self.tensors = read_tensors(cursor, tensor_count, alignment, data)

    def error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: key {quote(key)}: {text}")

    def integer(self, key: str, default: int) -> int:
        value = typed_value(self.metadata, key, int, self.error)
        return default if value is None else value


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
            f"{path}: part {number + 1} of {count}, but its name does not end in {quote(ending)}"
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


class GgufFile(TensorFiles):
    """An open GGUF file, or the parts of one; a context manager.

    ``metadata`` maps keys to int, float, bool, str, a read-only NumPy array or a `StringArray`;
    ``tensors`` maps names to `TensorInfo`, in file order. Views keep the mapping alive after
    `close`. Of a file in parts (``-00001-of-00003.gguf``) ``path`` is the first, whose metadata
    counts. Without ``data`` the header is all that is read, and all that must be there: `raw` is an
    error then. ModelFileError when a file is missing or malformed.
    """

    formats = WEIGHT_FORMATS

    def __init__(self, path: str | os.PathLike[str], data: bool = True) -> None:
        super().__init__(Path(path))
        parts = _open_parts(self.path, data)
        self.version: int = parts[0].version
        self.metadata: Mapping[str, Any] = parts[0].metadata
        for part in parts:
            self._add(part, part.tensors)
        wanted = parts[0].integer("split.tensors.count", len(self.tensors))
        if len(parts) > 1 and wanted != len(self.tensors):
            have = f"{wanted} tensors, but the parts have {len(self.tensors)}"
            raise parts[0].error("split.tensors.count", have)

    @property
    def architecture(self) -> str:
        """``general.architecture``, as `llama` or `gemma3`; ModelFileError without one."""
        name = self.value("general.architecture", str)
        if not name:
            raise ModelFileError(f"{self.path}: key 'general.architecture': missing or empty")
        return name

    def value(self, key: str, kind: type[T]) -> T | None:
        """The value of ``key`` as ``kind``: int, float, bool or str; None without one.
        ModelFileError for a value of another type."""

        def error(key: str, text: str) -> ModelFileError:
            return ModelFileError(f"{self.path}: key {quote(key)}: {text}")

        return typed_value(self.metadata, key, kind, error)

    @property
    def kind(self) -> str:
        return f"GGUF version {self.version}"
