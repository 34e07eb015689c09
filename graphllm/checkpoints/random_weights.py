"""Random weights of a named real shape, with no file: for speed, not for sense."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ..formats.quantization import quantise
from ..graph.dtype import DType
from ..weights.mapped_file import TensorInfo
from .gguf import GgufCheckpoint
from .model_shapes import ModelShape, metadata, model_shape, tensors

_SPREAD = 0.02  # standard deviation of a weight, as models are made
# Blocks that are drawn, by their length; the rest repeats them. They are primes, so that every row
# begins elsewhere: equal rows of a head would make many tokens as likely as the 40th likeliest.
_PATTERN = {1: 1_048_573, 32: 32_749, 256: 4_093}


class RandomCheckpoint(GgufCheckpoint):
    """What an open file of that shape would be, but for a vocabulary.

    Matrices of one format share their bytes, a repeated block of normally distributed numbers that
    is generated on first use. Norm weights are 1, biases 0.01. A RequestError for an unknown shape
    or type lists the known ones.

    Args:
        shape: A name of `model_shapes.SHAPES`, or a `ModelShape`.
        kind: One of `model_shapes.TYPES`.
    """

    has_vocabulary = False

    def __init__(self, shape: str | ModelShape, kind: str) -> None:
        name = shape if isinstance(shape, str) else shape.arch
        sizes = model_shape(shape) if isinstance(shape, str) else shape
        self.path = Path(f"random {name} {kind}")
        self.version = 3
        self.metadata = metadata(sizes, name, kind)
        self.tensors = {
            name: TensorInfo(name, dims, form, form.row_nbytes(math.prod(dims)), 0)
            for name, dims, form in tensors(sizes, kind)
        }
        self._bytes: dict[DType, np.ndarray] = {}

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [rows, row_bytes]; ModelFileError for a missing one."""
        info = self.info(name)
        if len(info.shape) == 1:
            value = 0.01 if name.endswith(".bias") else 1.0
            found = np.full(info.shape, value, np.float32).view(np.uint8)
        else:
            found = self._stored(info.dtype)[: info.nbytes]
        found.flags.writeable = False
        return found.reshape(math.prod(info.shape[:-1]), -1)

    def _stored(self, form: DType) -> np.ndarray:
        """Bytes for the largest matrix of the format."""
        if form not in self._bytes:
            most = max(t.nbytes for t in self.tensors.values() if t.dtype == form)
            self._bytes[form] = np.resize(random_bytes(form), most)
        return self._bytes[form]

    def release(self, name: str) -> None:
        """The bytes are shared and stay."""

    def close(self) -> None:
        """Nothing is open."""


def random_bytes(form: DType, seed: int = 0) -> np.ndarray:
    """Normal weights as the format stores them, uint8 [bytes of the `_PATTERN`]."""
    count = form.block * _PATTERN[form.block]
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(_SPREAD)
    if form.numpy is not None:
        return values.astype(form.numpy).view(np.uint8)
    return quantise(values.reshape(-1, form.block), form).reshape(-1)
