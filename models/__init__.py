"""Model families, one file each, named after the Hugging Face ``model_type``.

A family exposes ``GGUF`` (the architectures of GGUF files that it reads), ``config(keys)`` (the
file's metadata as a `DecoderConfig`), ``RULES`` (how the file's tensors are called) and ``Model``.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def families() -> list[ModuleType]:
    """Every family in this package."""
    return [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]


def for_gguf(architecture: str) -> ModuleType | None:
    """The family that reads GGUF files of this ``general.architecture``."""
    return next((m for m in families() if architecture in m.GGUF), None)
