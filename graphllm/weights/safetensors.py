"""Reader of memory-mapped safetensors: a Hugging Face directory or one file.

The safetensors package is not used because weights stay in the mapping and their pages are
released. A malformed file raises a ModelFileError. `safetensors_format` parses headers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from ..errors import ModelFileError, quote
from .mapped_file import NO_PICKLES, MappedFile, TensorFiles
from .safetensors_format import MAX_HEADER, READABLE, read_header
from .strict_json import json_object

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE = re.compile(r"pytorch_model.*\.bin|.*\.(pt|pth|ckpt|pkl)", re.DOTALL)


class _File(MappedFile):
    """One file, with its header parsed."""

    def __init__(self, path: Path, data: bool) -> None:
        super().__init__(path, data)
        self.tensors = read_header(self.view(), path, data)


class Safetensors(TensorFiles):
    """The tensors of a directory or of one ``.safetensors`` file; a context manager.

    A directory has ``model.safetensors``, or ``model.safetensors.index.json`` and the shards that
    it names, which must hold the tensors that the index lists. A tensor may begin at any byte.

    Args:
        path: Directory or file.
        data: Whether tensors will be read. If not, only headers must exist, and `raw` raises.

    Raises:
        ModelFileError: A file is missing or malformed.
    """

    formats = tuple(dtype.name for dtype in READABLE.values())

    def __init__(self, path: str | os.PathLike[str], data: bool = True) -> None:
        super().__init__(Path(path))
        file = _of_directory(self.path) if self.path.is_dir() else self.path
        if _PICKLE.fullmatch(file.name):
            raise ModelFileError(f"{file}: {NO_PICKLES}")
        if file.name.endswith(".index.json"):
            self._add_shards(file, data)
        else:
            one = _File(file, data)
            self._add(one, one.tensors)

    def _add_shards(self, index: Path, data: bool) -> None:
        """Add all shards of an index and check that it agrees with their headers."""
        shard_of = _read_index(index)
        for shard in dict.fromkeys(shard_of.values()):
            path = index.parent / shard
            if not os.path.lexists(path):
                raise ModelFileError(f"{path}: missing, but named in {index.name}")
            file = _File(path, data)
            for name in file.tensors:
                if name not in shard_of:
                    raise ModelFileError(f"{path}: tensor {quote(name)}: not in {index.name}")
                if shard_of[name] != shard:
                    raise ModelFileError(
                        f"{path}: tensor {quote(name)}: {index.name} lists it in "
                        f"{quote(shard_of[name])}"
                    )
            self._add(file, file.tensors)
        for name, shard in shard_of.items():
            if name not in self.tensors:
                raise ModelFileError(
                    f"{index.parent / shard}: tensor {quote(name)}: missing, but listed in "
                    f"{index.name}"
                )


def _of_directory(folder: Path) -> Path:
    """Return the directory's weight file or index. ModelFileError if it has neither."""
    for name in (_SINGLE, _INDEX):
        if os.path.lexists(folder / name):
            return folder / name
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ModelFileError(f"{folder}: cannot be opened: {error.strerror}") from None
    files = [name for name in names if name.endswith(".safetensors") and name.isprintable()]
    pickles = [name for name in names if _PICKLE.fullmatch(name) and name.isprintable()]
    if files:
        raise ModelFileError(f"{folder}: no {_SINGLE} and no {_INDEX}, only {files[0]}")
    if pickles:
        raise ModelFileError(f"{folder / pickles[0]}: {NO_PICKLES}")
    raise ModelFileError(f"{folder}: no {_SINGLE} and no {_INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    """Read the index: the path of each tensor's shard within the directory."""
    view = MappedFile(path, data=False).view()
    if len(view) > MAX_HEADER:
        raise ModelFileError(f"{path}: {len(view)} bytes are too many (at most {MAX_HEADER})")
    shard_of = json_object(bytes(view), str(path)).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ModelFileError(f"{path}: 'weight_map' is missing, empty or not an object")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not _inside(shard):
            raise ModelFileError(
                f"{path}: tensor {quote(name)}: {quote(str(shard))} is not a .safetensors file "
                "within the directory"
            )
    return shard_of


def _inside(shard: str) -> bool:
    """Return whether a shard's path stays in the directory and is printable."""
    path = PurePosixPath(shard)
    escapes = path.is_absolute() or ".." in path.parts
    fits = len(shard) <= 255 and shard.isprintable()
    return shard.endswith(".safetensors") and fits and not escapes
