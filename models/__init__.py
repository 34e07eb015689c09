"""Model families, one file each, named after the Hugging Face ``model_type``.

A family exposes ``GGUF`` (the architectures of GGUF files that it reads), ``config(keys)`` (the
file's metadata as a `DecoderConfig`), ``RULES`` (how the file's tensors are called) and ``Model``.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from graphllm.errors import ModelFileError

if TYPE_CHECKING:
    from graphllm.weights.gguf import GGUF


def families() -> list[ModuleType]:
    """Every family in this package."""
    return [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]


def family(file: GGUF, model_def: str | Path | None = None) -> ModuleType:
    """The family that reads the file: the user's own in ``model_def``, or one of this package's.

    ModelFileError where there is none.
    """
    if model_def is not None:
        return _own(model_def)
    for found in families():
        if file.architecture in found.GGUF:
            return found
    known = ", ".join(sorted(a for m in families() for a in m.GGUF))
    raise ModelFileError(f"{file.path}: unknown architecture {file.architecture!r}; known: {known}")


def _own(path: str | Path) -> ModuleType:
    """A user's model file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ModelFileError(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    missing = [n for n in ("GGUF", "RULES", "Model", "config") if not hasattr(module, n)]
    if missing:
        raise ModelFileError(f"{path}: a model file needs {', '.join(missing)}")
    return module
