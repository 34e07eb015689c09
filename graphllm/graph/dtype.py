"""Element types and their registry.

A block format stores ``block`` consecutive elements of the last axis in ``nbytes`` bytes; a plain
dtype is a block of one element. A row format has a scale for each row, in the row's ``tail``.
`graphllm.formats` declares the formats of weights and of quantised activations, and adds their
dtypes to the registry.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..errors import GraphError


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. ``numpy`` is None for block formats and row formats."""

    name: str
    block: int  # elements per block; of a row format, what the elements of a row are a multiple of
    nbytes: int  # bytes per block
    numpy: np.dtype | None = None
    tail: int = 0  # bytes of a row after its blocks
    align: int = 1  # rows are padded with zeros to a multiple of this many bytes

    @property
    def quantised(self) -> bool:
        return self.numpy is None

    def row_nbytes(self, elements: int) -> int:
        """Return the bytes of a row of ``elements``. GraphError if these are not whole blocks."""
        if elements % self.block:
            blocks = f"whole {self.name} blocks of {self.block}"
            raise GraphError(f"{elements} elements are not {blocks}")
        return -(-(elements // self.block * self.nbytes + self.tail) // self.align) * self.align

    def __repr__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {}  # by name; `graphllm.formats` adds the block formats


def register(dtype: DType) -> DType:
    """Make ``dtype`` known by its name, and return it."""
    return DTYPES.setdefault(dtype.name, dtype)


def _plain(name: str, numpy: object) -> DType:
    np_dtype = np.dtype(numpy)  # type: ignore[call-overload]
    return register(DType(name, 1, np_dtype.itemsize, np_dtype))


F32 = _plain("f32", np.float32)
F16 = _plain("f16", np.float16)
BF16 = _plain("bf16", ml_dtypes.bfloat16)
F64 = _plain("f64", np.float64)
I8 = _plain("i8", np.int8)
I16 = _plain("i16", np.int16)
I32 = _plain("i32", np.int32)
I64 = _plain("i64", np.int64)

CACHED = ("f32", "f16", "q8_0", "q4_0", "fp8")  # dtypes of a KV cache


def dtype(name: str | DType) -> DType:
    """Return the dtype called ``name``. GraphError if there is none."""
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise GraphError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]
