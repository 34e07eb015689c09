"""Built-in models, one file each, named after the Hugging Face ``model_type``.

A model file has ``config(keys)``, which returns a `DecoderConfig`, and ``Model``, the decoder class
that builds the graph. `graphllm.model.spec.ModelSpec` lists its optional variables.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

from graphllm.errors import ModelFileError, quote
from graphllm.model.spec import ModelSpec, import_file


def specs() -> list[ModelSpec]:
    """Return the model specs of all files in this package."""
    return list(_specs(""))


def _specs(first: str) -> Iterator[ModelSpec]:
    """Import the files one by one, those whose names begin with ``first`` before the others."""
    names = [m.name for m in pkgutil.iter_modules(__path__)]
    for name in sorted(names, key=lambda name: not name.startswith(first)):
        yield ModelSpec.from_module(importlib.import_module(f"{__name__}.{name}"), name)


def spec_of_model_type(kind: str, where: object) -> ModelSpec:
    """Return the spec for a Hugging Face ``model_type``.

    ModelFileError for an unknown one names the nearest; its text begins with ``where``.
    """
    return _find(lambda s: s.types, kind, f"{where}: unknown model_type")


def spec_of_architecture(architecture: str, where: object) -> ModelSpec:
    """Return the spec for a GGUF file's ``general.architecture``.

    ModelFileError for an unknown one names the nearest; its text begins with ``where``.
    """
    return _find(lambda s: s.gguf, architecture, f"{where}: unknown architecture")


def _find(names: Callable[[ModelSpec], tuple[str, ...]], name: str, unknown: str) -> ModelSpec:
    for spec in _specs(name):
        if name in names(spec):
            return spec
    import difflib

    known = sorted(n for spec in specs() for n in names(spec))
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
