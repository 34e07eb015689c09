"""A linear of a published checkpoint: its stored tensors, checked, and its weight as one tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from ...errors import ModelFileError, quote
from ...formats.quantization import dequantise
from ...graph.dtype import I32, DType
from ...graph.tensor import Meta
from ...weights.mapped_file import TensorInfo
from ...weights.safetensors import Safetensors

Array = np.ndarray
_FLOATS = ("f32", "f16", "bf16")


def modules_with(file: Safetensors, part: str) -> Iterator[str]:
    """Yield the modules of a file that have a tensor ``part``."""
    suffix = f".{part}"
    for name in file.tensors:
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


class StoredLinear(ABC):
    """A weight [N, K] that several tensors of a file make up.

    The constructors of subclasses check shapes and dtypes; `raw` checks values. Errors are
    ModelFileErrors that name the tensor.

    Attributes:
        module: Path of the module; the weight is called ``{module}.weight``.
        parts: Suffixes of the module's tensors that the weight replaces.
        shape: [N, K].
        dtype: Format of the weight.
        inexact_scales: Number of scales that lost precision, known after `raw`.
        order: int32 [K], the stored column of each column of the weight; None: the same order.
    """

    dtype: DType
    shape: tuple[int, int]
    inexact_scales = 0
    order: Array | None = None

    def __init__(self, file: Safetensors, module: str, parts: tuple[str, ...]) -> None:
        self.file, self.module = file, module
        self.parts = tuple(part for part in parts if self.name(part) in file.tensors)

    @property
    def info(self) -> TensorInfo:
        """Description of the weight as a tensor; it has no offset in a file."""
        nbytes = Meta.of(self.shape, self.dtype).nbytes
        return TensorInfo(self.name("weight"), self.shape, self.dtype, nbytes, 0)

    @abstractmethod
    def raw(self) -> Array:
        """Return the weight's bytes, read-only uint8 [N, row_bytes]."""

    def name(self, part: str) -> str:
        return f"{self.module}.{part}"

    def has(self, part: str) -> bool:
        return part in self.parts

    def error(self, part: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: tensor {quote(self.name(part))}: {text}")

    def tensor(self, part: str, shape: tuple[int, ...] | None, *dtypes: str) -> TensorInfo:
        """Return a tensor's description after a check of its shape and dtype."""
        if self.name(part) not in self.file.tensors:
            raise self.error(part, "missing")
        info = self.file.readable(self.name(part))
        if info.dtype.name not in dtypes:
            raise self.error(part, f"is {info.dtype}, not {' or '.join(dtypes)}")
        if shape is not None and info.shape != shape:
            raise self.error(part, f"has shape {list(info.shape)}, not {list(shape)}")
        return info

    def check_floats(self, part: str, shape: tuple[int, ...]) -> None:
        self.tensor(part, shape, *_FLOATS)

    def integers(self, part: str) -> Array:
        """Return a view of a tensor of integers in its shape, int32 as uint32."""
        info = self.file.info(self.name(part))
        kind = np.dtype("<u4") if info.dtype is I32 else info.dtype.numpy
        assert kind is not None
        return self.file.raw(self.name(part)).view(kind).reshape(info.shape)

    def floats(self, part: str) -> Array:
        """Return a tensor of floats as float32 in its shape."""
        info = self.file.info(self.name(part))
        with np.errstate(invalid="ignore"):  # raised by signalling NaN
            return dequantise(self.file.raw(self.name(part)), info.dtype).reshape(info.shape)

    def release(self) -> None:
        """Release the pages of the module's tensors from memory."""
        for part in self.parts:
            self.file.release(self.name(part))
