"""Model families, one file each, named after the Hugging Face ``model_type``.

A family's module has ``config(keys)``, which makes a `DecoderConfig` of the configuration under
Hugging Face's names, and ``Model``, which builds the graph. What else it may have:
`graphllm.model.spec.Family`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path

from graphllm.errors import ModelFileError, quote
from graphllm.model.spec import Family, run_file


def families() -> list[Family]:
    """Every family in this package."""
    names = (m.name for m in pkgutil.iter_modules(__path__))
    return [Family.of(importlib.import_module(f"{__name__}.{n}"), n) for n in names]


def of_type(kind: str, where: object) -> Family:
    """The family of a Hugging Face ``model_type``. ModelFileError lists the nearest."""
    return _find(families(), lambda f: f.types, kind, f"{where}: unknown model_type")


def of_gguf(architecture: str, where: object) -> Family:
    """The family of a GGUF file's architecture. ModelFileError lists the nearest."""
    return _find(families(), lambda f: f.gguf, architecture, f"{where}: unknown architecture")


def _find(
    found: Sequence[Family], names: Callable[[Family], tuple[str, ...]], name: str, unknown: str
) -> Family:
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


def own(path: str | Path) -> Family:
    """A user's model file. ModelFileError."""
    return Family.of(run_file(path), str(path))
