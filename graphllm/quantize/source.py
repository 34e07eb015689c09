"""What is quantised: the tensors of a model under GGUF's names, and its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from ..checkpoints.gguf import GgufCheckpoint
from ..checkpoints.gguf_writer import TensorEntry, read_encoded_metadata
from ..weights import NamedWeights
from .mixes import Model


class Source(Protocol):
    """A model to write as GGUF.

    Attributes:
        path: File or directory, for messages.
        metadata: Encoded values by key; see `gguf_writer.encode_value`.
        tensors: Tensors in the order of the file to write, with the dtypes that `raw` returns.
        model: What the mixes need to know.
        notes: Warnings, one line each.
    """

    path: Path
    metadata: dict[str, bytes]
    tensors: list[TensorEntry]
    model: Model
    notes: list[str]

    def raw(self, name: str) -> np.ndarray:
        """Return a tensor's bytes, uint8 [rows, row_bytes]. ModelFileError if it is unreadable."""

    def release(self, name: str) -> None:
        """Free the memory of the tensor's pages."""

    def stored_names(self, weight: str) -> list[str]:
        """Return the tensors whose rows are those of a weight, by its canonical name.

        Several ones if each is a matrix of the weight. ModelFileError: the architecture is unknown.
        """

    def close(self) -> None: ...


class GgufSource:
    """A GGUF file, single or split. All metadata are kept, for any architecture."""

    def __init__(self, file: GgufCheckpoint) -> None:
        self.path, self._file = file.path, file
        metadata = read_encoded_metadata(file.path)
        self.metadata = {k: v for k, v in metadata.items() if not k.startswith("split.")}
        for name in file.tensors:
            file.readable(name)
        self.tensors = [TensorEntry(t.name, t.shape, t.dtype) for t in file.tensors.values()]
        self.model = describe(file.architecture, _numbers(file), self.tensors)
        self.notes: list[str] = []

    @cached_property
    def _weights(self) -> NamedWeights:
        """The tensors under canonical names, for architectures that graphllm knows."""
        spec = self._file.spec()
        rules = spec.gguf_rules(spec.config(self._file.keys(spec)))
        return NamedWeights(self._file, rules, strict=True)

    def stored_names(self, weight: str) -> list[str]:
        return self._weights.row_sources(weight)

    def raw(self, name: str) -> np.ndarray:
        return self._file.raw(name)

    def release(self, name: str) -> None:
        self._file.release(name)

    def close(self) -> None:
        self._file.close()


def _numbers(file: GgufCheckpoint) -> dict[str, int]:
    """The metadata of the architecture that the mixes need; the first value of a list."""
    found = {}
    for key in ("block_count", "expert_count", "attention.head_count", "attention.head_count_kv"):
        value = file.metadata.get(f"{file.architecture}.{key}", 0)
        if isinstance(value, np.ndarray):
            value = value.max(initial=0)
        found[key] = int(value) if isinstance(value, (int, np.integer)) else 0
    return found


def describe(architecture: str, numbers: Mapping[str, int], tensors: list[TensorEntry]) -> Model:
    """Return what the mixes need to know; ``numbers``: by GGUF's keys without the architecture."""
    heads = numbers.get("attention.head_count", 0)
    shared = numbers.get("attention.head_count_kv", 0) or heads
    return Model(
        architecture,
        numbers.get("block_count", 0),
        numbers.get("expert_count", 0),
        heads // max(1, shared),
        frozenset(t.name for t in tensors),
    )
