"""Element types: plain ones, block-quantised weights, and quantised activations.

A block-quantised dtype stores ``block`` consecutive elements of the last axis in ``nbytes`` bytes;
a plain dtype is a block of one element. Block formats are GGUF's, bit for bit (source: ggml,
`ggml-common.h`); `graphllm.formats.quantization` holds their formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..errors import GraphError


@dataclass(frozen=True)
class DType:
    """One element type. Equal by name; ``numpy`` is None for block formats."""

    name: str
    block: int  # elements per block
    nbytes: int  # bytes per block
    numpy: np.dtype | None = None

    @property
    def quantised(self) -> bool:
        return self.numpy is None

    def row_nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` consecutive elements. GraphError if they are not whole blocks."""
        if elements % self.block:
            raise GraphError(
                f"{elements} elements are not whole {self.name} blocks of {self.block}"
            )
        return elements // self.block * self.nbytes

    def __repr__(self) -> str:
        return self.name


DTYPES: dict[str, DType] = {}


def _plain(name: str, numpy: object) -> DType:
    np_dtype = np.dtype(numpy)  # type: ignore[call-overload]
    return DTYPES.setdefault(name, DType(name, 1, np_dtype.itemsize, np_dtype))


def _blocks(name: str, block: int, nbytes: int) -> DType:
    return DTYPES.setdefault(name, DType(name, block, nbytes))


F32 = _plain("f32", np.float32)
F16 = _plain("f16", np.float16)
BF16 = _plain("bf16", ml_dtypes.bfloat16)
F64 = _plain("f64", np.float64)
I8 = _plain("i8", np.int8)
I16 = _plain("i16", np.int16)
I32 = _plain("i32", np.int32)
I64 = _plain("i64", np.int64)

Q4_0 = _blocks("q4_0", 32, 18)
Q4_1 = _blocks("q4_1", 32, 20)
Q5_0 = _blocks("q5_0", 32, 22)
Q5_1 = _blocks("q5_1", 32, 24)
Q8_0 = _blocks("q8_0", 32, 34)
Q2_K = _blocks("q2_k", 256, 84)
Q3_K = _blocks("q3_k", 256, 110)
Q4_K = _blocks("q4_k", 256, 144)
Q5_K = _blocks("q5_k", 256, 176)
Q6_K = _blocks("q6_k", 256, 210)
IQ4_NL = _blocks("iq4_nl", 32, 18)
IQ4_XS = _blocks("iq4_xs", 256, 136)
MXFP4 = _blocks("mxfp4", 32, 17)

# Quantised activations. Not a file format: an int8 value q with x ~= d * q, one f32 scale d a
# block, and sums of q for formats with an offset. A row of K elements is laid out in planes, so
# that a kernel streams each plane: K int8 values, then K/block f32 scales, then the sums (a8_32:
# one int32 per 32; a8_256: one int16 per 16).
A8_32 = _blocks("a8_32", 32, 32 + 4 + 4)
A8_256 = _blocks("a8_256", 256, 256 + 4 + 32)

CACHED = ("f32", "f16", "q8_0")  # what keys and values may be kept in


def dtype(name: str | DType) -> DType:
    """The dtype called ``name``. GraphError lists the known names otherwise."""
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise GraphError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]
