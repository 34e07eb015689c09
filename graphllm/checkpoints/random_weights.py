"""Checkpoints with random weights in the shape of a known model, for benchmarks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ..formats import ROW_FORMATS
from ..formats.quantization import quantise
from ..graph.dtype import DType
from ..graph.tensor import Meta
from ..weights.mapped_file import TensorInfo
from .gguf import GgufCheckpoint
from .model_shapes import ModelShape, metadata, model_shape, tensors

_SPREAD = 0.02  # standard deviation of the weights, typical of initialisation
# Number of random blocks that a tensor repeats, by elements of a block. Primes shift the pattern
# from row to row: with equal rows in the head many tokens would tie in probability.
_PATTERN = {1: 1_048_573, 32: 32_749, 128: 8_191, 256: 4_093}


class RandomCheckpoint(GgufCheckpoint):
    """A GGUF checkpoint without file and vocabulary.

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
            name: TensorInfo(name, dims, form, Meta.of(dims, form).nbytes, 0)
            for name, dims, form in tensors(sizes, kind)
        }
        self._bytes: dict[tuple[DType, int], np.ndarray] = {}

    def raw(self, name: str) -> np.ndarray:
        """Return the tensor's bytes, uint8 [rows, row_bytes]. ModelFileError if it is missing."""
        info = self.info(name)
        if len(info.shape) == 1:
            value = 0.01 if name.endswith(".bias") else 1.0
            found = np.full(info.shape, value, np.float32).view(np.uint8)
        else:
            found = self._stored(info)[: info.nbytes]
        found.flags.writeable = False
        return found.reshape(math.prod(info.shape[:-1]), -1)

    def _stored(self, info: TensorInfo) -> np.ndarray:
        """Return the bytes of the largest matrix of the format; of a row format, of those with
        rows of the same length."""
        form, columns = info.dtype, info.shape[-1] if info.dtype.name in ROW_FORMATS else 0
        if (form, columns) not in self._bytes:
            own = [t for t in self.tensors.values() if t.dtype == form]
            own = [t for t in own if columns in (0, t.shape[-1])]
            most = max(t.nbytes for t in own)
            pattern = random_rows(form, columns) if columns else random_bytes(form)
            self._bytes[form, columns] = np.resize(pattern, most)
        return self._bytes[form, columns]

    def release(self, name: str) -> None:
        """Do nothing: the bytes are shared."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def random_bytes(form: DType, seed: int = 0) -> np.ndarray:
    """Return normally distributed weights in the format, uint8 of `_PATTERN` blocks."""
    count = form.block * _PATTERN[form.block]
    values = np.random.default_rng(seed).standard_normal(count, np.float32) * np.float32(_SPREAD)
    if form.numpy is not None:
        return values.astype(form.numpy).view(np.uint8)
    return quantise(values.reshape(-1, form.block), form).reshape(-1)


def random_rows(form: DType, columns: int) -> np.ndarray:
    """Return normally distributed weights in a row format, uint8 of rows of ``columns``."""
    rows = -(-form.block * _PATTERN[form.block] // columns)
    values = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    return quantise(values * np.float32(_SPREAD), form).reshape(-1)
