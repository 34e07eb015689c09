"""Files that a model is read from, which no output may replace."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import RequestError
from ..weights.gguf import part_paths
from .checkpoint import checkpoint_path

# Files of a model's directory; others in it, such as reports, may be replaced.
_PATTERNS = (
    "*config*.json", "*token*.json", "vocab*.json", "modules.json", "*.index.json",
    "chat_template*", "*.jinja", "*.model", "*.txt", "*.safetensors", "*.bin",
)  # fmt: skip


def model_files(model: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the files of a model: the file, all parts of a split one, or those of a directory.

    ModelFileError if there is no such model.
    """
    path = checkpoint_path(model)
    if path.suffix == ".gguf":
        yield from part_paths(path)
        return
    if path.is_file():
        yield path
    if path.is_dir() or path.suffix == ".safetensors":
        folder = path if path.is_dir() else path.parent
        for pattern in _PATTERNS:
            yield from folder.glob(pattern)
            yield from folder.glob(f"*/{pattern}")  # modules of sentence-transformers


def check_not_input(
    output: Path,
    *,
    models: Iterable[str | os.PathLike[str] | None] = (),
    files: Iterable[tuple[str, str | os.PathLike[str] | None]] = (),
    flag: str = "",
) -> None:
    """Raise RequestError if an output would replace an input, or the file of standard input.

    Links to a file count as the file. Nothing is checked if the output does not exist yet.

    Args:
        output: The file to write.
        models: Models that are read; None is skipped.
        files: Other files that are read, each with what the error calls it; None is skipped.
        flag: Flag of the output, which the error begins with.
    """
    if not output.is_file():
        return
    name = f"{flag} {output}" if flag else str(output)
    for what, path in (*files, ("standard input", 0)):
        if path is not None and os.path.isfile(path) and os.path.samefile(output, path):
            raise RequestError(f"{name}: is {what}; give another name")
    for model in models:
        if model is not None and any(
            path.is_file() and output.samefile(path) for path in model_files(model)
        ):
            raise RequestError(f"{name}: is a file of the model {model}; give another name")
