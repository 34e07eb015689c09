"""Built-in models, one file each, named after the Hugging Face ``model_type``.

A model file has ``config(keys)``, which returns a `DecoderConfig`, and ``Model``, the decoder class
that builds the graph. `graphllm.model.spec.ModelSpec` lists its optional variables.
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
    """Return the model specs of all files in this package."""
    names = (m.name for m in pkgutil.iter_modules(__path__))
    return [ModelSpec.from_module(importlib.import_module(f"{__name__}.{n}"), n) for n in names]


def spec_of_model_type(kind: str, where: object) -> ModelSpec:
    """Return the spec for a Hugging Face ``model_type``.

    ModelFileError for an unknown one names the nearest; its text begins with ``where``.
    """
    return _find(specs(), lambda s: s.types, kind, f"{where}: unknown model_type")


def spec_of_architecture(architecture: str, where: object) -> ModelSpec:
    """Return the spec for a GGUF file's ``general.architecture``.

    ModelFileError for an unknown one names the nearest; its text begins with ``where``.
    """
    return _find(specs(), lambda s: s.gguf, architecture, f"{where}: unknown architecture")


def _find(
    candidates: Sequence[ModelSpec],
    names: Callable[[ModelSpec], tuple[str, ...]],
    name: str,
    unknown: str,
) -> ModelSpec:
    for spec in candidates:
        if name in names(spec):
            return spec
    known = sorted(n for spec in candidates for n in names(spec))
    near = difflib.get_close_matches(name, known, 3, 0.5)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ModelFileError(
        f"{unknown} {quote(name)}; {hint}known: {', '.join(known)}; to load it with "
        "a model file of your own (graphllm new), pass that as model_def",
        "model_def",
    )


def spec_of_file(path: str | Path) -> ModelSpec:
    """Return the spec of a user's model file. ModelFileError if it is not one."""
    return ModelSpec.from_module(import_file(path), str(path))
