"""Weight sources: what a model's weights are called, look like, and where their bytes lie."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..dtype import DTYPES, DType
from ..errors import ModelFileError
from ..quant import Blocks
from ..tensor import Meta


class Weights(Protocol):
    """Weights by canonical name (the Hugging Face path)."""

    def meta(self, name: str) -> Meta | None:
        """Shape and dtype, None when there is no such weight."""

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes, uint8 [rows, row_bytes], a row for each index of all axes but the
        last; read-only."""

    def release(self, name: str) -> None:
        """The stored bytes have been copied elsewhere and need not stay in memory."""

    def names(self) -> Iterable[str]: ...


def _plain_dtype(array: np.ndarray) -> DType:
    for known in DTYPES.values():
        if known.numpy == array.dtype:
            return known
    raise ModelFileError(f"weights of dtype {array.dtype} are not supported")


class Arrays:
    """Weights held as NumPy arrays, or as `Blocks` for block-quantised ones."""

    def __init__(self, arrays: Mapping[str, np.ndarray | Blocks]) -> None:
        self._arrays = dict(arrays)

    def names(self) -> Iterable[str]:
        return self._arrays.keys()

    def meta(self, name: str) -> Meta | None:
        value = self._arrays.get(name)
        if value is None:
            return None
        if isinstance(value, Blocks):
            return Meta.of(tuple(value.shape), value.dtype)
        return Meta.of(value.shape, _plain_dtype(value))

    def raw(self, name: str) -> np.ndarray:
        value = self._arrays[name]
        if isinstance(value, Blocks):
            return value.raw.reshape(-1, value.raw.shape[-1])
        width = value.shape[-1] if value.ndim else 1
        return np.ascontiguousarray(value).reshape(-1, width).view(np.uint8)

    def release(self, name: str) -> None:
        pass


@dataclass(frozen=True)
class WeightRule:
    """How a weight's canonical name is spelled in a file: ``{i}`` stands for a layer number.

    ``source`` is the file's name for ``pattern``; a rule whose pattern is empty names a tensor of
    the file that the model does not use.
    """

    pattern: str
    source: str

    def canonical(self, stored: str) -> str | None:
        """The canonical name of the file's tensor ``stored``; None when the rule does not apply."""
        regex = re.escape(self.source).replace(r"\{i\}", r"(\d+)")
        match = re.fullmatch(regex, stored)
        if match is None:
            return None
        return self.pattern.replace("{i}", match.group(1) if match.groups() else "")


def canonical_names(
    stored: Iterable[str], rules: Sequence[WeightRule], file: str
) -> dict[str, str]:
    """Canonical name -> name in the file. ModelFileError for a tensor that no rule knows."""
    names: dict[str, str] = {}
    for name in stored:
        found = next((c for c in (rule.canonical(name) for rule in rules) if c is not None), None)
        if found is None:
            raise ModelFileError(f"{file}: unexpected tensor {name!r}")
        if found:
            names[found] = name
    return names
