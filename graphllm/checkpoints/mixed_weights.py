"""Model files with some of their weights replaced by those of another source."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ..graph.tensor import Meta
from ..weights import Weights
from .checkpoint import Checkpoint
from .quantize_on_load import QuantizedWeights, kept_as_stored

if TYPE_CHECKING:
    from ..model.config import DecoderConfig
    from ..model.spec import ModelSpec

# Returns the weights of a model from those of its file.
Change = Callable[[Weights, "ModelSpec", "DecoderConfig"], Weights]


class MixedWeights:
    """Weights of one source, except those of ``names``, which come from another one."""

    def __init__(self, weights: Weights, other: Weights, names: Collection[str]) -> None:
        self._weights, self._other, self._names = weights, other, names

    def _source(self, name: str) -> Weights:
        return self._other if name in self._names else self._weights

    def names(self) -> Iterable[str]:
        return self._weights.names()

    def meta(self, name: str) -> Meta | None:
        return self._source(name).meta(name)

    def raw(self, name: str) -> np.ndarray:
        return self._source(name).raw(name)

    def release(self, name: str) -> None:
        self._source(name).release(name)


class _ChangedCheckpoint:
    """An open model file, whose weights go through ``change``."""

    def __init__(self, file: Checkpoint, change: Change) -> None:
        self._file, self._change = file, change

    def weights(self, spec: ModelSpec, config: DecoderConfig) -> Weights:
        return self._change(self._file.weights(spec, config), spec, config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def quantized_checkpoint(file: Checkpoint, kind: str) -> Checkpoint:
    """Return a model file whose float matrices have the format ``kind``.

    RequestError from its ``weights``: the format is unknown.
    """

    def change(weights: Weights, spec: ModelSpec, config: DecoderConfig) -> Weights:
        return QuantizedWeights(weights, kind, kept_as_stored(config, kind))

    return cast(Checkpoint, _ChangedCheckpoint(file, change))


def mixed_checkpoint(file: Checkpoint, other: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Return a model file with the weights ``names``, canonical ones, of another file."""

    def change(weights: Weights, spec: ModelSpec, config: DecoderConfig) -> Weights:
        return MixedWeights(weights, other.weights(spec, config), names)

    return cast(Checkpoint, _ChangedCheckpoint(file, change))
