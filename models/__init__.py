"""Model families, one file each, named after the Hugging Face ``model_type``.

A family's module has ``config(keys)``, which makes a `DecoderConfig` of the configuration under
Hugging Face's names, and ``Model``, which builds the graph. What else it may have:
`graphllm.model.spec.ModelSpec`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path

from graphllm.errors import ModelFileError, quote
from graphllm.model.spec import ModelSpec, import_file


def specs() -> list[ModelSpec]:
    """Every family in this package."""
    names = (m.name for m in pkgutil.iter_modules(__path__))
    return [ModelSpec.from_module(importlib.import_module(f"{__name__}.{n}"), n) for n in names]


def spec_of_model_type(kind: str, where: object) -> ModelSpec:
    """The family of a Hugging Face ``model_type``. ModelFileError lists the nearest."""
    return _find(specs(), lambda f: f.types, kind, f"{where}: unknown model_type")


def spec_of_architecture(architecture: str, where: object) -> ModelSpec:
    """The family of a GGUF file's architecture. ModelFileError lists the nearest."""
    return _find(specs(), lambda f: f.gguf, architecture, f"{where}: unknown architecture")


def _find(
    found: Sequence[ModelSpec],
    names: Callable[[ModelSpec], tuple[str, ...]],
    name: str,
    unknown: str,
) -> ModelSpec:
    for each in found:
        if name in names(each):
            return each
    known = sorted(n for each in found for n in names(each))
    near = difflib.get_close_matches(name, known, 3, 0.5)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ModelFileError(
        f"{unknown} {quote(name)}; {hint}known: {', '.join(known)}; a model file of your own "
        "(graphllm new) reads it as model_def",
        "model_def",
    )


def spec_of_file(path: str | Path) -> ModelSpec:
    """A user's model file. ModelFileError."""
    return ModelSpec.from_module(import_file(path), str(path))
