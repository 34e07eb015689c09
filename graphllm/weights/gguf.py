"""Reader of memory-mapped GGUF files, versions 2 and 3, little-endian, single or split.

A malformed file raises a ModelFileError that names the file and the key or tensor. `gguf_format`
parses the bytes.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import ModelFileError, quote
from ..formats import gguf_formats
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
    """One file of a split model, with its header parsed."""

    def __init__(self, path: Path, data: bool) -> None:
        super().__init__(path, data)
        cursor = Cursor(self.view(), path)
        self.version, tensor_count, key_count = read_header(cursor)
        self.metadata = MappingProxyType(read_metadata(cursor, key_count))
        alignment = self.integer("general.alignment", 32)
        if alignment < 8 or alignment & (alignment - 1):
            raise self.error(
                "general.alignment", f"{alignment} must be a power of two of at least 8"
            )
        self.tensors = read_tensors(cursor, tensor_count, alignment, data)

    def error(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: key {quote(key)}: {text}")

    def integer(self, key: str, default: int) -> int:
        value = typed_value(self.metadata, key, int, self.error)
        return default if value is None else value


def part_paths(path: Path) -> list[Path]:
    """Return the files of a split model that exist, by the name of one; ``path`` of another."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(named[1])}-?????-of-{named[3]}.gguf"))


def _open_parts(path: Path, data: bool) -> list[_Part]:
    """Open the file, or all parts of a split model whose first part it is."""
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
    """An open GGUF file, or all parts of a split one; a context manager.

    ``metadata`` maps keys to int, float, bool, str, a read-only NumPy array or a `StringArray`;
    ``tensors`` maps names to `TensorInfo`, in file order. Views keep the mapping alive after
    `close`. A split model (``-00001-of-00003.gguf``) is opened by its first part, whose metadata
    is used.

    Args:
        path: The file.
        data: Whether tensors will be read. If not, only the header must exist, and `raw` raises.

    Raises:
        ModelFileError: A file is missing or malformed.
    """

    formats = ("f32", "f16", "bf16", *gguf_formats())

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
        """``general.architecture``, such as `llama`. ModelFileError if it is missing."""
        name = self.value("general.architecture", str)
        if not name:
            raise ModelFileError(f"{self.path}: key 'general.architecture': missing or empty")
        return name

    def value(self, key: str, kind: type[T]) -> T | None:
        """Return the value of ``key``, or None if it is missing.

        ``kind`` is int, float, bool or str; ModelFileError for a value of another type.
        """

        def error(key: str, text: str) -> ModelFileError:
            return ModelFileError(f"{self.path}: key {quote(key)}: {text}")

        return typed_value(self.metadata, key, kind, error)

    @property
    def kind(self) -> str:
        return f"GGUF version {self.version}"
