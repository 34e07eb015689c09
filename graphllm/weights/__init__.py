"""Weight sources: names, shapes, dtypes and bytes of a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from ..errors import ModelFileError, quote
from ..formats.quantization import Blocks
from ..graph.dtype import F32
from ..graph.tensor import Meta
from .weight_rules import NamedWeights, WeightRule, plain_dtype

__all__ = ["Arrays", "ModelWeights", "NamedWeights", "WeightRule", "Weights"]

_FLOATS = ("f32", "f16", "bf16")


class Weights(Protocol):
    """A model's weights by canonical name, the Hugging Face path."""

    def meta(self, name: str) -> Meta | None:
        """Return shape and dtype; None if there is no such weight."""

    def raw(self, name: str) -> np.ndarray:
        """Return the stored bytes, read-only uint8 [rows, row_bytes]; a row is the last axis."""

    def release(self, name: str) -> None:
        """Free the memory of the stored bytes where possible; they can be read again."""

    def names(self) -> Iterable[str]: ...


class Arrays:
    """Weights held as NumPy arrays, or as `Blocks` for block formats."""

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
        return Meta.of(value.shape, plain_dtype(value))

    def raw(self, name: str) -> np.ndarray:
        value = self._arrays[name]
        if isinstance(value, Blocks):
            return value.raw.reshape(-1, value.raw.shape[-1])
        width = value.shape[-1] if value.ndim else 1
        return np.ascontiguousarray(value).reshape(-1, width).view(np.uint8)

    def release(self, name: str) -> None:
        pass


class ModelWeights:
    """Weights of a source as a model uses them.

    Vectors (norm weights, biases) are upcast to float32. Constants that the model computes itself
    can be read as well, but are not among the `names`.
    """

    def __init__(self, weights: Weights) -> None:
        self.source = weights
        self._constants: dict[str, np.ndarray] = {}
        self._vectors: set[str] = set()

    def add(self, name: str, values: np.ndarray) -> None:
        """Add a constant. ModelFileError if another weight has the name."""
        if self.source.meta(name) is not None or not np.array_equal(
            self._constants.setdefault(name, values), values
        ):
            raise ModelFileError(f"constant {quote(name)} has the name of another weight")

    def add_vector(self, name: str) -> bool:
        """Mark a weight as a vector, which `raw` returns as finite float32.

        Returns:
            False if the weight is not stored as floats.
        """
        meta = self.source.meta(name)
        if meta is None or meta.dtype.name not in _FLOATS:
            return False
        self._vectors.add(name)
        return True

    def is_rotated(self, name: str) -> bool:
        """Return whether the source has rotated the rows of a matrix; see `ops.hadamard`."""
        found = getattr(self.source, "is_rotated", None)
        return found is not None and found(name)

    def names(self) -> Iterable[str]:
        return self.source.names()

    def meta(self, name: str) -> Meta | None:
        if name in self._constants:
            return Meta.of(self._constants[name].shape, plain_dtype(self._constants[name]))
        stored = self.source.meta(name)
        return Meta.of(stored.shape, F32) if stored and name in self._vectors else stored

    def raw(self, name: str) -> np.ndarray:
        """See `Weights.raw`. ModelFileError if a vector holds NaN or infinity."""
        if name in self._constants:
            return Arrays(self._constants).raw(name)
        raw, stored = self.source.raw(name), self.source.meta(name)
        if name not in self._vectors:
            return raw
        assert stored is not None and stored.dtype.numpy is not None
        with np.errstate(invalid="ignore"):  # raised by signalling NaN
            values = np.ascontiguousarray(raw).view(stored.dtype.numpy)
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            at = tuple(map(int, np.argwhere(~np.isfinite(values))[0]))
            index = at[-1] + at[0] * values.shape[-1]
            value = str(values[at]).replace("nan", "NaN")
            raise ModelFileError(
                f"tensor {quote(name)}: element {index} of {values.size} is {value}"
            )
        return values.view(np.uint8)

    def release(self, name: str) -> None:
        if name not in self._constants:
            self.source.release(name)
